"""Advantages scaled by one standard deviation of the whole batch, over all ranks."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.advantage.estimator import EPSILON, AdvantageInputs, OnePerCompletion, refuse_infinite
from logitless.objective.advantage.group_relative import (
    as_rows,
    assign,
    compared,
    group_centered,
    group_standardized,
    has_signal,
    mean_of,
)
from logitless.objective.inputs import required, shaped
from logitless.objective.over_ranks import SumOverRanks, one_rank


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


@shaped
def batch_standardized(
    rewards: Float[Tensor, "B"], group: Int[Tensor, "B"], sum_over_ranks: SumOverRanks = one_rank
) -> Float[Tensor, "B"]:
    """Reward minus the mean of its group, over the standard deviation of all rewards of the batch.

    ``A_i = (r_i - mean(r of the group)) / (std(all scored r) + EPSILON)``

    Args:
        rewards, group: as ``group_centered``; all of a group on one rank.
        sum_over_ranks: for the standard deviation over all ranks.

    Returns: as ``group_centered``.

    Source: arXiv:2508.08221 ("Lite PPO"); TRL's ``scale_rewards="batch"``.

    Example:
        >>> batch_standardized(torch.tensor([0.0, 2.0, 0.0, 2.0]), torch.tensor([0, 0, 1, 1]))  # 1 / sqrt(4 / 3)
        tensor([-0.8660,  0.8660, -0.8660,  0.8660])
    """
    grid, row = as_rows(rewards, group)
    _, std = batch_statistics(rewards, ~rewards.isnan(), sum_over_ranks)
    return assign((rewards - mean_of(grid)[row]) / (std + EPSILON), grid, row)


@dataclass(frozen=True)
class BatchStandardized(OnePerCompletion):
    """See ``batch_standardized``."""

    name: Literal["batch_standardized"] = "batch_standardized"

    def per_completion(self, inputs: AdvantageInputs, sum_over_ranks: SumOverRanks) -> Tensor:
        return batch_standardized(inputs.completion_rewards(), inputs.group, sum_over_ranks)


@shaped
def reinforce_pp_baseline(
    rewards: Float[Tensor, "B"],
    group: Int[Tensor, "B"],
    sequence: Int[Tensor, "N"],
    sum_over_ranks: SumOverRanks = one_rank,
) -> Float[Tensor, "B"]:
    """Reward minus the mean of its group, then whitened over ``sequence``: a completion counts once for each entry.

    ``A = (a - mean(a[sequence])) / (std(a[sequence]) + EPSILON)`` with ``a = r - mean(r of the group)``

    Args:
        rewards, group: as ``group_centered``; all of a group on one rank.
        sequence: [N] completion of each trained token; ``arange(B)`` whitens over completions instead.
        sum_over_ranks: for whitening over all ranks.

    Returns: as ``group_centered``.

    Source: REINFORCE++-baseline, arXiv:2501.03262; OpenRLHF and verl whiten over tokens too.

    Example:
        >>> rewards, group = torch.tensor([0.0, 2.0, 0.0, 4.0]), torch.tensor([0, 0, 1, 1])
        >>> reinforce_pp_baseline(rewards, group, torch.arange(4))  # std sqrt(10 / 3)
        tensor([-0.5477,  0.5477, -1.0954,  1.0954])
        >>> reinforce_pp_baseline(rewards, group, torch.tensor([0, 1, 2, 3, 3]))  # -1 1 -2 2 2: mean 0.4, std sqrt(3.3)
        tensor([-0.7706,  0.3303, -1.3211,  0.8807])
    """
    grid, row = as_rows(rewards, group)
    centered, scored = group_centered(rewards, group), ~rewards.isnan()
    mean, std = batch_statistics(centered[sequence], scored[sequence], sum_over_ranks)
    return assign(torch.where(scored, (centered - mean) / (std + EPSILON), 0), grid, row)


@dataclass(frozen=True)
class ReinforcePPBaseline(OnePerCompletion):
    """See ``reinforce_pp_baseline``.

    Args:
        whiten_over: ``tokens`` (the paper's), where a long completion counts more, or ``completions``.
    """

    whiten_over: Literal["tokens", "completions"] = "tokens"
    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"

    def per_completion(self, inputs: AdvantageInputs, sum_over_ranks: SumOverRanks) -> Tensor:
        rewards = inputs.completion_rewards()
        counted = inputs.sequence if self.whiten_over == "tokens" else torch.arange(len(rewards), device=rewards.device)
        return reinforce_pp_baseline(rewards, inputs.group, counted, sum_over_ranks)


@shaped
def gpg(
    rewards: Float[Tensor, "B"], group: Int[Tensor, "B"], sum_over_ranks: SumOverRanks = one_rank
) -> Float[Tensor, "B"]:
    """Reward minus the mean of its group, scaled up by the share of groups that have no signal.

    ``A_i = alpha * (r_i - mean(r of the group))``, ``alpha = groups / groups whose rewards differ``

    So a batch in which most groups are solved or hopeless has a gradient of the same size.

    Args:
        rewards, group: as ``group_centered``; all of a group on one rank.
        sum_over_ranks: for the counts over all ranks; groups with fewer than two scored completions do not count.

    Returns: as ``group_centered``.

    Source: GPG, arXiv:2504.02546, with ``F_norm = 1`` and ``alpha = B / (B - M)``.

    Example:
        >>> gpg(torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]))  # alpha 2
        tensor([-1.,  1.,  0.,  0.])
    """
    grid, row = as_rows(rewards, group)
    counts = torch.stack([compared(grid).sum(), has_signal(rewards, group).sum()]).double()
    groups, with_signal = sum_over_ranks(counts)
    alpha = (groups / with_signal.clamp(min=1)).to(rewards.dtype)
    return assign(alpha * (rewards - mean_of(grid)[row]), grid, row)


@dataclass(frozen=True)
class Gpg(OnePerCompletion):
    """See ``gpg``."""

    name: Literal["gpg"] = "gpg"

    def per_completion(self, inputs: AdvantageInputs, sum_over_ranks: SumOverRanks) -> Tensor:
        return gpg(inputs.completion_rewards(), inputs.group, sum_over_ranks)


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
def gdpo(
    rewards: Float[Tensor, "B F"],
    group: Int[Tensor, "B"],
    weights: Float[Tensor, "F"],
    sum_over_ranks: SumOverRanks = one_rank,
) -> Float[Tensor, "B"]:
    """Standardize each reward function in its group, sum with weights, whiten over the batch.

    ``A = whiten(sum_f weights_f * group_standardized(r_f))``

    Args:
        rewards: [B, F], NaN where function f could not score completion i: that term is then 0.
        group: [B] ids; all of a group on one rank.
        weights: [F].
        sum_over_ranks: for whitening over all ranks.

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
    grid, row = as_rows(combined, group)
    return assign(whiten(combined, ~combined.isnan(), sum_over_ranks), grid, row)


@dataclass(frozen=True)
class Gdpo(OnePerCompletion):
    """See ``gdpo``. Reads ``scores`` and ``weights`` instead of ``rewards``.

    Raises:
        ConfigurationError: called with a KL in the reward or with turn rewards, which no reward function gives.
        InputError: called without scores or weights.
    """

    name: Literal["gdpo"] = "gdpo"
    reads_functions: ClassVar[bool] = True
    takes_kl: ClassVar[bool] = False

    def per_completion(self, inputs: AdvantageInputs, sum_over_ranks: SumOverRanks) -> Tensor:
        if inputs.kl is not None or inputs.turn_rewards is not None:
            raise ConfigurationError(
                needed="one reward a completion for a KL in the reward, or rewards of turns, to be part of",
                given="gdpo, which takes the reward functions apart",
                remedy="Put the KL in the loss (kl.placement: loss), or choose another advantage.",
            )
        scores, weights = required(inputs.scores, "scores"), required(inputs.weights, "weights")
        return gdpo(scores, inputs.group, weights, sum_over_ranks)
