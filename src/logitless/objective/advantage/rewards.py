"""Rewards before they are compared: several functions as one, and which groups have a signal."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.objective.advantage.groups import as_rows, lowest, refuse_infinite
from logitless.objective.inputs import shaped


@shaped
def combine_rewards(per_function: Float[Tensor, "B F"], weights: Float[Tensor, "F"]) -> Float[Tensor, "B"]:
    """Weighted sum of several reward functions; missing scores are left out.

    ``reward_i = sum over scored f of weights_f * per_function_if``

    Args:
        per_function: [B, F] rewards; NaN where function f could not score completion i.
        weights: [F].

    Returns:
        [B]; NaN only where every function is missing.

    Source: TRL's ``multi_objective_aggregation="sum_then_normalize"``.

    Example:
        >>> nan = float("nan")
        >>> combine_rewards(torch.tensor([[1.0, 4.0], [1.0, nan], [nan, nan]]), torch.tensor([1.0, 0.5]))
        tensor([3., 1., nan])
    """
    refuse_infinite(per_function)
    combined = (per_function * weights).nansum(1)
    return torch.where(per_function.isnan().all(1), torch.nan, combined)


@shaped
def has_signal(rewards: Float[Tensor, "B"], group: Int[Tensor, "B"]) -> Bool[Tensor, "P"]:
    """Whether the scored rewards of each group differ. If not, every group-relative advantage is 0.

    Args:
        rewards: [B], NaN = unscored.
        group: [B] ids, in any order.

    Returns:
        [P], in ascending order of the distinct ids (``group.unique()``).

    Example:
        >>> has_signal(torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([9, 4, 9, 4]))
        tensor([False,  True])
    """
    grid, _ = as_rows(rewards, group)
    return lowest(grid) < grid.nan_to_num(nan=-torch.inf).amax(1)
