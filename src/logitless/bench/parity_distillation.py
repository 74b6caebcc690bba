"""TRL's installed losses of distillation against this library's, on the same hidden states, heads and log-probs.

``generalized_jsd_loss`` of ``GKDTrainer``; the losses of ``DistillationTrainer``, which computes in float32, of
``ServerDistillationTrainer`` over a server's likeliest tokens, and of ``IWOPDTrainer``; SDPO's over the vocabulary,
over the likeliest tokens and of the sampled token.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from logitless.bench.parity import FLOAT32, FLOAT64, Measured, Row, row
from logitless.head import token_divergence, token_scores, truncated_divergence
from logitless.objective.distillation import Distillation, prefix_weight, teacher_advantage
from logitless.objective.presets import algorithm
from logitless.types import LMHead, TokenBatch

LENGTHS, WIDTH, WIDTH_OF_TEACHER, VOCABULARY, TEMPERATURE, GAMMA = (5, 2, 7), 8, 12, 31, 0.7, 0.5
TOP_K, OF_ALL_RANKS = 4, 40  # likeliest tokens, and the tokens of a step of several processes
SCALE, SOFTCAP = (0.5, 1.5), (4.0, 6.0)


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
        self.biases = normal(VOCABULARY), normal(VOCABULARY)

    @property
    def logits(self) -> tuple[Tensor, Tensor]:
        """[B, T, V] of both."""
        return self.hidden @ self.weight.T, self.teacher_hidden @ self.teacher_weight.T

    @property
    def whole_heads(self) -> tuple[LMHead, LMHead]:
        """Of both, with a bias, a scale and a softcap."""
        own, other = zip(self.biases, SCALE, SOFTCAP, strict=True)
        return LMHead(self.weight, *own), LMHead(self.teacher_weight, *other)

    def batch(self, advantage: Tensor | None = None, *, num_tokens: int | None = None) -> TokenBatch:
        """The trained tokens under the token mean; ``num_tokens``: of all processes, None for these alone."""
        sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
        none = self.logp_sampler.new_zeros(len(sequence))
        weight = torch.full_like(none, 1 / (num_tokens or len(sequence)))
        return TokenBatch(sequence, len(LENGTHS), none if advantage is None else advantage, weight)

    def divergence(self, beta: float, *, whole: bool = False, num_tokens: int | None = None) -> Tensor:
        """The term that a teacher adds to the loss; ``whole``: of ``whole_heads``."""
        own, other = self.whole_heads if whole else (LMHead(self.weight), LMHead(self.teacher_weight))
        found = token_divergence(
            self.hidden[self.trained],
            own,
            self.teacher_hidden[self.trained],
            other,
            kind="jensen_shannon",
            beta=beta,
            temperature=TEMPERATURE,
            backend="chunked",
        )
        return Distillation(weight=1.0).loss(found.divergence, self.batch(num_tokens=num_tokens)).loss

    def truncated(self, beta: float, *, of_teacher: bool) -> Tensor:
        """The term over the tokens that the teacher, or the student, finds likeliest, and all others as one."""
        own, other = (each[self.trained].detach() / TEMPERATURE for each in self.logits)
        ids = (other if of_teacher else own).topk(TOP_K).indices
        found = truncated_divergence(
            self.hidden[self.trained],
            self.weight,
            ids,
            other.log_softmax(-1).gather(1, ids),
            kind="jensen_shannon",
            beta=beta,
            temperature=TEMPERATURE,
            backend="chunked",
        )
        return Distillation(weight=1.0).loss(found.divergence, self.batch()).loss

    def reinforce(self, gamma: float, *, at_current_weights: bool) -> Tensor:
        """REINFORCE with a teacher's advantage, against the sampler's log-probs or the student's own."""
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


class _Trl:
    """TRL's losses of the streams; 1.16 or later must be installed."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that what is experimental may change
            from trl.experimental.gkd import GKDTrainer
            from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer
            from trl.experimental.sdpo import loss_utils
            from trl.experimental.server_distillation import ServerDistillationTrainer
        from trl.trainer.distillation_trainer import _chunked_divergence_loss

        self._gkd, self._iw_opd, self._server = GKDTrainer, IWOPDTrainer, ServerDistillationTrainer
        self._sdpo = loss_utils
        self._chunked = _chunked_divergence_loss

    def gkd(self, s: _Streams, beta: float) -> Tensor:
        return self._gkd.generalized_jsd_loss(*s.logits, labels=s.labels, beta=beta, temperature=TEMPERATURE)

    def distillation(self, s: _Streams, beta: float, *, whole: bool = False, **options: Any) -> Tensor:
        if whole:
            for name, each in zip(("student", "teacher"), s.whole_heads, strict=True):
                options |= {f"{name}_lm_head_bias": each.bias, f"{name}_logit_scale": each.scale}
                options[f"{name}_final_logit_softcapping"] = each.softcap
        streams = (s.hidden, s.teacher_hidden, s.weight, s.teacher_weight, s.trained)
        return self._chunked(*streams, beta, temperature=TEMPERATURE, **options)[0]

    def server(self, s: _Streams) -> Tensor:
        trainer = SimpleNamespace(loss_add_tail=True, _reduce_divergence_loss=self._server._reduce_divergence_loss)
        student, teacher = ((each / TEMPERATURE).log_softmax(-1) for each in s.logits)
        logp, ids = teacher.topk(TOP_K)
        likeliest = {"topk_logprobs": logp, "topk_token_ids": ids}
        return self._server._compute_server_forward_kl_loss(trainer, likeliest, student, s.labels)

    def sdpo(self, s: _Streams, alpha: float) -> Tensor:
        streams = (each[s.trained] / TEMPERATURE for each in s.logits)
        return self._sdpo.compute_full_logit_self_distillation_loss(*streams, distillation_alpha=alpha).mean()

    def sdpo_likeliest(self, s: _Streams, alpha: float) -> Tensor:
        options = {"distillation_topk": TOP_K, "distillation_alpha": alpha, "distillation_add_tail": True}
        streams = (each[s.trained] / TEMPERATURE for each in s.logits)
        return self._sdpo.compute_topk_self_distillation_loss(*streams, **options).mean()

    def sdpo_tokens(self, s: _Streams) -> Tensor:
        ids, logits = s.target[s.trained], (each[s.trained] / TEMPERATURE for each in s.logits)
        return self._sdpo.compute_sampled_token_self_distillation_loss(*logits, ids, distillation_alpha=1.0).mean()

    def iw_opd(self, s: _Streams) -> Tensor:
        trainer = SimpleNamespace(temperature=TEMPERATURE, iw_opd_gamma=GAMMA, iw_opd_epsilon=1e-8)
        trainer.model, trainer._metrics = SimpleNamespace(training=True), {"train": defaultdict(list)}
        student, teacher = s.logits
        of_teacher = (teacher / TEMPERATURE).log_softmax(-1).gather(2, s.target[:, :, None]).squeeze(2)
        return self._iw_opd._compute_iw_opd_loss(trainer, student, s.target, s.labels, of_teacher, s.logp_sampler)


def distillation_rows() -> Iterator[Row]:
    """A row for each loss."""
    trl = _Trl()

    def compared(name: str, theirs: Callable[[_Streams], Tensor], ours: Callable[[_Streams], Tensor]) -> Row:
        dtype = torch.float32 if name.startswith("DistillationTrainer") else torch.float64
        tolerance = FLOAT32 if dtype == torch.float32 else FLOAT64
        return row(name, "trl", _measured(theirs, dtype), _measured(ours, dtype), tolerance)

    for beta in (0.0, 0.3, 1.0):
        ours = partial(_Streams.divergence, beta=beta)
        yield compared(f"GKDTrainer, beta {beta:g}", partial(trl.gkd, beta=beta), ours)
        yield compared(f"DistillationTrainer, beta {beta:g}", partial(trl.distillation, beta=beta), ours)
        yield compared(f"SDPO, full_logits, alpha {beta:g}", partial(trl.sdpo, alpha=beta), ours)
        yield compared(
            f"SDPO, topk_logits with a tail, alpha {beta:g}",
            partial(trl.sdpo_likeliest, alpha=beta),
            partial(_Streams.truncated, beta=beta, of_teacher=False),
        )
    yield compared(
        "DistillationTrainer, bias, scale and softcap",
        partial(trl.distillation, beta=0.3, whole=True),
        partial(_Streams.divergence, beta=0.3, whole=True),
    )
    yield compared(
        "DistillationTrainer, num_items_in_batch",
        partial(trl.distillation, beta=1.0, num_items_in_batch=OF_ALL_RANKS),
        partial(_Streams.divergence, beta=1.0, num_tokens=OF_ALL_RANKS),
    )
    name = f"ServerDistillationTrainer, loss_top_k {TOP_K}"
    yield compared(name, trl.server, partial(_Streams.truncated, beta=0.0, of_teacher=True))
    reinforce = _Streams.reinforce
    yield compared("SDPO, sampled_token", trl.sdpo_tokens, partial(reinforce, gamma=0.0, at_current_weights=True))
    yield compared("IWOPDTrainer", trl.iw_opd, partial(reinforce, gamma=GAMMA, at_current_weights=False))


def _measured(loss_of: Callable[[_Streams], Tensor], dtype: torch.dtype) -> Measured:
    streams = _Streams(dtype)
    loss = loss_of(streams)
    gradients = torch.autograd.grad(loss, (streams.hidden, streams.weight))
    return Measured((loss.item(),), gradients, scales=(abs(loss.item()),))
