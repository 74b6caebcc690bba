"""Whitening over the batch, and a bound on the absolute value."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.objective.inputs import shaped
from logitless.objective.over_ranks import SumOverRanks, one_rank

EPSILON = 1e-4
"""Added to every standard deviation and median deviation before dividing by it."""


@shaped
def whiten(
    values: Float[Tensor, "N"], kept: Bool[Tensor, "N"], sum_over_ranks: SumOverRanks = one_rank
) -> Float[Tensor, "N"]:
    """Shift and scale to mean 0 and standard deviation 1 over the kept values of all ranks.

    ``(x - mean) / (std + EPSILON)``, 0 where not kept

    Args:
        values: [N] or [B].
        kept: which of them enter the statistics.
        sum_over_ranks: called twice.

    Source: REINFORCE++, arXiv:2501.03262; PPO's advantage normalization, arXiv:2006.05990 sec. 3.5.

    Example:
        >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor([-0.7071,  0.7071,  0.0000])
    """
    mean, std = batch_statistics(values, kept, sum_over_ranks)
    return torch.where(kept, (values - mean) / (std + EPSILON), 0)


def batch_statistics(
    values: Tensor, kept: Tensor, sum_over_ranks: SumOverRanks
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean and Bessel-corrected standard deviation (0 for a single value) of the kept values of all ranks, in
    float64.
    """
    exact = torch.where(kept, values, 0).double()
    total, count = sum_over_ranks(torch.stack([exact.sum(), kept.sum().double()]))
    mean = total / count
    squares = sum_over_ranks(torch.where(kept, exact - mean, 0).square().sum())
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return mean.to(values.dtype), std.to(values.dtype)


def clip(advantage: Float[Tensor, "*N"], limit: float) -> Float[Tensor, "*N"]:
    """Clamp to ``[-limit, limit]``."""
    return advantage.clamp(-limit, limit)


def num_clipped(advantage: Float[Tensor, "*N"], limit: float) -> Int[Tensor, ""]:
    """How many advantages are at the limit or beyond.

    Example:
        >>> num_clipped(clip(torch.tensor([-7.0, 0.5]), 5.0), 5.0)
        tensor(1)
    """
    return (advantage.abs() >= limit).sum()
