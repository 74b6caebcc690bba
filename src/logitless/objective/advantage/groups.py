"""Groups as rows of a grid, and statistics of each row. Groups are found by id, never by position."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.errors import InputError


def as_rows(rewards: Tensor, group: Tensor) -> tuple[Float[Tensor, "P G"], Int[Tensor, "B"]]:
    """The values as a grid with one row a group (ids ascending, padded with NaN), and the row of each value."""
    refuse_infinite(rewards)
    ids, row, size = torch.unique(group, return_inverse=True, return_counts=True)
    order = row.argsort(stable=True)
    column = torch.empty_like(row)
    column[order] = torch.arange(len(row), device=row.device) - (size.cumsum(0) - size)[row[order]]
    grid = rewards.new_full((len(ids), max(size.tolist(), default=1)), torch.nan)
    grid[row, column] = rewards
    return grid, row


def refuse_infinite(rewards: Tensor) -> None:
    """Raises InputError if a reward is infinite."""
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
    """Whether each group has at least two scored completions."""
    return num_scored(grid) >= 2


def mean_of(grid: Tensor) -> Float[Tensor, "P"]:
    """The mean of each row, taken about its minimum: equal rewards differ from their mean by exactly 0."""
    low = lowest(grid)
    return low + (grid - low[:, None]).nanmean(1)


def std_of(grid: Tensor) -> Float[Tensor, "P"]:
    squares = (grid - mean_of(grid)[:, None]).square().nansum(1)
    return (squares / (num_scored(grid) - 1)).sqrt()


def quantile_of(grid: Tensor, q: float) -> Float[Tensor, "P"]:
    """The quantile of each row, linearly interpolated; unlike torch's, a grid may have no rows."""
    return grid.nanquantile(q, dim=1) if len(grid) else grid[:, 0]


def assign(advantage: Tensor, grid: Tensor, row: Tensor) -> Float[Tensor, "B"]:
    """The advantages, 0 for unscored completions and for groups with fewer than two scored ones."""
    return torch.where(compared(grid)[row], advantage, 0).nan_to_num(nan=0.0)
