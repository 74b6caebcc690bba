"""Advantages of a turn against the same turn of the others in its group."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logitless.objective.advantage.estimator import (
    EPSILON,
    AdvantageInputs,
    AdvantageOutput,
    Estimator,
    check_discount,
)
from logitless.objective.advantage.group_relative import as_rows, assign, mean_of, std_of
from logitless.objective.inputs import required, shaped
from logitless.objective.over_ranks import SumOverRanks, one_rank
from logitless.objective.ranges import Level, discounted_returns, ends, turn_index


@shaped
def group_turns(
    token_rewards: Float[Tensor, "N"],
    group: Int[Tensor, "B"],
    sequence: Int[Tensor, "N"],
    turn: Int[Tensor, "N"],
    gamma: float,
    standardize: bool,
) -> Float[Tensor, "N"]:
    """The return from a turn on, against the same turn of the group.

    ``G_{i,k} = r_{i,k} + gamma * G_{i,k+1}``,
    ``A_{i,k} = (G_{i,k} - mean_j G_{j,k}) / (std_j G_{j,k} + EPSILON)`` over the completions j of the group that have a
    turn k; without ``standardize`` the denominator is 1.

    Args:
        token_rewards: [N] turn rewards at the last token of the turn, the final reward at the last token of all; NaN
            makes the turns up to it unscored.
        group: [B] id of each completion's prompt.
        sequence: [N] non-decreasing ids in ``range(B)``; all of a group on one rank.
        turn: [N] turn ids, non-decreasing inside a sequence; turns with one number are compared.
        gamma: discount a turn.
        standardize: divide by the standard deviation.

    Returns:
        [N] constant over a turn; 0 for a turn that no other completion has, and for unscored ones.

    Source: MT-GRPO, arXiv:2505.11821, with returns in place of its sum of two advantages; with one turn it is GRPO.

    Example:
        >>> # two completions of two turns, a token each: the first earns 1 at its first turn, both 2 at the end
        >>> paid, owner = torch.tensor([1.0, 2.0, 0.0, 2.0]), torch.tensor([0, 0, 1, 1])
        >>> group_turns(paid, torch.tensor([7, 7]), owner, torch.tensor([0, 1, 0, 1]), 1.0, False)
        tensor([ 0.5000,  0.0000, -0.5000,  0.0000])
    """
    action = turn_index(sequence, turn)
    first = torch.roll(ends(action), 1)
    paid = discounted_returns(token_rewards, action, 1.0)[first]
    returns = discounted_returns(paid, sequence[first], gamma)
    _, of_group = torch.unique(group, return_inverse=True)
    place = of_group[sequence[first]] * (int(turn.max()) + 1 if len(turn) else 1) + turn[first]
    grid, row = as_rows(returns, place)
    centered = returns - mean_of(grid)[row]
    found = assign(centered / (std_of(grid)[row] + EPSILON) if standardize else centered, grid, row)
    return found[action]


@dataclass(frozen=True)
class GroupTurns(Estimator):
    """See ``group_turns``.

    Args:
        gamma: discount a turn, 0 to 1.
        standardize: divide by the standard deviation of the turn's group.
    """

    gamma: float = 1.0
    standardize: bool = True
    name: Literal["group_turns"] = "group_turns"
    compares_group: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_discount("gamma", self.gamma)

    def level(self, *, kl_in_reward: bool) -> Level:
        del kl_in_reward  # its sum over the turn is part of the turn's reward
        return "turn"

    def __call__(self, inputs: AdvantageInputs, sum_over_ranks: SumOverRanks = one_rank) -> AdvantageOutput:
        del sum_over_ranks  # all of a group on one rank
        turn = required(inputs.turn, "turn")
        found = group_turns(inputs.token_rewards(), inputs.group, inputs.sequence, turn, self.gamma, self.standardize)
        return AdvantageOutput(self._clipped(found))
