"""Advantages of a token against the same place of the others in its group, weighed by how uncertain they were."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logitless.objective.advantage.estimator import AdvantageInputs, AdvantageOutput, Estimator, refuse_infinite
from logitless.objective.inputs import required, shaped
from logitless.objective.over_ranks import SumOverRanks, one_rank
from logitless.objective.ranges import Level, discounted_returns, ends


@shaped
def optimal_token(
    token_rewards: Float[Tensor, "N"],
    group: Int[Tensor, "B"],
    sequence: Int[Tensor, "N"],
    logp_old: Float[Tensor, "N"],
    sum_squares: Float[Tensor, "N"],
    lone: Literal["zero", "return"] = "zero",
) -> Float[Tensor, "N"]:
    """The return from a token on, against the weighted mean of its group at the same place.

    ``A_{i,t} = G_{i,t} - sum_j W_{j,t} G_{j,t} / (sum_j W_{j,t} + 1e-8)`` over the group's completions with a token t
    ``W_t = sum_{u <= t} 1 - 2 p_u + sum_v p_v^2``

    The terms of W are squared norms of the score by the logits; t counts trained tokens.

    Args:
        token_rewards: [N]; NaN makes the tokens up to it unscored.
        group: [B] id of each completion's prompt.
        sequence: [N] non-decreasing ids in ``range(B)``; all of a group on one rank.
        logp_old: [N] of the scoring pass.
        sum_squares: [N] ``sum_v p_v^2`` of the same pass.
        lone: the advantage at a place that no other completion of the group reaches.

    Returns:
        [N]; 0 for unscored tokens.

    Source: Optimal Token Baseline, https://richardli.xyz/optimal-token-baseline, as in verl: its form for turns, which
        counts trained tokens alone; ``lone="return"`` is verl's ``handle_zero_tail``.

    Example:
        >>> # two completions of one token, p = 1/2 of two: W = 1/2 each, so the baseline is their mean
        >>> half = torch.full((2,), 0.5)
        >>> optimal_token(
        ...     torch.tensor([1.0, 0.0]), torch.tensor([7, 7]), torch.tensor([0, 1]), half.log(), half)
        tensor([ 0.5000, -0.5000])
    """
    refuse_infinite(token_rewards)
    returns = discounted_returns(token_rewards, sequence, 1.0)
    scored = ~returns.isnan()
    energy = 1 - 2 * logp_old.exp() + sum_squares
    so_far = discounted_returns(energy.double().flip(0), sequence.flip(0), 1.0).flip(0)
    weight = torch.where(scored, so_far, 0.0)
    first = torch.roll(ends(sequence), 1)
    start = first.nonzero().squeeze(1)[torch.cumsum(first, 0) - 1]
    index = torch.arange(len(sequence), device=sequence.device)
    _, of_group = torch.unique(group, return_inverse=True)
    place = of_group[sequence] * len(sequence) + index - start
    places, row = torch.unique(place, return_inverse=True)
    sums = weight.new_zeros(3, len(places))
    sums.index_add_(1, row, torch.stack([weight * returns.nan_to_num(), weight, scored.double()]))
    baseline = (sums[0] / (sums[1] + 1e-8))[row].to(returns.dtype)
    alone = sums[2][row] == 1
    found = torch.where(alone, returns if lone == "return" else 0.0, returns - baseline)
    return torch.where(scored, found, 0.0)


@dataclass(frozen=True)
class OptimalToken(Estimator):
    """See ``optimal_token``. Scoring reads the head twice.

    Args:
        lone: the advantage where no other completion has a token t: zero, or the return.
    """

    lone: Literal["zero", "return"] = "zero"
    name: Literal["optimal_token"] = "optimal_token"
    compares_group: ClassVar[bool] = True
    reads_scores: ClassVar[bool] = True

    def level(self, *, kl_in_reward: bool) -> Level:
        del kl_in_reward  # no level is finer
        return "token"

    def __call__(self, inputs: AdvantageInputs, sum_over_ranks: SumOverRanks = one_rank) -> AdvantageOutput:
        del sum_over_ranks  # all of a group on one rank
        logp, squares = required(inputs.logp_old, "logp_old"), required(inputs.sum_squares, "sum_squares")
        found = optimal_token(inputs.token_rewards(), inputs.group, inputs.sequence, logp, squares, self.lone)
        return AdvantageOutput(self._clipped(found))
