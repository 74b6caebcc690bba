"""TRL's installed losses of distillation against this library's, on the same hidden states, heads and log-probs.

``generalized_jsd_loss`` of ``GKDTrainer``; the loss of ``DistillationTrainer``, which computes in float32; SDPO's over
the vocabulary and of the sampled token; and that of ``IWOPDTrainer``.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from logitless.bench.parity import FLOAT32, FLOAT64, Measured, Row, row
from logitless.head import token_divergence, token_scores
from logitless.objective.distillation import Distillation, prefix_weight, teacher_advantage
from logitless.objective.presets import algorithm
from logitless.types import LMHead, TokenBatch

LENGTHS, WIDTH, WIDTH_OF_TEACHER, VOCABULARY, TEMPERATURE, GAMMA = (5, 2, 7), 8, 12, 31, 0.7, 0.5


class _Streams:
    """A student, a teacher and padded completions; [B, T] is padded, [N] are the trained tokens."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        size = (len(LENGTHS), max(LENGTHS))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.hidden = normal(*size, WIDTH).requires_grad_()
        self.weight = normal(VOCABULARY, WIDTH).requires_grad_()
        self.teacher_hidden, self.teacher_weight = normal(*size, WIDTH_OF_TEACHER), normal(VOCABULARY, WIDTH_OF_TEACHER)
        self.target = torch.randint(VOCABULARY, size, generator=generator)
        self.trained = torch.arange(size[1]) < torch.tensor(LENGTHS)[:, None]
        self.labels = torch.where(self.trained, self.target, -100)
        self.logp_sampler = -3 * torch.rand(size, generator=generator, dtype=torch.float64).to(dtype)

    @property
    def logits(self) -> tuple[Tensor, Tensor]:
        """[B, T, V] of both."""
        return self.hidden @ self.weight.T, self.teacher_hidden @ self.teacher_weight.T

    def batch(self, advantage: Tensor | None = None) -> TokenBatch:
        """The trained tokens under the token mean."""
        sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
        none = self.logp_sampler.new_zeros(len(sequence))
        weight = torch.full_like(none, 1 / len(sequence))
        return TokenBatch(sequence, len(LENGTHS), none if advantage is None else advantage, weight)

    def divergence(self, beta: float) -> Tensor:
        """The term that a teacher adds to the loss."""
        found = token_divergence(
            self.hidden[self.trained],
            LMHead(self.weight),
            self.teacher_hidden[self.trained],
            LMHead(self.teacher_weight),
            kind="jensen_shannon",
            beta=beta,
            temperature=TEMPERATURE,
            backend="chunked",
        )
        return Distillation(weight=1.0).loss(found.divergence, self.batch()).loss

    def reinforce(self, gamma: float, *, at_current_weights: bool) -> Tensor:
        """REINFORCE with a teacher's advantage.

        Args:
            at_current_weights: take the student's log-probs for the sampler's.
        """
        target, warmth = self.target[self.trained], TEMPERATURE
        logp, logp_teacher = (
            token_scores(hidden[self.trained], LMHead(weight), target, temperature=warmth, backend="chunked").logp
            for hidden, weight in ((self.hidden, self.weight), (self.teacher_hidden, self.teacher_weight))
        )
        sampler = logp.detach() if at_current_weights else self.logp_sampler[self.trained]
        advantage = teacher_advantage(logp_teacher, sampler)
        if gamma:
            advantage = advantage * prefix_weight(advantage, self.batch().sequence, gamma)
        return algorithm("reinforce").objective(logp, None, self.batch(advantage)).loss


def distillation_rows() -> Iterator[Row]:
    """A row for each loss; TRL 1.16 or later must be installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that what is experimental may change
        from trl.experimental.gkd import GKDTrainer
        from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer
        from trl.experimental.sdpo import loss_utils
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    def of_gkd(beta: float) -> Callable[[_Streams], Tensor]:
        return lambda s: GKDTrainer.generalized_jsd_loss(*s.logits, labels=s.labels, beta=beta, temperature=TEMPERATURE)

    def of_distillation(beta: float) -> Callable[[_Streams], Tensor]:
        return lambda s: _chunked_divergence_loss(
            *(s.hidden, s.teacher_hidden, s.weight, s.teacher_weight, s.trained), beta, temperature=TEMPERATURE
        )[0]

    def of_sdpo(alpha: float) -> Callable[[_Streams], Tensor]:
        return lambda s: loss_utils.compute_full_logit_self_distillation_loss(
            *(each[s.trained] / TEMPERATURE for each in s.logits), distillation_alpha=alpha
        ).mean()

    def of_sdpo_tokens(s: _Streams) -> Tensor:
        ids, logits = s.target[s.trained], (each[s.trained] / TEMPERATURE for each in s.logits)
        loss: Tensor = loss_utils.compute_sampled_token_self_distillation_loss(*logits, ids, distillation_alpha=1.0)
        return loss.mean()

    def of_iw_opd(s: _Streams) -> Tensor:
        trainer = SimpleNamespace(temperature=TEMPERATURE, iw_opd_gamma=GAMMA, iw_opd_epsilon=1e-8)
        trainer.model, trainer._metrics = SimpleNamespace(training=True), {"train": defaultdict(list)}
        student, teacher = s.logits
        of_teacher = (teacher / TEMPERATURE).log_softmax(-1).gather(2, s.target[:, :, None]).squeeze(2)
        loss: Tensor = IWOPDTrainer._compute_iw_opd_loss(
            trainer, student, s.target, s.labels, of_teacher, s.logp_sampler
        )
        return loss

    def compared(name: str, theirs: Callable[[_Streams], Tensor], ours: Callable[[_Streams], Tensor]) -> Row:
        dtype = torch.float32 if name.startswith("DistillationTrainer") else torch.float64
        tolerance = FLOAT32 if dtype == torch.float32 else FLOAT64
        return row(name, "trl", _measured(theirs, dtype), _measured(ours, dtype), tolerance)

    for beta in (0.0, 0.3, 1.0):

        def ours(s: _Streams, beta: float = beta) -> Tensor:
            return s.divergence(beta)

        yield compared(f"GKDTrainer, beta {beta:g}", of_gkd(beta), ours)
        yield compared(f"DistillationTrainer, beta {beta:g}", of_distillation(beta), ours)
        yield compared(f"SDPO, full_logits, alpha {beta:g}", of_sdpo(beta), ours)
    yield compared("SDPO, sampled_token", of_sdpo_tokens, lambda s: s.reinforce(0.0, at_current_weights=True))
    yield compared("IWOPDTrainer", of_iw_opd, lambda s: s.reinforce(GAMMA, at_current_weights=False))


def _measured(loss_of: Callable[[_Streams], Tensor], dtype: torch.dtype) -> Measured:
    streams = _Streams(dtype)
    loss = loss_of(streams)
    gradients = torch.autograd.grad(loss, (streams.hidden, streams.weight))
    return Measured((loss.item(),), gradients, scales=(abs(loss.item()),))
