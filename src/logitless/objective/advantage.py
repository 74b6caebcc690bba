"""Advantages: from rewards to the number that says how much each token is to be made likelier.

Two families, told apart by what they are called with. A ``GroupAdvantage`` compares the completions of one prompt:
``estimator(rewards [B], group [B]) -> [B]``. A ``TokenAdvantage`` looks along a sequence:
``estimator(token_rewards [N], sequence [N], ...) -> (advantage [N], value_target [N] or None)``.

Groups are found by id, never by position. NaN stands for an unscorable completion: its advantage is 0 and it enters no
statistic. Standard deviations are Bessel-corrected and ``EPSILON`` is added to them. Nothing here is differentiated.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.errors import ConfigurationError, InputError

EPSILON = 1e-4
"""Added to every standard deviation and median deviation before dividing by it."""

SumOverRanks = Callable[[Tensor], Tensor]
"""Element-wise sum of a tensor over the ranks that share a batch (``distributed.sum_over_group``)."""


def one_rank(part: Tensor) -> Tensor:
    """The ``SumOverRanks`` of a run on one rank: the sum is the part itself.

    Example:
        >>> one_rank(torch.tensor([3.0]))
        tensor([3.])
    """
    return part


# --- rewards --------------------------------------------------------------------------------------------------------


def combine_rewards(per_function: Float[Tensor, "B F"], weights: Float[Tensor, "F"]) -> Float[Tensor, "B"]:
    """Weighted sum of several reward functions; what a function left unscored is left out of the sum.

    ``reward_i = sum over scored f of weights_f * per_function_if``

    Args:
        per_function: [B, F] rewards; NaN where function f could not score completion i.
        weights: [F] explicit weights.

    Returns:
        [B]; NaN (unscorable) only where every function is missing.

    Source: TRL's ``multi_objective_aggregation="sum_then_normalize"``.

    Example:
        >>> nan = float("nan")
        >>> combine_rewards(torch.tensor([[1.0, 4.0], [1.0, nan], [nan, nan]]), torch.tensor([1.0, 0.5]))
        tensor([3., 1., nan])
    """
    combined = (per_function * weights).nansum(1)
    return torch.where(per_function.isnan().all(1), torch.nan, combined)


def has_signal(rewards: Float[Tensor, "B"], group: Int[Tensor, "B"]) -> Bool[Tensor, "P"]:
    """Whether the scored rewards of a group differ: where they do not, every group-relative advantage is 0.

    Args:
        rewards: [B], NaN = unscorable.
        group: [B] ids, in any order.

    Returns:
        [P], in ascending order of the distinct ids (``group.unique()``). Groups without a scored completion have none.

    Example:
        >>> has_signal(torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([9, 4, 9, 4]))
        tensor([False,  True])
    """
    grid, _ = _grid(rewards, group)
    return _lowest(grid) < grid.nan_to_num(nan=-torch.inf).amax(1)


def pay_at_last_token(rewards: Float[Tensor, "K"], owner: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Rewards of sequences or turns as token rewards: each paid once, at its last token, 0 elsewhere.

    Args:
        rewards: [K], one a sequence or turn; NaN = unscorable. One that owns no token is paid nowhere.
        owner: [N] non-decreasing index into ``rewards``: ``sequence``, or ``turn_index(sequence, turn)``.

    Source: arXiv:1909.08593 sec. 2 (a reward at the end of the sample).

    Example:
        >>> pay_at_last_token(torch.tensor([5.0, 7.0, 9.0]), torch.tensor([0, 0, 2]))
        tensor([0., 5., 9.])
    """
    return torch.where(_ends(owner), rewards[owner], 0)


def turn_index(sequence: Int[Tensor, "N"], turn: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
    """Number the turns of the whole batch 0, 1, 2, ... in the order of their tokens.

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


# --- group-relative advantages --------------------------------------------------------------------------------------


def raw(rewards: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """The reward itself, no baseline.

    ``A_i = r_i``

    Source: REINFORCE, Williams 1992.

    Example:
        >>> raw(torch.tensor([2.0, float("nan")]))
        tensor([2., 0.])
    """
    return rewards.nan_to_num(nan=0.0)


def group_centered(rewards: Float[Tensor, "B"], group: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Reward minus the mean of its group.

    ``A_i = r_i - mean(r of the group)``

    Args:
        rewards: [B], NaN = unscorable.
        group: [B] ids, in any order, not necessarily compact.

    Returns:
        [B]; 0 for unscorable completions and in groups with fewer than two scored ones.

    Source: Dr. GRPO, arXiv:2503.20783.

    Example:
        >>> group_centered(torch.tensor([1.0, 0.0, 3.0, 2.0]), torch.tensor([7, 2, 7, 2]))
        tensor([-1., -1.,  1.,  1.])
    """
    grid, row = _grid(rewards, group)
    return _assign(rewards - _mean(grid)[row], grid, row)


def group_standardized(rewards: Float[Tensor, "B"], group: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Reward minus the mean of its group, over the group's standard deviation.

    ``A_i = (r_i - mean(r of the group)) / (std(r of the group) + EPSILON)``

    Args, Returns: as ``group_centered``.

    Source: GRPO, arXiv:2402.03300.

    Example:
        >>> group_standardized(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]))  # 1 / (sqrt(2) + 1e-4)
        tensor([-0.7071,  0.7071])
    """
    grid, row = _grid(rewards, group)
    return _assign((rewards - _mean(grid)[row]) / (_std(grid)[row] + EPSILON), grid, row)


def batch_standardized(
    rewards: Float[Tensor, "B"], group: Int[Tensor, "B"], sum_over_ranks: SumOverRanks = one_rank
) -> Float[Tensor, "B"]:
    """Reward minus the mean of its group, over the standard deviation of the raw rewards of the whole batch.

    ``A_i = (r_i - mean(r of the group)) / (std(all scored r) + EPSILON)``

    Args:
        rewards, group: as ``group_centered``; a group lies whole on one rank.
        sum_over_ranks: makes the standard deviation that of every rank's rewards.

    Returns: as ``group_centered``.

    Source: arXiv:2508.08221 ("Lite PPO"); TRL's ``scale_rewards="batch"``.

    Example:
        >>> batch_standardized(torch.tensor([0.0, 2.0, 0.0, 2.0]), torch.tensor([0, 0, 1, 1]))  # 1 / sqrt(4 / 3)
        tensor([-0.8660,  0.8660, -0.8660,  0.8660])
    """
    grid, row = _grid(rewards, group)
    _, std = _batch_statistics(rewards, ~rewards.isnan(), sum_over_ranks)
    return _assign((rewards - _mean(grid)[row]) / (std + EPSILON), grid, row)


def leave_one_out(rewards: Float[Tensor, "B"], group: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Reward minus the mean of the others of its group.

    ``A_i = r_i - mean(r_j of the group, j != i) = G / (G - 1) * (r_i - mean(r of the group))``

    Args, Returns: as ``group_centered``.

    Source: RLOO, arXiv:2402.14740.

    Example:
        >>> leave_one_out(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 0, 0]))
        tensor([-3.0000, -1.5000,  4.5000])
    """
    grid, row = _grid(rewards, group)
    count = _num_scored(grid)[row]
    return _assign((rewards - _mean(grid)[row]) * count / (count - 1), grid, row)


def percentile(rewards: Float[Tensor, "B"], group: Int[Tensor, "B"], q: float) -> Float[Tensor, "B"]:
    """Reward minus a percentile of its group, interpolated linearly between neighbours.

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
    grid, row = _grid(rewards, group)
    return _assign(rewards - _quantile(grid, q / 100)[row], grid, row)


def robust(rewards: Float[Tensor, "B"], group: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Reward minus the median of its group, over the median absolute deviation.

    ``A_i = (r_i - median) / (MAD + EPSILON)``, ``MAD = median(|r_j - median|)``; where the MAD is 0 (at least half of
    the group agrees) the standard deviation takes its place, so that one outlier in ``[0, 0, 0, 1]`` is not 1e4.

    Args, Returns: as ``group_centered``. The median averages the two middle values of an even group.

    Source: MC-GRPO, arXiv:2601.22582; the standard deviation where the MAD is 0 is this library's.

    Example:
        >>> robust(torch.tensor([0.0, 1.0, 2.0, 7.0]), torch.tensor([0, 0, 0, 0])).round(decimals=2)  # 1.5, MAD 1
        tensor([-1.5000, -0.5000,  0.5000,  5.5000])
        >>> robust(torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0])).round(decimals=2)  # std 0.5
        tensor([0., 0., 0., 2.])
    """
    grid, row = _grid(rewards, group)
    median = _quantile(grid, 0.5)
    mad = _quantile((grid - median[:, None]).abs(), 0.5)
    scale = torch.where(mad > 0, mad, _std(grid))
    return _assign((rewards - median[row]) / (scale[row] + EPSILON), grid, row)


def max_rl(rewards: Float[Tensor, "B"], group: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Reward minus the mean of its group, over that mean: rare successes weigh more.

    ``A_i = (r_i - mean) / mean``, 0 where the mean is not positive

    Args, Returns: as ``group_centered``; meant for rewards that are never negative.

    Source: arXiv:2602.02710.

    Example:
        >>> max_rl(torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 0]))
        tensor([-1., -1., -1.,  3.])
    """
    grid, row = _grid(rewards, group)
    mean = _mean(grid)[row]
    return _assign(torch.where(mean > 0, (rewards - mean) / mean, 0), grid, row)


def reinforce_pp_baseline(
    rewards: Float[Tensor, "B"], group: Int[Tensor, "B"], sum_over_ranks: SumOverRanks = one_rank
) -> Float[Tensor, "B"]:
    """Reward minus the mean of its group, then whitened over the whole batch.

    ``A = whiten(r - mean(r of the group))``

    Args:
        rewards, group: as ``group_centered``; a group lies whole on one rank.
        sum_over_ranks: makes the whitening that of every rank's completions.

    Returns: as ``group_centered``.

    Source: REINFORCE++-baseline, arXiv:2501.03262.

    Example:
        >>> reinforce_pp_baseline(torch.tensor([0.0, 2.0, 0.0, 4.0]), torch.tensor([0, 0, 1, 1]))  # std sqrt(10 / 3)
        tensor([-0.5477,  0.5477, -1.0954,  1.0954])
    """
    grid, row = _grid(rewards, group)
    return _assign(whiten(group_centered(rewards, group), ~rewards.isnan(), sum_over_ranks), grid, row)


def gdpo(
    rewards: Float[Tensor, "B F"],
    group: Int[Tensor, "B"],
    weights: Float[Tensor, "F"],
    sum_over_ranks: SumOverRanks = one_rank,
) -> Float[Tensor, "B"]:
    """Standardise each reward function in its group, sum with weights, whiten over the whole batch.

    ``A = whiten(sum_f weights_f * group_standardized(r_f))``

    Args:
        rewards: [B, F], NaN where function f could not score completion i: that term is then 0.
        group: [B] ids; a group lies whole on one rank.
        weights: [F].
        sum_over_ranks: makes the whitening that of every rank's completions.

    Returns:
        [B]; 0 where every function is missing and in groups with fewer than two scored completions.

    Source: GDPO, arXiv:2601.05242; TRL's ``multi_objective_aggregation="normalize_then_sum"``.

    Example:
        >>> rewards = torch.tensor([[0.0, 5.0], [2.0, 5.0]])
        >>> gdpo(rewards, torch.tensor([0, 0]), torch.tensor([1.0, 1.0])).round(decimals=2)
        tensor([-0.7100,  0.7100])
    """
    standardized = torch.stack([group_standardized(column, group) for column in rewards.unbind(1)], dim=1)
    combined = (standardized * weights).sum(1)
    combined = torch.where(rewards.isnan().all(1), torch.nan, combined)
    grid, row = _grid(combined, group)
    return _assign(whiten(combined, ~combined.isnan(), sum_over_ranks), grid, row)


# --- token-return advantages ----------------------------------------------------------------------------------------


def discounted_returns(
    token_rewards: Float[Tensor, "N"], sequence: Int[Tensor, "N"], discount: float
) -> Float[Tensor, "N"]:
    """Discounted sum of the rewards from each token to the end of its sequence.

    ``G_t = r_t + discount * G_{t+1}``, with ``G = 0`` after the last token of a sequence

    Every round of the loop doubles the reach of each sum, so it costs ``O(N log N)`` and no step depends on lengths.

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


def reinforce_pp(
    token_rewards: Float[Tensor, "N"],
    sequence: Int[Tensor, "N"],
    gamma: float = 1.0,
    sum_over_ranks: SumOverRanks = one_rank,
) -> Float[Tensor, "N"]:
    """Discounted return of each token, whitened over the tokens of the whole batch.

    ``A = whiten(discounted_returns(r, gamma))``

    Args:
        token_rewards: [N], usually ``pay_at_last_token(...) - beta * (logp_old - logp_ref)``; NaN makes the tokens up
            to it unscorable.
        sequence: [N] non-decreasing ids; a sequence lies whole on one rank.
        gamma: discount a token.
        sum_over_ranks: makes the whitening that of every rank's tokens.

    Returns:
        [N]; 0 for unscorable tokens.

    Source: REINFORCE++, arXiv:2501.03262.

    Example:
        >>> reinforce_pp(torch.tensor([0.0, 2.0, 0.0]), torch.tensor([0, 0, 1]))  # returns 2, 2, 0; std sqrt(4 / 3)
        tensor([ 0.5773,  0.5773, -1.1546])
    """
    returns = discounted_returns(token_rewards, sequence, gamma)
    return whiten(returns, ~returns.isnan(), sum_over_ranks)


def gae(
    token_rewards: Float[Tensor, "N"],
    values: Float[Tensor, "N"],
    sequence: Int[Tensor, "N"],
    gamma: float = 1.0,
    lambda_: float = 0.95,
    turn: Int[Tensor, "N"] | None = None,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """Generalised advantage estimation, with a token or a whole turn as one action.

    ``A_t = delta_t + gamma * lambda_ * A_{t+1}``, ``delta_t = r_t + gamma * V_{t+1} - V_t``, ``R_t = A_t + V_t``,
    where V and A are 0 after the last token of a sequence.

    With ``turn``, t counts turns: r is the sum over the turn, V the value at its first token, gamma and lambda apply
    between turns only, and every token of a turn is given its turn's A and R.

    Args:
        token_rewards: [N]; NaN makes the tokens up to it unscorable.
        values: [N] predictions of the scoring pass.
        sequence: [N] non-decreasing ids; a sequence lies whole on one rank.
        gamma, lambda_: in [0, 1].
        turn: [N] ids, non-decreasing inside a sequence, or None for tokens.

    Returns:
        Advantage [N], not whitened, and value target [N]; 0 and the value itself for unscorable tokens.

    Source: arXiv:1506.02438 eq. 16.

    Example:
        >>> gae(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25]), torch.tensor([0, 0]), gamma=1.0, lambda_=0.5)
        (tensor([0.1250, 0.7500]), tensor([0.6250, 1.0000]))
    """
    if turn is not None:
        action = turn_index(sequence, turn)
        first = torch.roll(_ends(action), 1)
        paid = discounted_returns(token_rewards, action, 1.0)[first]
        advantage, target = gae(paid, values[first], sequence[first], gamma, lambda_)
        return advantage[action], target[action]
    following = torch.where(_ends(sequence), 0, torch.roll(values, -1))
    advantage = discounted_returns(token_rewards + gamma * following - values, sequence, gamma * lambda_)
    advantage = advantage.nan_to_num(nan=0.0)
    return advantage, advantage + values


# --- after any of them ----------------------------------------------------------------------------------------------


def whiten(
    values: Float[Tensor, "N"], kept: Bool[Tensor, "N"], sum_over_ranks: SumOverRanks = one_rank
) -> Float[Tensor, "N"]:
    """Shift and scale to mean 0 and standard deviation 1 over the kept values of every rank.

    ``(x - mean) / (std + EPSILON)``, 0 where not kept

    Args:
        values: [N] or [B].
        kept: which of them enter the statistics.
        sum_over_ranks: sums the counts, totals and squares of the ranks; called twice.

    Source: REINFORCE++, arXiv:2501.03262; PPO's advantage normalisation, arXiv:2006.05990 sec. 3.5.

    Example:
        >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor([-0.7071,  0.7071,  0.0000])
    """
    mean, std = _batch_statistics(values, kept, sum_over_ranks)
    return torch.where(kept, (values - mean) / (std + EPSILON), 0)


def clip(advantage: Float[Tensor, "*N"], limit: float) -> Float[Tensor, "*N"]:
    """Advantage held within ``[-limit, limit]``; ``num_clipped`` says how many were held.

    Example:
        >>> clip(torch.tensor([-7.0, 0.5]), 5.0)
        tensor([-5.0000,  0.5000])
    """
    return advantage.clamp(-limit, limit)


def num_clipped(advantage: Float[Tensor, "*N"], limit: float) -> Int[Tensor, ""]:
    """How many advantages lie at the limit or beyond, for the metrics.

    Example:
        >>> num_clipped(clip(torch.tensor([-7.0, 0.5]), 5.0), 5.0)
        tensor(1)
    """
    return (advantage.abs() >= limit).sum()


# --- configuration: one class an estimator, with its own knobs only -------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Clipped:
    """What every estimator has.

    Args:
        clip: limit of the advantage's absolute value, applied last; None for no limit.

    Raises:
        ConfigurationError: a limit that is not positive.
    """

    clip: float | None = None
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigurationError(
                needed="a positive advantage clip", given=str(self.clip), remedy="Leave clip out to switch it off."
            )

    def _clipped(self, advantage: Tensor) -> Tensor:
        return advantage if self.clip is None else clip(advantage, self.clip)


class _OnePerCompletion(_Clipped, ABC):
    """An estimator that gives one advantage a completion."""

    def __call__(
        self, rewards: Float[Tensor, "B"], group: Int[Tensor, "B"], sum_over_ranks: SumOverRanks = one_rank
    ) -> Float[Tensor, "B"]:
        return self._clipped(self._estimate(rewards, group, sum_over_ranks))

    @abstractmethod
    def _estimate(self, rewards: Tensor, group: Tensor, sum_over_ranks: SumOverRanks) -> Tensor:
        """Before the clip."""


@dataclass(frozen=True)
class Raw(_OnePerCompletion):
    """See ``raw``.

    Example:
        >>> Raw(clip=1.0)(torch.tensor([3.0]), torch.tensor([0]))
        tensor([1.])
    """

    name: Literal["raw"] = "raw"

    def _estimate(self, rewards: Tensor, _group: Tensor, _sum_over_ranks: SumOverRanks) -> Tensor:
        return raw(rewards)


@dataclass(frozen=True)
class GroupCentered(_OnePerCompletion):
    """See ``group_centered``.

    Example:
        >>> GroupCentered()(torch.tensor([1.0, 3.0]), torch.tensor([5, 5]))
        tensor([-1.,  1.])
    """

    name: Literal["group_centered"] = "group_centered"

    def _estimate(self, rewards: Tensor, group: Tensor, _sum_over_ranks: SumOverRanks) -> Tensor:
        return group_centered(rewards, group)


@dataclass(frozen=True)
class GroupStandardized(_OnePerCompletion):
    """See ``group_standardized``.

    Example:
        >>> GroupStandardized(clip=0.5)(torch.tensor([1.0, 3.0]), torch.tensor([5, 5]))
        tensor([-0.5000,  0.5000])
    """

    name: Literal["group_standardized"] = "group_standardized"

    def _estimate(self, rewards: Tensor, group: Tensor, _sum_over_ranks: SumOverRanks) -> Tensor:
        return group_standardized(rewards, group)


@dataclass(frozen=True)
class BatchStandardized(_OnePerCompletion):
    """See ``batch_standardized``.

    Example:
        >>> BatchStandardized()(torch.tensor([1.0, 3.0]), torch.tensor([5, 5]))
        tensor([-0.7071,  0.7071])
    """

    name: Literal["batch_standardized"] = "batch_standardized"

    def _estimate(self, rewards: Tensor, group: Tensor, sum_over_ranks: SumOverRanks) -> Tensor:
        return batch_standardized(rewards, group, sum_over_ranks)


@dataclass(frozen=True)
class LeaveOneOut(_OnePerCompletion):
    """See ``leave_one_out``.

    Example:
        >>> LeaveOneOut()(torch.tensor([1.0, 3.0]), torch.tensor([5, 5]))
        tensor([-2.,  2.])
    """

    name: Literal["leave_one_out"] = "leave_one_out"

    def _estimate(self, rewards: Tensor, group: Tensor, _sum_over_ranks: SumOverRanks) -> Tensor:
        return leave_one_out(rewards, group)


@dataclass(frozen=True)
class Percentile(_OnePerCompletion):
    """See ``percentile``.

    Args:
        q: in percent, 0 to 100.

    Example:
        >>> Percentile(100.0)(torch.tensor([1.0, 3.0]), torch.tensor([5, 5]))
        tensor([-2.,  0.])
    """

    q: float
    name: Literal["percentile"] = "percentile"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.q <= 100:
            raise ConfigurationError(
                needed="a percentile q from 0 to 100", given=str(self.q), remedy="Write the median as q=50."
            )

    def _estimate(self, rewards: Tensor, group: Tensor, _sum_over_ranks: SumOverRanks) -> Tensor:
        return percentile(rewards, group, self.q)


@dataclass(frozen=True)
class Robust(_OnePerCompletion):
    """See ``robust``.

    Example:
        >>> Robust()(torch.tensor([1.0, 3.0]), torch.tensor([5, 5])).round(decimals=2)
        tensor([-1.,  1.])
    """

    name: Literal["robust"] = "robust"

    def _estimate(self, rewards: Tensor, group: Tensor, _sum_over_ranks: SumOverRanks) -> Tensor:
        return robust(rewards, group)


@dataclass(frozen=True)
class MaxRl(_OnePerCompletion):
    """See ``max_rl``.

    Example:
        >>> MaxRl()(torch.tensor([1.0, 3.0]), torch.tensor([5, 5]))
        tensor([-0.5000,  0.5000])
    """

    name: Literal["max_rl"] = "max_rl"

    def _estimate(self, rewards: Tensor, group: Tensor, _sum_over_ranks: SumOverRanks) -> Tensor:
        return max_rl(rewards, group)


@dataclass(frozen=True)
class ReinforcePPBaseline(_OnePerCompletion):
    """See ``reinforce_pp_baseline``.

    Example:
        >>> ReinforcePPBaseline()(torch.tensor([1.0, 3.0]), torch.tensor([5, 5]))
        tensor([-0.7071,  0.7071])
    """

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"

    def _estimate(self, rewards: Tensor, group: Tensor, sum_over_ranks: SumOverRanks) -> Tensor:
        return reinforce_pp_baseline(rewards, group, sum_over_ranks)


@dataclass(frozen=True)
class Gdpo(_Clipped):
    """See ``gdpo``; it alone takes the reward functions apart, so it is called with ``[B, F]`` and their weights.

    Example:
        >>> Gdpo()(torch.tensor([[1.0], [3.0]]), torch.tensor([5, 5]), torch.tensor([2.0])).round(decimals=2)
        tensor([-0.7100,  0.7100])
    """

    name: Literal["gdpo"] = "gdpo"

    def __call__(
        self,
        rewards: Float[Tensor, "B F"],
        group: Int[Tensor, "B"],
        weights: Float[Tensor, "F"],
        sum_over_ranks: SumOverRanks = one_rank,
    ) -> Float[Tensor, "B"]:
        return self._clipped(gdpo(rewards, group, weights, sum_over_ranks))


@dataclass(frozen=True)
class ReinforcePP(_Clipped):
    """See ``reinforce_pp``; it needs no value head and fits none.

    Args:
        gamma: discount a token, 0 to 1.

    Example:
        >>> ReinforcePP()(torch.tensor([0.0, 2.0, 0.0]), torch.tensor([0, 0, 1]))
        (tensor([ 0.5773,  0.5773, -1.1546]), None)
    """

    gamma: float = 1.0
    name: Literal["reinforce_pp"] = "reinforce_pp"
    needs_values: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_fraction("gamma", self.gamma)

    def __call__(
        self,
        token_rewards: Float[Tensor, "N"],
        sequence: Int[Tensor, "N"],
        values: None = None,
        turn: Int[Tensor, "N"] | None = None,
        sum_over_ranks: SumOverRanks = one_rank,
    ) -> tuple[Float[Tensor, "N"], None]:
        del values, turn
        return self._clipped(reinforce_pp(token_rewards, sequence, self.gamma, sum_over_ranks)), None


@dataclass(frozen=True)
class Gae(_Clipped):
    """See ``gae``; the value targets come from the advantages before whitening.

    Args:
        gamma: discount an action, 0 to 1.
        lambda_: 1 trusts the returns, 0 the values.
        action: ``token``, or ``turn`` for one advantage an assistant turn (needs turn ids).
        whiten: bring the advantages to mean 0 and standard deviation 1 over the tokens of every rank.

    Raises:
        InputError: no values, or ``action="turn"`` without turn ids.

    Example:
        >>> Gae(lambda_=0.5, whiten=False)(
        ...     torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), values=torch.tensor([0.5, 0.25]))
        (tensor([0.1250, 0.7500]), tensor([0.6250, 1.0000]))
    """

    gamma: float = 1.0
    lambda_: float = 0.95
    action: Literal["token", "turn"] = "token"
    whiten: bool = True
    name: Literal["gae"] = "gae"
    needs_values: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_fraction("gamma", self.gamma)
        _require_fraction("lambda_", self.lambda_)

    def __call__(
        self,
        token_rewards: Float[Tensor, "N"],
        sequence: Int[Tensor, "N"],
        values: Float[Tensor, "N"] | None = None,
        turn: Int[Tensor, "N"] | None = None,
        sum_over_ranks: SumOverRanks = one_rank,
    ) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
        if values is None:
            raise InputError(
                needed="a value for each token", given="none", remedy="Score the batch with a value head first."
            )
        if self.action == "turn" and turn is None:
            raise InputError(
                needed="turn ids for advantages a turn", given="none", remedy="Give turn [N] or set action='token'."
            )
        advantage, target = gae(
            token_rewards, values, sequence, self.gamma, self.lambda_, turn if self.action == "turn" else None
        )
        if self.whiten:
            advantage = whiten(advantage, _scorable(token_rewards, sequence), sum_over_ranks)
        return self._clipped(advantage), target


GroupAdvantage = (
    Raw
    | GroupCentered
    | GroupStandardized
    | BatchStandardized
    | LeaveOneOut
    | Percentile
    | Robust
    | MaxRl
    | ReinforcePPBaseline
)
"""Called with ``(rewards [B], group [B], sum_over_ranks)``; gives one advantage a completion."""

TokenAdvantage = ReinforcePP | Gae
"""Called with ``(token_rewards [N], sequence [N], values, turn, sum_over_ranks)``; gives (advantage, value target)."""

Advantage = GroupAdvantage | Gdpo | TokenAdvantage


# --- groups as rows -------------------------------------------------------------------------------------------------


def _grid(rewards: Tensor, group: Tensor) -> tuple[Float[Tensor, "P G"], Int[Tensor, "B"]]:
    """The rewards with one row a group, in ascending order of ids and filled up with NaN, and the row of each."""
    if len(rewards) != len(group) or bool(rewards.isinf().any()):
        raise InputError(
            needed="one finite reward (NaN where unscorable) and one group id for each completion",
            given=f"{len(rewards)} rewards, of which {int(rewards.isinf().sum())} infinite, and {len(group)} ids",
            remedy="Give both for every completion of the batch, in the same order.",
        )
    ids, row, size = torch.unique(group, return_inverse=True, return_counts=True)
    order = row.argsort(stable=True)
    column = torch.empty_like(row)
    column[order] = torch.arange(len(row), device=row.device) - (size.cumsum(0) - size)[row[order]]
    grid = rewards.new_full((len(ids), max(size.tolist(), default=1)), torch.nan)
    grid[row, column] = rewards
    return grid, row


def _lowest(grid: Tensor) -> Float[Tensor, "P"]:
    return grid.nan_to_num(nan=torch.inf).amin(1)


def _num_scored(grid: Tensor) -> Int[Tensor, "P"]:
    return (~grid.isnan()).sum(1)


def _compared(grid: Tensor) -> Bool[Tensor, "P"]:
    """Whether a group has two scored completions, the fewest that can be compared."""
    return _num_scored(grid) >= 2


def _mean(grid: Tensor) -> Float[Tensor, "P"]:
    """Taken about the lowest, so that equal rewards differ from their mean by exactly 0."""
    low = _lowest(grid)
    return low + (grid - low[:, None]).nanmean(1)


def _std(grid: Tensor) -> Float[Tensor, "P"]:
    squares = (grid - _mean(grid)[:, None]).square().nansum(1)
    return (squares / (_num_scored(grid) - 1)).sqrt()


def _quantile(grid: Tensor, q: float) -> Float[Tensor, "P"]:
    """Interpolated linearly; torch's own refuses a grid without groups."""
    return grid.nanquantile(q, dim=1) if len(grid) else grid[:, 0]


def _assign(advantage: Tensor, grid: Tensor, row: Tensor) -> Float[Tensor, "B"]:
    """The advantage where there is one: 0 for the unscorable and for those with nothing to be compared with."""
    return torch.where(_compared(grid)[row], advantage, 0).nan_to_num(nan=0.0)


# --- the whole batch ------------------------------------------------------------------------------------------------


def _batch_statistics(
    values: Tensor, kept: Tensor, sum_over_ranks: SumOverRanks
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean and Bessel-corrected standard deviation (0 for a single value) of the kept values of every rank.

    Added up in float64, so that float32 hardly shows how the values lie on the ranks.
    """
    exact = torch.where(kept, values, 0).double()
    total, count = sum_over_ranks(torch.stack([exact.sum(), kept.sum().double()]))
    mean = total / count
    squares = sum_over_ranks(torch.where(kept, exact - mean, 0).square().sum())
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return mean.to(values.dtype), std.to(values.dtype)


# --- runs of tokens -------------------------------------------------------------------------------------------------


def _ends(owner: Tensor) -> Bool[Tensor, "N"]:
    """Which tokens are the last of their sequence or turn."""
    ends = torch.ones_like(owner, dtype=torch.bool)
    ends[:-1] = owner[1:] != owner[:-1]
    return ends


def _scorable(token_rewards: Tensor, sequence: Tensor) -> Bool[Tensor, "N"]:
    """Which tokens have no missing reward ahead of them in their sequence."""
    return ~discounted_returns(token_rewards, sequence, 1.0).isnan()


def _require_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigurationError(
            needed=f"{name} from 0 to 1", given=str(value), remedy=f"Set {name} to 1 for no discount."
        )
