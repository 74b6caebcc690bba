"""Groups as the rows of a grid, and statistics of each row: what comparisons inside a group are made of.

Groups are found by id, never by position.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.errors import InputError


def as_rows(rewards: Tensor, group: Tensor) -> tuple[Float[Tensor, "P G"], Int[Tensor, "B"]]:
    """The rewards with one row a group, in ascending order of ids and filled up with NaN, and the row of each."""
    refuse_infinite(rewards)
    ids, row, size = torch.unique(group, return_inverse=True, return_counts=True)
    order = row.argsort(stable=True)
    column = torch.empty_like(row)
    column[order] = torch.arange(len(row), device=row.device) - (size.cumsum(0) - size)[row[order]]
    grid = rewards.new_full((len(ids), max(size.tolist(), default=1)), torch.nan)
    grid[row, column] = rewards
    return grid, row


def refuse_infinite(rewards: Tensor) -> None:
    """Refuse rewards that no comparison, sum or mean survives.

    Raises:
        InputError: one of them is infinite.
    """
    if bool(rewards.isinf().any()):
        raise InputError(
            needed="a finite reward, or NaN where unscorable, for each completion",
            given=f"{rewards.numel()} rewards, of which {int(rewards.isinf().sum())} infinite",
            remedy="Bound the reward functions.",
        )


def lowest(grid: Tensor) -> Float[Tensor, "P"]:
    return grid.nan_to_num(nan=torch.inf).amin(1)


def num_scored(grid: Tensor) -> Int[Tensor, "P"]:
    return (~grid.isnan()).sum(1)


def compared(grid: Tensor) -> Bool[Tensor, "P"]:
    """Whether a group has two scored completions, the fewest that can be compared."""
    return num_scored(grid) >= 2


def mean_of(grid: Tensor) -> Float[Tensor, "P"]:
    """Taken about the lowest, so that equal rewards differ from their mean by exactly 0."""
    low = lowest(grid)
    return low + (grid - low[:, None]).nanmean(1)


def std_of(grid: Tensor) -> Float[Tensor, "P"]:
    squares = (grid - mean_of(grid)[:, None]).square().nansum(1)
    return (squares / (num_scored(grid) - 1)).sqrt()


def quantile_of(grid: Tensor, q: float) -> Float[Tensor, "P"]:
    """Interpolated linearly; torch's own refuses a grid without groups."""
    return grid.nanquantile(q, dim=1) if len(grid) else grid[:, 0]


def assign(advantage: Tensor, grid: Tensor, row: Tensor) -> Float[Tensor, "B"]:
    """The advantage where there is one: 0 for the unscorable and for those with nothing to be compared with."""
    return torch.where(compared(grid)[row], advantage, 0).nan_to_num(nan=0.0)
