"""Sums, means and returns over the contiguous token ranges of a packed batch: its sequences, or their turns.

Sums equal ``zeros(B).index_add(0, index, values)`` and are bitwise repeatable: each range is summed by itself, in
float64 and in a fixed order, without atomics, Python loops or synchronization. MPS has no float64 and is not supported.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.errors import InputError
from logitless.objective.inputs import shaped
from logitless.objective.over_ranks import SumOverRanks

Level = Literal["token", "turn", "sequence"]
"""What one number is for: a token, an assistant turn, or a whole sequence."""


@dataclass(frozen=True)
class Ranges:
    """Contiguous ranges of tokens, of which only the counted (trained) tokens enter sums and means.

    Args:
        index: [N] non-decreasing range of each token, in ``range(num_ranges)``.
        num_ranges: B, ranges without tokens included.
        counted: [N] tokens that take part; values of the others are never read.
        sum_over_ranks: where ranges are split over ranks, the differentiable sum of a [B] tensor over those ranks; None
            if every range is whole.

    Example:
        >>> ranges = Ranges(torch.tensor([0, 0, 2]), 3, torch.tensor([True, True, True]))
        >>> ranges.sum(torch.tensor([1.0, 2.0, 5.0]))
        tensor([3., 0., 5.])
        >>> ranges.spread(ranges.mean(torch.tensor([1.0, 2.0, 5.0])))
        tensor([1.5000, 1.5000, 5.0000])
    """

    index: Int[Tensor, "N"]
    num_ranges: int
    counted: Bool[Tensor, "N"]
    sum_over_ranks: SumOverRanks | None = None

    @cached_property
    def offsets(self) -> Int[Tensor, "B1"]:
        """[B + 1] first token of each range on this rank, and N."""
        borders = torch.arange(self.num_ranges + 1, device=self.index.device, dtype=self.index.dtype)
        return torch.searchsorted(self.index, borders)

    @cached_property
    def counts(self) -> Float[Tensor, "B"]:
        """[B] counted tokens of each range over all ranks, float64."""
        return self._total(self.counted.double())

    def sum(self, values: Float[Tensor, "N"]) -> Float[Tensor, "B"]:
        """Sum over the counted tokens of each range; 0 for a range without any.

        Gradient: 1 to every counted token of the range, on every rank.
        """
        return self._total(torch.where(self.counted, values, 0.0).double()).to(values.dtype)

    def mean(self, values: Float[Tensor, "N"]) -> Float[Tensor, "B"]:
        """Mean over the counted tokens of each range; 0 for a range without any."""
        total = self._total(torch.where(self.counted, values, 0.0).double())
        return (total / self.counts.clamp(min=1.0)).to(values.dtype)

    def spread(self, values: Float[Tensor, "B"]) -> Float[Tensor, "N"]:
        """For every token, the value of its range.

        Gradient: summed over the range, as by ``sum``.
        """
        return _Spread.apply(values, self.index, self.offsets)  # type: ignore[no-untyped-call]

    def _total(self, values: Float[Tensor, "N"]) -> Float[Tensor, "B"]:
        local = _Sum.apply(values, self.index, self.offsets)  # type: ignore[no-untyped-call]
        return local if self.sum_over_ranks is None else self.sum_over_ranks(local)


@shaped
def turn_ranges(
    sequence: Int[Tensor, "N"],
    num_sequences: int,
    turn: Int[Tensor, "N"],
    counted: Bool[Tensor, "N"],
    *,
    max_turns: int | None = None,
    sum_over_ranks: SumOverRanks | None = None,
) -> Ranges:
    """The turns of all sequences as ranges.

    Args:
        sequence: [N] sequence of each token, non-decreasing.
        num_sequences: B.
        turn: [N] turn ids, non-decreasing inside a sequence.
        counted: [N] trained tokens.
        max_turns: above every turn id; required where sequences are split over ranks.
        sum_over_ranks: see ``Ranges``.

    Raises:
        InputError: ``max_turns`` missing with ``sum_over_ranks``; a turn id that decreases inside its sequence or is
            not below ``max_turns`` (checked on the CPU).

    Example:
        >>> counted = torch.ones(4, dtype=torch.bool)
        >>> turn_ranges(torch.tensor([0, 0, 0, 1]), 2, torch.tensor([0, 0, 3, 0]), counted).index
        tensor([0, 0, 1, 2])
    """
    if turn.device.type == "cpu":
        _check_turns(sequence, turn, max_turns)
    if max_turns is not None:
        return Ranges(sequence * max_turns + turn, num_sequences * max_turns, counted, sum_over_ranks)
    if sum_over_ranks is not None:
        raise InputError(
            needed="a bound on turn ids where sequences are split over ranks",
            given="max_turns=None",
            remedy="Set TurnRatio(max_turns=...) to more than the largest turn id.",
        )
    return Ranges(turn_index(sequence, turn), len(turn), counted)


def _check_turns(sequence: Tensor, turn: Tensor, max_turns: int | None) -> None:
    backwards = (sequence.diff() == 0) & (turn.diff() < 0)
    if bool(backwards.any()):
        raise InputError(
            needed="turn ids that do not decrease inside a sequence",
            given="a decreasing turn id",
            remedy="Number the turns of each sequence in their order.",
        )
    if max_turns is not None and len(turn) and not 0 <= int(turn.min()) <= int(turn.max()) < max_turns:
        raise InputError(
            needed=f"turn ids in range({max_turns})",
            given=f"{int(turn.min())} to {int(turn.max())}",
            remedy="Raise max_turns, or number turns from 0.",
        )


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
        rewards: [K], one a sequence or turn; NaN = unscored. The reward of one without tokens is dropped.
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
        sequence: [N] non-decreasing ids; all of a sequence on one rank.
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
    """[N] whether each token is the last of its sequence or turn."""
    ends = torch.ones_like(owner, dtype=torch.bool)
    ends[:-1] = owner[1:] != owner[:-1]
    return ends


class _Sum(torch.autograd.Function):
    """[N] -> [B]; its gradient is a gather."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(index, offsets)
        return torch.segment_reduce(values, "sum", offsets=offsets, initial=0.0, unsafe=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        index, offsets = ctx.saved_tensors
        return _Spread.apply(grad, index, offsets), None, None  # type: ignore[no-untyped-call]


class _Spread(torch.autograd.Function):
    """[B] -> [N]; its gradient is a sum over ranges (autograd's own would use atomics on CUDA)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(index, offsets)
        return values[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        index, offsets = ctx.saved_tensors
        total = _Sum.apply(grad.double(), index, offsets)  # type: ignore[no-untyped-call]
        return total.to(grad.dtype), None, None
