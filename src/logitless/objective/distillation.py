"""Distillation: a teacher's divergence as a term of the loss, and its log-probs as advantages.

    loss += weight * sum_t w_t D_t
    A_t  += advantage * u_t * sg(logp_teacher_t - logp_sampler_t)

``w_t`` are the weights of the policy loss, so that the cut of a step into micro-batches and ranks
changes nothing. ``u_t`` is 1, or that of ``prefix_weight``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.errors import InputError
from logitless.objective.inputs import shaped
from logitless.objective.over_ranks import GatherOverRanks, one_rank
from logitless.objective.ranges import discounted_returns, ends
from logitless.types import TokenBatch


@dataclass(frozen=True)
class DistillationOutput:
    """What a micro-batch adds to the loss, and vectors for diagnostics, which are detached.

    Args:
        loss: this micro-batch's part, to be summed over micro-batches and ranks, never averaged.
        divergence: [N] nats; 0 in tokens of weight 0.
        trained: [N] tokens with a weight.
        tails: [N, 2] as in ``TokenScores``, or None.
    """

    loss: Float[Tensor, ""]
    divergence: Float[Tensor, "N"]
    trained: Bool[Tensor, "N"]
    tails: Float[Tensor, "N 2"] | None = None


@dataclass(frozen=True)
class Distillation:
    """How a teacher enters a step; see the equations above.

    Args:
        weight: of the divergence in the loss; 0 for none.
        advantage: coefficient of the log ratio in the advantages; 0 for none.
        alone: whether rewards give no advantages.
        gamma: of ``prefix_weight`` in the advantages; 0 for equal weights.

    Example:
        >>> batch = TokenBatch(sequence=torch.tensor([0, 0]), num_sequences=1, advantage=torch.zeros(2),
        ...                    token_weight=torch.tensor([0.5, 0.5]))
        >>> Distillation(weight=2.0).loss(torch.tensor([1.0, 3.0]), batch).loss
        tensor(4.)
    """

    weight: float = 0.0
    advantage: float = 0.0
    alone: bool = False
    gamma: float = 0.0

    def loss(
        self, divergence: Float[Tensor, "N"], batch: TokenBatch, tails: Float[Tensor, "N 2"] | None = None
    ) -> DistillationOutput:
        """``weight * sum_t w_t D_t`` of a micro-batch.

        Gradient: through ``divergence``; exactly 0 in tokens of weight 0.
        """
        trained = batch.token_weight != 0
        counted = torch.where(trained, divergence, 0.0)
        loss = self.weight * (batch.token_weight.to(counted.dtype) * counted).sum()
        return DistillationOutput(loss, counted.detach(), trained, tails)


@shaped
def teacher_advantage(
    logp_teacher: Float[Tensor, "N"], logp_sampler: Float[Tensor, "N"], coefficient: float = 1.0
) -> Float[Tensor, "N"]:
    """``coefficient * sg(logp_teacher - logp_sampler)``: the advantage of on-policy distillation.

    Its policy gradient is, on average over completions, that of ``-coefficient * KL(policy || teacher)`` of each token.

    Raises:
        InputError: a token without ``logp_sampler``.

    Example:
        >>> teacher_advantage(torch.tensor([-0.5]), torch.tensor([-2.0]))
        tensor([1.5000])
    """
    missing = int(logp_sampler.isnan().sum())
    if missing:
        raise InputError(
            needed="logp_sampler of each token, which teacher.advantage compares with the teacher's log-prob",
            given=f"none for {missing} of {len(logp_sampler)} tokens",
            remedy="Let the engine give log-probs, or set teacher.divergence in place of teacher.advantage.",
        )
    return coefficient * (logp_teacher - logp_sampler).detach()


@shaped
def prefix_weight(log_ratio: Float[Tensor, "N"], sequence: Int[Tensor, "N"], gamma: float) -> Float[Tensor, "N"]:
    """How much a token's log ratio to the teacher counts: less, the more the tokens before it already differ.

    ``u_t = 1 + gamma * (1 - sum_{j < t} |log_ratio_j| / max(sum_j |log_ratio_j|, 1e-8))``, sums over the sequence.

    Args:
        log_ratio: [N] ``logp_teacher - logp_sampler``, 0 where no teacher grades a token.
        sequence: [N] non-decreasing ids; all of a sequence.
        gamma: 0 or more.

    Returns:
        [N] from 1 to 1 + gamma.

    Source: IW-OPD, arXiv:2606.22600, with the epsilon of TRL.

    Example:
        >>> prefix_weight(torch.tensor([-1.0, 3.0, 2.0]), torch.tensor([0, 0, 1]), gamma=2.0)
        tensor([3.0000, 2.5000, 3.0000])
    """
    left = discounted_returns(log_ratio.abs(), sequence, 1.0)  # of this token and those after it
    first = torch.roll(ends(sequence), 1)
    total = left[first][torch.cumsum(first, 0) - 1]
    return 1 + gamma * (1 - (total - left) / total.clamp(min=1e-8))


def distillation_diagnostics(
    outputs: Sequence[DistillationOutput], *, gather: GatherOverRanks = one_rank
) -> dict[str, Float[Tensor, ""]]:
    """``teacher/divergence`` and, of a server, the tails: means over the step's trained tokens, without weights, on the
    device.

    Args:
        outputs: of every micro-batch of the step on this rank.
        gather: over all ranks.

    Example:
        >>> one = DistillationOutput(torch.tensor(1.0), torch.tensor([3.0, 0.0]), torch.tensor([True, False]))
        >>> distillation_diagnostics([one])["teacher/divergence"].item()
        3.0
    """
    total, count, *tails, known = gather(torch.stack([_sums(each) for each in outputs])).sum(0)
    found = {"teacher/divergence": total / count.clamp(min=1)}
    if any(each.tails is not None for each in outputs):
        found |= {f"teacher/{name}": sum_ / known for name, sum_ in zip(_TAILS, tails, strict=True)}
    return found


_TAILS = ("tail_of_policy", "tail")


def _sums(output: DistillationOutput) -> Float[Tensor, "5"]:
    """Of divergences, of trained tokens, of both tails, and of the trained tokens that have them."""
    sums = torch.stack([output.divergence.double().sum(), output.trained.double().sum()])
    if output.tails is None:
        return torch.cat([sums, sums.new_zeros(3)])
    known = output.trained[:, None] & ~output.tails.isnan()
    return torch.cat([sums, torch.where(known, output.tails, 0).double().sum(0), known[:, :1].double().sum(0)])
