"""Advantages of a completion against the others of its group; and ``raw``, without a baseline.

Groups are rows of a grid, found by id and never by position.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.advantage.estimator import EPSILON, AdvantageInputs, OnePerCompletion, refuse_infinite
from logitless.objective.inputs import required, shaped
from logitless.objective.over_ranks import SumOverRanks


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


@shaped
def raw(rewards: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The reward itself.

    ``A_i = r_i``

    Source: REINFORCE, Williams 1992.

    Example:
        >>> raw(torch.tensor([2.0, float("nan")]))
        tensor([2., 0.])
    """
    refuse_infinite(rewards)
    return rewards.nan_to_num(nan=0.0)


@dataclass(frozen=True)
class Raw(OnePerCompletion):
    """See ``raw``."""

    name: Literal["raw"] = "raw"
    compares_group: ClassVar[bool] = False

    def per_completion(self, inputs: AdvantageInputs, _sum_over_ranks: SumOverRanks) -> Tensor:
        return raw(inputs.completion_rewards())


@shaped
def remax(rewards: Float[Tensor, "B"], baseline: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Reward minus that of a greedy completion of the same prompt.

    ``A_i = r_i - b_i``

    Args:
        rewards: [B]; NaN = unscored.
        baseline: [B]; NaN = unscored.

    Returns:
        [B]; 0 where either is NaN.

    Source: ReMax, arXiv:2310.10505.

    Example:
        >>> remax(torch.tensor([2.0, 0.0, float("nan")]), torch.tensor([0.5, 0.5, 0.5]))
        tensor([ 1.5000, -0.5000,  0.0000])
    """
    refuse_infinite(torch.cat([rewards, baseline]))
    return (rewards - baseline).nan_to_num(nan=0.0)


@dataclass(frozen=True)
class Remax(OnePerCompletion):
    """See ``remax``."""

    name: Literal["remax"] = "remax"
    compares_group: ClassVar[bool] = False
    reads_baseline: ClassVar[bool] = True

    def per_completion(self, inputs: AdvantageInputs, _sum_over_ranks: SumOverRanks) -> Tensor:
        return remax(inputs.completion_rewards(), required(inputs.baseline, "baseline"))


@shaped
def group_centered(rewards: Float[Tensor, "B"], group: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Reward minus the mean of its group.

    ``A_i = r_i - mean(r of the group)``

    Args:
        rewards: [B], NaN = unscored.
        group: [B] ids, in any order.

    Returns:
        [B]; 0 for unscored completions and in groups with fewer than two scored ones.

    Source: Dr. GRPO, arXiv:2503.20783.

    Example:
        >>> group_centered(torch.tensor([1.0, 0.0, 3.0, 2.0]), torch.tensor([7, 2, 7, 2]))
        tensor([-1., -1.,  1.,  1.])
    """
    grid, row = as_rows(rewards, group)
    return assign(rewards - mean_of(grid)[row], grid, row)


@dataclass(frozen=True)
class GroupCentered(OnePerCompletion):
    """See ``group_centered``."""

    name: Literal["group_centered"] = "group_centered"

    def per_completion(self, inputs: AdvantageInputs, _sum_over_ranks: SumOverRanks) -> Tensor:
        return group_centered(inputs.completion_rewards(), inputs.group)


@shaped
def group_standardized(rewards: Float[Tensor, "B"], group: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Reward minus the mean of its group, over the group's standard deviation.

    ``A_i = (r_i - mean(r of the group)) / (std(r of the group) + EPSILON)``

    Args, Returns: as ``group_centered``.

    Source: GRPO, arXiv:2402.03300.

    Example:
        >>> group_standardized(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]))  # 1 / (sqrt(2) + 1e-4)
        tensor([-0.7071,  0.7071])
    """
    grid, row = as_rows(rewards, group)
    return assign((rewards - mean_of(grid)[row]) / (std_of(grid)[row] + EPSILON), grid, row)


@dataclass(frozen=True)
class GroupStandardized(OnePerCompletion):
    """See ``group_standardized``."""

    name: Literal["group_standardized"] = "group_standardized"

    def per_completion(self, inputs: AdvantageInputs, _sum_over_ranks: SumOverRanks) -> Tensor:
        return group_standardized(inputs.completion_rewards(), inputs.group)


@shaped
def leave_one_out(rewards: Float[Tensor, "B"], group: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Reward minus the mean of the others of its group.

    ``A_i = r_i - mean(r_j of the group, j != i) = G / (G - 1) * (r_i - mean(r of the group))``

    Args, Returns: as ``group_centered``.

    Source: RLOO, arXiv:2402.14740.

    Example:
        >>> leave_one_out(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 0, 0]))
        tensor([-3.0000, -1.5000,  4.5000])
    """
    grid, row = as_rows(rewards, group)
    count = num_scored(grid)[row]
    return assign((rewards - mean_of(grid)[row]) * count / (count - 1), grid, row)


@dataclass(frozen=True)
class LeaveOneOut(OnePerCompletion):
    """See ``leave_one_out``."""

    name: Literal["leave_one_out"] = "leave_one_out"

    def per_completion(self, inputs: AdvantageInputs, _sum_over_ranks: SumOverRanks) -> Tensor:
        return leave_one_out(inputs.completion_rewards(), inputs.group)


@shaped
def percentile(rewards: Float[Tensor, "B"], group: Int[Tensor, "B"], q: float) -> Float[Tensor, "B"]:
    """Reward minus a percentile of its group, linearly interpolated.

    ``A_i = r_i - percentile_q(r of the group)``

    Args:
        rewards, group: as ``group_centered``.
        q: in percent; 50 is the median.

    Returns: as ``group_centered``.

    Source: quantile advantage estimation, arXiv:2509.22611.

    Example:
        >>> percentile(torch.tensor([0.0, 4.0, 1.0, 3.0]), torch.tensor([0, 0, 0, 0]), 50.0)
        tensor([-2.,  2., -1.,  1.])
    """
    grid, row = as_rows(rewards, group)
    return assign(rewards - quantile_of(grid, q / 100)[row], grid, row)


@dataclass(frozen=True)
class Percentile(OnePerCompletion):
    """See ``percentile``.

    Args:
        q: in percent, 0 to 100.
    """

    q: float
    name: Literal["percentile"] = "percentile"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.q <= 100:
            raise ConfigurationError(
                needed="a percentile q from 0 to 100", given=str(self.q), remedy="Write the median as q=50."
            )

    def per_completion(self, inputs: AdvantageInputs, _sum_over_ranks: SumOverRanks) -> Tensor:
        return percentile(inputs.completion_rewards(), inputs.group, self.q)


@shaped
def robust(rewards: Float[Tensor, "B"], group: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Reward minus the median of its group, over the median absolute deviation.

    ``A_i = (r_i - median) / (MAD + EPSILON)``, ``MAD = median(|r_j - median|)``; the standard deviation where the MAD
    is 0.

    Args, Returns: as ``group_centered``.

    Source: MC-GRPO, arXiv:2601.22582; the fallback to the standard deviation is this library's.

    Example:
        >>> robust(torch.tensor([0.0, 1.0, 2.0, 7.0]), torch.tensor([0, 0, 0, 0])).round(decimals=2)  # 1.5, MAD 1
        tensor([-1.5000, -0.5000,  0.5000,  5.5000])
        >>> robust(torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0])).round(decimals=2)  # std 0.5
        tensor([0., 0., 0., 2.])
    """
    grid, row = as_rows(rewards, group)
    median = quantile_of(grid, 0.5)
    mad = quantile_of((grid - median[:, None]).abs(), 0.5)
    scale = torch.where(mad > 0, mad, std_of(grid))
    return assign((rewards - median[row]) / (scale[row] + EPSILON), grid, row)


@dataclass(frozen=True)
class Robust(OnePerCompletion):
    """See ``robust``."""

    name: Literal["robust"] = "robust"

    def per_completion(self, inputs: AdvantageInputs, _sum_over_ranks: SumOverRanks) -> Tensor:
        return robust(inputs.completion_rewards(), inputs.group)


@shaped
def max_rl(rewards: Float[Tensor, "B"], group: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Reward minus the mean of its group, over that mean: rare successes weigh more.

    ``A_i = (r_i - mean) / mean``, 0 where the mean is not positive

    Args, Returns: as ``group_centered``, for rewards that are never negative.

    Source: arXiv:2602.02710.

    Example:
        >>> max_rl(torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0]))
        tensor([-1., -1., -1.,  3.])
    """
    grid, row = as_rows(rewards, group)
    mean = mean_of(grid)[row]
    return assign(torch.where(mean > 0, (rewards - mean) / mean, 0), grid, row)


@dataclass(frozen=True)
class MaxRl(OnePerCompletion):
    """See ``max_rl``."""

    name: Literal["max_rl"] = "max_rl"

    def per_completion(self, inputs: AdvantageInputs, _sum_over_ranks: SumOverRanks) -> Tensor:
        return max_rl(inputs.completion_rewards(), inputs.group)


@shaped
def length_weighted(
    rewards: Float[Tensor, "B"], group: Int[Tensor, "B"], length: Float[Tensor, "B"]
) -> Float[Tensor, "B"]:
    """Reward minus the mean of its group in which a completion counts once a token.

    ``A_i = r_i - sum_j(length_j * r_j) / sum_j(length_j)`` over the group

    It is the baseline of least variance if the squared gradient of a completion grows with its length.

    Args:
        rewards, group: as ``group_centered``.
        length: [B] trained tokens of each completion, not all 0 in a group.

    Returns: as ``group_centered``.

    Source: OPO, arXiv:2505.23585.

    Example:
        >>> length_weighted(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([1.0, 3.0]))
        tensor([ 0.7500, -0.2500])
    """
    grid, row = as_rows(rewards, group)
    lengths, _ = as_rows(length, group)
    low = lowest(grid)  # about the minimum, as mean_of: equal rewards differ from their mean by exactly 0
    weight = torch.where(grid.isnan(), 0, lengths)
    mean = low + ((grid - low[:, None]) * weight).nansum(1) / weight.nansum(1)
    return assign(rewards - mean[row], grid, row)


@dataclass(frozen=True)
class LengthWeighted(OnePerCompletion):
    """See ``length_weighted``."""

    name: Literal["length_weighted"] = "length_weighted"

    def per_completion(self, inputs: AdvantageInputs, _sum_over_ranks: SumOverRanks) -> Tensor:
        rewards = inputs.completion_rewards()
        length = torch.bincount(inputs.sequence, minlength=len(rewards)).to(rewards.dtype)
        return length_weighted(rewards, inputs.group, length)


@shaped
def pass_at_k(rewards: Float[Tensor, "B"], group: Int[Tensor, "B"], k: int, passing: float = 1.0) -> Float[Tensor, "B"]:
    """The standardised reward of a set of k completions, averaged over all sets of the group that hold this one.

    ``A_i = (P_i - P) / sqrt(P (1 - P))``, 0 where P is 0 or 1
    ``P = 1 - C(n - c, k) / C(n, k)``
    ``P_i = 1 where r_i >= passing, else 1 - C(n - c - 1, k - 1) / C(n - 1, k - 1)``

    c of the n scored completions pass, and a set passes if one of its k does: P is the share of the sets that pass, and
    P_i of those with i.

    Args:
        rewards, group: as ``group_centered``.
        k: completions of a set, at least 1.
        passing: the smallest reward that passes.

    Returns: as ``group_centered``; 0 in groups with fewer than k scored completions.

    Source: Pass@k Training, arXiv:2508.10751; its code adds 1e-6 to the denominator.

    Example:
        >>> # 1 of 4 passes: half of the 6 pairs do, and a third of the 3 pairs of a completion that does not
        >>> pass_at_k(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0]), k=2)
        tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    grid, row = as_rows(rewards, group)
    scored, failed = num_scored(grid).double(), (grid < passing).sum(1).double()
    every = _share_of_sets(failed, scored, k)
    others = _share_of_sets(failed - 1, scored - 1, k - 1)
    passes_with = torch.where(rewards >= passing, 1.0, 1.0 - others[row])
    spread = (every * (1 - every)).sqrt()[row]
    found = (passes_with - (1 - every[row])) / spread  # 0 / 0 where P is 0 or 1; NaN with fewer than k scored
    return assign(torch.where(rewards.isnan(), torch.nan, found).to(rewards.dtype), grid, row)


def _share_of_sets(part: Tensor, whole: Tensor, size: int) -> Float[Tensor, "P"]:
    """``C(part, size) / C(whole, size)``: the share of the sets of this size that lie in the part; NaN without sets."""
    drawn = torch.arange(size, dtype=part.dtype, device=part.device)
    return ((part[:, None] - drawn) / (whole[:, None] - drawn)).prod(1)


@dataclass(frozen=True)
class PassAtK(OnePerCompletion):
    """See ``pass_at_k``.

    Args:
        k: completions of a set, at least 1 and at most those of a prompt.
        passing: the smallest reward that passes.

    Raises:
        ConfigurationError: k below 1; called with a KL in the reward, which would decide what passes.
    """

    k: int
    passing: float = 1.0
    name: Literal["pass_at_k"] = "pass_at_k"
    takes_kl: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            raise ConfigurationError(needed="k of at least 1", given=str(self.k), remedy="Use about 4.")

    @property
    def fewest_completions(self) -> int:
        return max(2, self.k)

    def per_completion(self, inputs: AdvantageInputs, _sum_over_ranks: SumOverRanks) -> Tensor:
        if inputs.kl is not None:
            raise ConfigurationError(
                needed="rewards without a KL for pass_at_k, which asks whether a completion passes",
                given="a KL in the reward",
                remedy="Put the KL in the loss (kl.placement: loss), or choose another advantage.",
            )
        return pass_at_k(inputs.completion_rewards(), inputs.group, self.k, self.passing)
