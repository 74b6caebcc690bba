"""verl's losses of distillation against this library's, for the options that both have: ``verl-parity.json``.

    python benchmarks/verl_parity.py       # in an environment with verl 0.9.1, tensordict, ray and logitless

verl's ``distillation_ppo_loss`` runs as installed, on the log-probs and logits of a small student and teacher. Its
losses and gradients go into the file, so that a test compares with them where verl is not installed.

verl's ``abs``, and other modes than ``k1`` as advantages, have no counterpart here. With a ``topk`` below V verl leaves
the tail out, which a teacher's ``top_k`` here counts as one token.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitless.bench.parity import FLOAT32, FLOAT64, Measured, Row, row
from logitless.head import token_divergence
from logitless.objective.distillation import Distillation, teacher_advantage
from logitless.objective.divergence import KLPenalty
from logitless.objective.objective import Objective
from logitless.objective.surrogate import Clip, Reinforce
from logitless.objective.weighting import ConstantLength, SequenceMean, SequenceSum, TokenMean, Totals
from logitless.types import LMHead, TokenBatch
from script import command_line, parsed, record

RESULT = "verl-parity.json"
LENGTHS, PROMPT, WIDTH, WIDTH_OF_TEACHER, VOCABULARY, TEMPERATURE = (3, 2, 4), 2, 3, 4, 11, 0.7
COEFFICIENT = 0.5
WEIGHTINGS = {
    "token-mean": TokenMean(),
    "seq-mean-token-mean": SequenceMean(),
    "seq-mean-token-sum": SequenceSum(),
    "seq-mean-token-sum-norm": ConstantLength(max(LENGTHS)),  # verl's loss_scale_factor: the padded width
}


@dataclass(frozen=True)
class Options:
    """What both sides compute.

    Args:
        loss_mode: verl's.
        policy_gradient: whether the divergence is an advantage.
        task_rewards: whether rewards are learnt beside the teacher, at ``COEFFICIENT``.
        weighting: verl's ``loss_agg_mode``.
        first_step: whether the ratio is 1.
    """

    loss_mode: str
    policy_gradient: bool = False
    task_rewards: bool = False
    weighting: str = "token-mean"
    first_step: bool = False

    @property
    def name(self) -> str:
        """Of the row."""
        parts = [self.loss_mode, *(["use_policy_gradient"] if self.policy_gradient else [])]
        parts += ["use_task_rewards"] if self.task_rewards else []
        return ", ".join([*parts, self.weighting])

    @property
    def tolerance(self) -> float:
        """verl takes ``forward_kl_topk`` in float32."""
        return FLOAT32 if self.loss_mode == "forward_kl_topk" else FLOAT64


OPTIONS = (
    *(Options("k1", policy_gradient=True, weighting=weighting) for weighting in WEIGHTINGS),
    # Clipped losses of two advantages add up where nothing is clipped alone.
    Options("k1", policy_gradient=True, task_rewards=True, first_step=True),
    *(Options(mode, weighting=weighting) for mode in ("k2", "k3") for weighting in WEIGHTINGS),
    *(Options(mode, task_rewards=True) for mode in ("k2", "k3")),
    *(Options("forward_kl_topk", weighting=weighting) for weighting in WEIGHTINGS),
    Options("forward_kl_topk", task_rewards=True),
)


@dataclass
class Streams:
    """Student and teacher on the trained tokens, from Python's random numbers, the same with every version of torch.

    Their log-probs are so near that verl does not clamp ``k3``, which it does at 10.
    """

    numbers: random.Random = field(default_factory=partial(random.Random, 0))

    def __post_init__(self) -> None:
        size = sum(LENGTHS)
        self.hidden, self.weight = 0.25 * self._normal(size, WIDTH), self._normal(VOCABULARY, WIDTH)
        self.teacher_hidden = 0.25 * self._normal(size, WIDTH_OF_TEACHER)
        self.teacher_weight = self._normal(VOCABULARY, WIDTH_OF_TEACHER)
        self.target = torch.tensor([self.numbers.randrange(VOCABULARY) for _ in range(size)])
        self.reward = self._normal(size)
        self.moved = 0.4 * self._normal(size)
        self.hidden.requires_grad_()
        self.weight.requires_grad_()

    def _normal(self, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.tensor([self.numbers.gauss(0, 1) for _ in range(count)], dtype=torch.float64).reshape(shape)

    @property
    def logits(self) -> tuple[Tensor, Tensor]:
        """[N, V] of student and teacher, at the temperature."""
        own, other = self.hidden @ self.weight.T, self.teacher_hidden @ self.teacher_weight.T
        return own / TEMPERATURE, other / TEMPERATURE

    @property
    def logp(self) -> tuple[Tensor, Tensor]:
        """[N] of the targets, of student and teacher."""
        own, other = (each.log_softmax(1).gather(1, self.target[:, None]).squeeze(1) for each in self.logits)
        return own, other

    def logp_old(self, options: Options) -> Tensor:
        """[N] of the weights that sampled: another policy, or on the first step the same."""
        logp = self.logp[0].detach()
        return logp if options.first_step else logp + self.moved


def measured(loss_of: Callable[[Streams, Options], Tensor], options: Options) -> Measured:
    """Loss and gradients of the student's hidden states and head."""
    streams = Streams()
    loss = loss_of(streams, options)
    gradients = torch.autograd.grad(loss, (streams.hidden, streams.weight))
    return Measured((loss.item(),), gradients, scales=(abs(loss.item()),))


def ours(streams: Streams, options: Options) -> Tensor:
    """This library's loss."""
    logp, logp_teacher = streams.logp
    advantage, weight = streams.reward if options.task_rewards else torch.zeros_like(logp.detach()), 1.0
    surrogate: Any = Clip(0.8, 1.2, dual=3.0) if options.policy_gradient or options.task_rewards else Reinforce()
    kl = None
    if options.task_rewards:
        weight = COEFFICIENT
    if options.policy_gradient:
        advantage = advantage + teacher_advantage(logp_teacher, logp.detach(), weight)
    elif options.loss_mode in ("k2", "k3"):
        kl = KLPenalty(options.loss_mode)
    weights = WEIGHTINGS[options.weighting](LENGTHS, Totals.of(LENGTHS), None, torch.float64)
    sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    batch = TokenBatch(sequence, len(LENGTHS), advantage, weights, streams.logp_old(options), logp_ref=logp_teacher)
    loss = Objective(surrogate=surrogate, kl=kl)(logp, None, batch, beta=weight if kl else 0.0).loss
    if options.loss_mode != "forward_kl_topk":
        return loss
    found = token_divergence(
        streams.hidden,
        LMHead(streams.weight),
        streams.teacher_hidden,
        LMHead(streams.teacher_weight),
        kind="forward_kl",
        temperature=TEMPERATURE,
        backend="chunked",
    )
    return loss + Distillation(weight=weight).loss(found.divergence, batch).loss


def theirs(streams: Streams, options: Options) -> Tensor:
    """verl's loss, of its installed code."""
    from tensordict import TensorDict
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.utils import tensordict_utils
    from verl.workers.config import ActorConfig, DistillationConfig, DistillationLossConfig

    actor = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=options.weighting,
        use_torch_compile=False,
    )
    loss = DistillationLossConfig(
        loss_mode=options.loss_mode,
        topk=VOCABULARY,
        use_task_rewards=options.task_rewards,
        distillation_loss_coef=COEFFICIENT,
        loss_max_clamp=None,
        log_prob_min_clamp=None,
        use_policy_gradient=options.policy_gradient,
    )
    distillation = DistillationConfig()
    object.__setattr__(distillation, "distillation_loss", loss)
    logp, logp_teacher = streams.logp
    offsets = torch.tensor([0, *accumulate(PROMPT + length for length in LENGTHS)])

    def whole(values: Tensor) -> Tensor:
        """A value at the position that predicts each response token; zeros at the others."""
        parts = []
        for mine in values.split(LENGTHS):
            rest = [mine.new_zeros(count, *mine.shape[1:]) for count in (PROMPT - 1, 1)]
            parts += [rest[0], mine, rest[1]]
        return torch.cat(parts)

    def nested(values: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(whole(values), offsets=offsets)

    def padded(values: Tensor) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(values.split(LENGTHS), batch_first=True)

    mask = padded(torch.ones(sum(LENGTHS), dtype=torch.bool))
    prompts = torch.ones(len(LENGTHS), PROMPT, dtype=torch.long)
    data = TensorDict(
        {
            "prompts": prompts,
            "responses": padded(streams.target),
            "attention_mask": torch.cat([prompts.bool(), mask], 1),
            "response_mask": mask,
            "old_log_probs": padded(streams.logp_old(options)),
            "advantages": padded(streams.reward),
        },
        batch_size=[len(LENGTHS)],
    )
    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=None, global_batch_size=None)
    output = {"log_probs": whole(logp)}
    if options.loss_mode == "forward_kl_topk":
        own, other = streams.logits
        ids = torch.arange(VOCABULARY).expand(sum(LENGTHS), -1)
        of_tokens = {"teacher_logprobs": nested(other.log_softmax(1)), "teacher_ids": nested(ids)}
        output |= distillation_ppo_loss(
            actor, distillation, data=TensorDict(of_tokens, batch_size=[]), student_logits=whole(own)[None]
        )
        output = {name: value.squeeze(0) if name != "log_probs" else value for name, value in output.items()}
    else:
        data["teacher_logprobs"] = nested(logp_teacher[:, None])
    found: Tensor = distillation_ppo_loss(actor, distillation, output, data)[0]
    return found


def compared(options: Options, of_verl: Measured) -> Row:
    """The differences of this library's loss and gradients from verl's."""
    return row(options.name, "verl", of_verl, measured(ours, options), options.tolerance)


def as_json(found: Measured) -> dict[str, Any]:
    """Loss and gradients as numbers."""
    return {"loss": found.losses[0], "gradients": [each.tolist() for each in found.gradients]}


def of_json(given: dict[str, Any]) -> Measured:
    """What ``as_json`` wrote."""
    gradients = tuple(torch.tensor(each, dtype=torch.float64) for each in given["gradients"])
    return Measured((given["loss"],), gradients)


def main() -> None:
    """Run both and write the differences, beside verl's own numbers."""
    options = parsed(command_line(__doc__), None)
    runs = []
    for each in OPTIONS:
        of_verl = measured(theirs, each)
        runs.append({**compared(each, of_verl).as_json(), "verl": as_json(of_verl)})
        print({name: value for name, value in runs[-1].items() if name != "verl"}, flush=True)
    versions = {name: version(name) for name in ("verl", "tensordict")}
    record(runs, Path(options.output) / RESULT, versions=versions)


if __name__ == "__main__":
    main()
