"""Sums along runs of tokens, each a sequence or a turn."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.objective.inputs import shaped


@shaped
def turn_index(sequence: Int[Tensor, "N"], turn: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
    """Number the turns of the batch 0, 1, 2, ... in the order of their tokens.

    Args:
        sequence: [N] non-decreasing ids.
        turn: [N] ids, non-decreasing inside a sequence.

    Example:
        >>> turn_index(torch.tensor([0, 0, 0, 3, 3]), torch.tensor([1, 1, 2, 2, 5]))
        tensor([0, 0, 1, 2, 3])
    """
    begins = torch.ones_like(sequence)
    begins[1:] = ((sequence[1:] != sequence[:-1]) | (turn[1:] != turn[:-1])).long()
    return begins.cumsum(0) - 1


@shaped
def pay_at_last_token(rewards: Float[Tensor, "K"], owner: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Token rewards: each reward at the last token of its sequence or turn, 0 elsewhere.

    Args:
        rewards: [K], one a sequence or turn; NaN = unscored. One without tokens is dropped.
        owner: [N] non-decreasing index into ``rewards``: ``sequence``, or ``turn_index(sequence, turn)``.

    Source: arXiv:1909.08593 sec. 2.

    Example:
        >>> pay_at_last_token(torch.tensor([5.0, 7.0, 9.0]), torch.tensor([0, 0, 2]))
        tensor([0., 5., 9.])
    """
    return torch.where(ends(owner), rewards[owner], 0)


@shaped
def discounted_returns(
    token_rewards: Float[Tensor, "N"], sequence: Int[Tensor, "N"], discount: float
) -> Float[Tensor, "N"]:
    """Discounted sum of the rewards from each token to the end of its sequence, in ``O(N log N)``.

    ``G_t = r_t + discount * G_{t+1}``, with ``G = 0`` after the last token of a sequence

    Args:
        token_rewards: [N].
        sequence: [N] non-decreasing ids; a sequence lies whole on one rank.
        discount: in [0, 1].

    Source: Sutton and Barto, Reinforcement Learning, 2nd edition, eq. 3.9.

    Example:
        >>> discounted_returns(torch.tensor([0.0, 0.0, 8.0, 1.0]), torch.tensor([0, 0, 0, 1]), 0.5)
        tensor([2., 4., 8., 1.])
    """
    returns, reach = token_rewards, 1
    while reach < len(returns):
        same = sequence[reach:] == sequence[:-reach]
        ahead = torch.where(same, returns[reach:] * discount**reach, 0)
        returns = torch.cat([returns[:-reach] + ahead, returns[-reach:]])
        reach *= 2
    return returns


def ends(owner: Tensor) -> Bool[Tensor, "N"]:
    """[N] which tokens are the last of their run."""
    ends = torch.ones_like(owner, dtype=torch.bool)
    ends[:-1] = owner[1:] != owner[:-1]
    return ends
