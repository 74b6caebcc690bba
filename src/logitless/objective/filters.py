"""Filters: they set the policy loss of tokens to 0; the tokens' weight stays in every denominator."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.errors import ConfigurationError, InputError
from logitless.objective.inputs import check_knobs, required, shaped
from logitless.objective.over_ranks import GatherOverRanks
from logitless.objective.ranges import Ranges


@shaped
def off_policy_keep(
    logp: Float[Tensor, "N"],
    logp_sampled: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    ranges: Ranges,
    threshold: float,
) -> Bool[Tensor, "N"]:
    """True where ``A >= 0`` or ``mean_S (logp_sampled - logp) <= threshold``; a NaN in ``logp_sampled`` counts as 0.

    Args:
        logp: [N] the trained policy.
        logp_sampled: [N] the sampler's if known, else the old policy's.
        advantage: [N].
        ranges: the sequences.
        threshold: nats a token, 0.5.

    Source: DeepSeek-V3.2, arXiv:2512.02556, eq. 9.

    Example:
        >>> two = Ranges(torch.tensor([0, 1]), 2, torch.tensor([True, True]))
        >>> off_policy_keep(torch.tensor([-2.0, -2.0]), torch.tensor([-1.0, -1.0]), torch.tensor([1.0, -1.0]), two, 0.5)
        tensor([ True, False])
    """
    drift = ranges.mean(torch.where(logp_sampled.isnan(), 0.0, logp_sampled - logp))
    return (advantage >= 0) | (ranges.spread(drift) <= threshold)


@shaped
def quantile(values: Float[Tensor, "n"], q: float, counted: Bool[Tensor, "n"] | None = None) -> Float[Tensor, ""]:
    """The q-th quantile of the counted values, linearly interpolated; NaN if nothing is counted.

    Equals ``torch.quantile(values[counted], q)``, without its limit of 2^24 elements and without a synchronization.

    Example:
        >>> quantile(torch.tensor([3.0, 1.0, 2.0]), 0.25)
        tensor(1.5000)
    """
    counted = torch.ones_like(values, dtype=torch.bool) if counted is None else counted
    if not len(values):
        return values.new_full((), torch.nan)
    ordered = torch.where(counted, values, torch.nan).sort().values  # NaN comes last
    position = (counted.sum() - 1).to(values.dtype) * torch.tensor(q, dtype=values.dtype)
    below = position.floor()
    low, high = ordered.take(below.long()), ordered.take(position.ceil().long())
    return torch.lerp(low, high, position - below)


@dataclass(frozen=True)
class FilterInputs:
    """What a filter may read; vectors except ``logp_sampler`` and ``entropy_old`` hold 0 in tokens of weight 0.

    Args:
        logp, advantage: [N].
        trained: [N] tokens with a weight.
        sequences: the sequences as ranges.
        gather: over all ranks.
        logp_old, logp_sampler: [N] or None; NaN in the latter where the engine gave no value.
        entropy: [N] of current values, or None.
        entropy_old: [N] of the scoring pass, or None.
        sampler_log_ratio: [N] ``logp_old - logp_sampler``, 0 where the engine gave no value; or None.
        lag: [N] optimizer steps between the sampling weights and those of ``logp_old``, or None.
        thresholds: results of ``block_threshold`` by name.
    """

    logp: Float[Tensor, "N"]
    advantage: Float[Tensor, "N"]
    trained: Bool[Tensor, "N"]
    sequences: Ranges
    gather: GatherOverRanks
    logp_old: Float[Tensor, "N"] | None = None
    logp_sampler: Float[Tensor, "N"] | None = None
    entropy: Float[Tensor, "N"] | None = None
    entropy_old: Float[Tensor, "N"] | None = None
    sampler_log_ratio: Float[Tensor, "N"] | None = None
    lag: Int[Tensor, "N"] | None = None
    thresholds: Mapping[str, Float[Tensor, ""]] = field(default_factory=dict)


@dataclass(frozen=True)
class WholeBlock:
    """The block's tokens over all ranks, before its first step.

    Args:
        trained: [n] tokens with a weight.
        entropy_old: [n] of the scoring pass, or None.
        sampler_log_ratio: [n] ``logp_old - logp_sampler``, or None.
    """

    trained: Bool[Tensor, "n"]
    entropy_old: Float[Tensor, "n"] | None = None
    sampler_log_ratio: Float[Tensor, "n"] | None = None


class TokenFilter(ABC):
    """Base class of the filters: a frozen dataclass.

    Attributes:
        name: what recipes and metrics call it.
        narrows_entropy_bonus: whether the tokens that it drops leave the entropy bonus as well.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    name: str
    narrows_entropy_bonus: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """Unique among the filters of an objective."""
        return self.name

    @property
    def settles_once_a_block(self) -> bool:
        """Whether it uses a threshold from the whole block's scoring pass."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        """Fields of ``TokenBatch`` that it needs."""
        return frozenset()

    def block_threshold(self, block: WholeBlock) -> Float[Tensor, ""]:
        """The threshold, from the block's tokens on all ranks."""
        del block
        raise NotImplementedError(f"{self.name!r} has no threshold of the block")

    @abstractmethod
    def kept(self, inputs: FilterInputs) -> Bool[Tensor, "N"]:
        """True where the token stays in the policy loss."""


@dataclass(frozen=True)
class OffPolicy(TokenFilter):
    """Drop negative-advantage sequences that the policy has moved away from: ``off_policy_keep``.

    Args:
        threshold: nats a token.
    """

    threshold: float
    name: Literal["off_policy"] = field(default="off_policy", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self)

    def kept(self, inputs: FilterInputs) -> Bool[Tensor, "N"]:
        """``off_policy_keep`` against the sampler, or the old policy without one.

        Raises:
            InputError: the batch has neither.
        """
        sampled = inputs.logp_sampler if inputs.logp_sampler is not None else required(inputs.logp_old, "logp_old")
        return off_policy_keep(inputs.logp, sampled, inputs.advantage, inputs.sequences, self.threshold)


@dataclass(frozen=True)
class TopEntropy(TokenFilter):
    """Keep the fraction of tokens with the highest entropy.

    Args:
        quantile: fraction kept, 0.2; 0 keeps only the largest.
        scope: ``block``: threshold from the scoring pass; ``micro_batch``: from current values (TRL).

    Raises:
        ConfigurationError: a fraction outside [0, 1].

    Source: arXiv:2506.01939.
    """

    narrows_entropy_bonus: ClassVar[bool] = True
    quantile: float
    scope: Literal["block", "micro_batch"] = "block"
    name: Literal["top_entropy"] = field(default="top_entropy", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self)
        if not 0 <= self.quantile <= 1:
            raise ConfigurationError(
                needed="a fraction of tokens to keep from 0 to 1",
                given=str(self.quantile),
                remedy="Use 0.2 to train on the fifth of the tokens with the highest entropy.",
            )

    @property
    def settles_once_a_block(self) -> bool:
        return self.scope == "block"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy_old"} if self.scope == "block" else ())

    def block_threshold(self, block: WholeBlock) -> Float[Tensor, ""]:
        return self.threshold(required(block.entropy_old, "entropy_old"), block.trained)

    def kept(self, inputs: FilterInputs) -> Bool[Tensor, "N"]:
        """True from the threshold on.

        Raises:
            InputError: the entropy, or the block's threshold, is missing.
        """
        if self.scope == "block":
            return above_threshold(inputs.entropy_old, inputs.thresholds.get(self.name))
        entropy = required(inputs.entropy, "entropy")
        return entropy >= self.threshold(inputs.gather(entropy), inputs.gather(inputs.trained))

    def threshold(self, entropy: Float[Tensor, "n"], counted: Bool[Tensor, "n"]) -> Float[Tensor, ""]:
        """The ``1 - quantile`` quantile of the counted tokens."""
        return quantile(entropy, 1 - self.quantile, counted)


@shaped
def above_threshold(entropy_old: Float[Tensor, "N"] | None, threshold: Float[Tensor, ""] | None) -> Bool[Tensor, "N"]:
    """True where the entropy of the scoring pass is at least the block's threshold.

    Raises:
        InputError: one of them is missing.
    """
    entropy_old = required(entropy_old, "entropy_old")
    if threshold is None:
        raise InputError(
            needed="the block's entropy threshold",
            given="None",
            remedy="Pass block=objective.block_statistics(whole_block), or set TopEntropy(scope='micro_batch').",
        )
    return entropy_old >= threshold


Measure = Literal["k1", "k2", "k3", "tv"]
Over = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]


@shaped
def sampler_divergence(
    log_ratio: Float[Tensor, "N"], logp_old: Float[Tensor, "N"], measure: Measure
) -> Float[Tensor, "N"]:
    """How far the old policy is from the sampler at a token, D = logp_old - logp_sampler:

        k1 = -D      k2 = D^2 / 2      k3 = exp(D) - 1 - D      tv = |exp(logp_old) - exp(logp_sampler)|

    k1 to k3 estimate KL(sampler || old).

    Source: http://joschu.net/blog/kl-approx.html; tv, DPPO, arXiv:2602.04879 (binary TV).

    Example:
        >>> D, old = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
        >>> [round(sampler_divergence(D, old, measure).item(), 4) for measure in ("k1", "k2", "k3", "tv")]
        [0.6931, 0.2402, 0.1931, 0.25]
    """
    if measure == "k1":
        return -log_ratio
    if measure == "k2":
        return log_ratio.square() / 2
    if measure == "k3":
        return torch.expm1(log_ratio) - log_ratio
    return (logp_old.exp() - (logp_old - log_ratio).exp()).abs()


@dataclass(frozen=True)
class SamplerRejection(TokenFilter):
    """Drop tokens, or whole sequences, where the old policy is too far from the sampler.

    Several may be combined, also with a ``SamplerCorrection``. Each sees all tokens: their order does not matter.

    Args:
        measure: see ``sampler_divergence``.
        over: ``token``; else the sum, the mean or the maximum over the sequence.
        max: largest value kept; nats, or a probability for tv.
        min: smallest value kept, for k1 only, which has a sign.

    Raises:
        ConfigurationError: bounds out of order, a ``min`` for another measure, or ``sequence_max`` of k1.

    Source: verl's rollout correction, where rejected tokens leave the denominator, too.
    """

    max: float
    measure: Measure = "k1"
    over: Over = "token"
    min: float | None = None
    name: Literal["sampler_rejection"] = field(default="sampler_rejection", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self)
        low = -float("inf") if self.min is None else self.min
        if self.measure != "k1" and (self.min is not None or not self.max > 0):
            raise ConfigurationError(
                needed=f"a positive max and no min for {self.measure}, which is never negative",
                given=f"min={self.min}, max={self.max}",
                remedy="Set max alone, or measure: k1.",
            )
        if self.measure == "k1" and not low < 0 < self.max:
            raise ConfigurationError(
                needed="min < 0 < max for k1, which is 0 where both policies agree",
                given=f"min={self.min}, max={self.max}",
                remedy="Use for example min: -0.7 and max: 0.7, ratios of 2 and 1/2.",
            )
        if self.measure == "k1" and self.over == "sequence_max":
            raise ConfigurationError(
                needed="a measure without a sign for the largest of a sequence",
                given="k1",
                remedy="Set measure to k2, k3 or tv.",
            )

    @property
    def label(self) -> str:
        return f"{self.name}_{self.over}_{self.measure}"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logp_old", "logp_sampler"})

    def kept(self, inputs: FilterInputs) -> Bool[Tensor, "N"]:
        """True within the bounds; a token without ``logp_sampler`` counts as D = 0.

        Raises:
            InputError: the batch has no ``logp_old`` or no ``logp_sampler``.
        """
        log_ratio = required(inputs.sampler_log_ratio, "logp_sampler")
        distance = sampler_divergence(log_ratio, required(inputs.logp_old, "logp_old"), self.measure)
        if self.over == "token":
            return self._within(distance)
        if self.over == "sequence_max":  # as a sum of tokens over the bound, which also works over ranks
            over = (~self._within(distance)).to(distance.dtype)
            return inputs.sequences.spread(inputs.sequences.sum(over)) == 0
        whole = inputs.sequences.sum(distance) if self.over == "sequence_sum" else inputs.sequences.mean(distance)
        return inputs.sequences.spread(self._within(whole).to(distance.dtype)) == 1

    def _within(self, distance: Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
        inside = distance <= self.max
        return inside if self.min is None else inside & (distance >= self.min)


@shaped
def second_moment_bound(
    log_ratio: Float[Tensor, "n"], counted: Bool[Tensor, "n"], max_mean: float
) -> Float[Tensor, ""]:
    """The largest ``D^2`` to keep so that the mean of D^2 over the kept is at most ``max_mean``; -1 if none. Ties stay
    together.

    Example:
        >>> second_moment_bound(torch.tensor([0.1, -0.2, 3.0]), torch.tensor([True, True, True]), 0.04)
        tensor(0.0400)
    """
    squares = torch.where(counted, log_ratio.square(), torch.inf).sort().values
    places = torch.arange(1, len(squares) + 1, device=squares.device, dtype=torch.float64)
    last_of_its_size = squares < torch.cat([squares[1:], squares.new_full((1,), torch.nan)])
    stays = (squares.double().cumsum(0) / places <= max_mean) & (last_of_its_size | (places == len(squares)))
    return torch.where(stays, squares, -1.0).amax(0) if len(squares) else squares.new_full((), -1.0)


@dataclass(frozen=True)
class SecondMoment(TokenFilter):
    """Drop the tokens with the largest ``D^2 = (logp_old - logp_sampler)^2`` until the mean over the rest is small.

    Args:
        max_mean: of ``(logp_old - logp_sampler)^2`` over the kept tokens of the block, nats^2; 0.04.

    Raises:
        ConfigurationError: a bound that is not positive.

    Source: M2PO (Zheng et al. 2025); the mask is computed once a block, from the scoring pass.
    """

    max_mean: float = 0.04
    name: Literal["second_moment"] = field(default="second_moment", kw_only=True)

    def __post_init__(self) -> None:
        if not self.max_mean > 0:
            raise ConfigurationError(
                needed="a positive max_mean", given=str(self.max_mean), remedy="Use 0.04, as the paper does."
            )

    @property
    def settles_once_a_block(self) -> bool:
        return True

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logp_old", "logp_sampler"})

    def block_threshold(self, block: WholeBlock) -> Float[Tensor, ""]:
        return second_moment_bound(required(block.sampler_log_ratio, "logp_sampler"), block.trained, self.max_mean)

    def kept(self, inputs: FilterInputs) -> Bool[Tensor, "N"]:
        """True up to the block's bound.

        Raises:
            InputError: ``logp_sampler`` or the block's bound is missing.
        """
        log_ratio = required(inputs.sampler_log_ratio, "logp_sampler")
        bound = inputs.thresholds.get(self.name)
        if bound is None:
            raise InputError(
                needed="the block's bound on the second moment",
                given="None",
                remedy="Pass block=objective.block_statistics(whole_block).",
            )
        return log_ratio.square() <= bound


@dataclass(frozen=True)
class Stale(TokenFilter):
    """Drop tokens sampled by weights that are too old.

    Args:
        max_lag: optimizer steps between the sampling weights and those that scored the block; 0 keeps on-policy tokens.
        over: ``token``; or ``sequence``, which drops the whole completion.

    Raises:
        ConfigurationError: a negative ``max_lag``.

    Source: PipelineRL, arXiv:2509.19128; AReaL, arXiv:2505.24298, which bounds the age of whole completions.

    Example:
        >>> from logitless.objective.over_ranks import one_rank
        >>> two = Ranges(torch.tensor([0, 0, 1]), 2, torch.tensor([True, True, True]))
        >>> now = torch.zeros(3)
        >>> inputs = FilterInputs(now, now, now == 0, two, one_rank, lag=torch.tensor([3, 1, 1]))
        >>> Stale(2).kept(inputs), Stale(2, over="sequence").kept(inputs)
        (tensor([False,  True,  True]), tensor([False, False,  True]))
    """

    max_lag: int
    over: Literal["token", "sequence"] = "token"
    name: Literal["stale"] = field(default="stale", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.max_lag < 0:
            raise ConfigurationError(
                needed="a max_lag of at least 0",
                given=str(self.max_lag),
                remedy="Use for example twice the optimizer steps of a block.",
            )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"lag"})

    def kept(self, inputs: FilterInputs) -> Bool[Tensor, "N"]:
        """True up to the bound; a token of unknown age counts as on-policy.

        Raises:
            InputError: the batch has no ``lag``.
        """
        old = required(inputs.lag, "lag") > self.max_lag
        if self.over == "token":
            return ~old
        return inputs.sequences.spread(inputs.sequences.sum(old.to(inputs.logp.dtype))) == 0


@dataclass(frozen=True)
class AdvantageOutliers(TokenFilter):
    """Drop tokens with ``|A| > max``.

    Args:
        max: the largest ``|A|`` kept; of whitened advantages, in standard deviations.

    Raises:
        ConfigurationError: a bound that is not positive.

    Source: StableReinforce, arXiv:2505.02835.

    Example:
        >>> from logitless.objective.over_ranks import one_rank
        >>> one, now = Ranges(torch.tensor([0, 0]), 1, torch.tensor([True, True])), torch.zeros(2)
        >>> AdvantageOutliers().kept(FilterInputs(now, torch.tensor([3.0, -3.5]), now == 0, one, one_rank))
        tensor([ True, False])
    """

    max: float = 3.0
    name: Literal["advantage_outliers"] = field(default="advantage_outliers", kw_only=True)

    def __post_init__(self) -> None:
        if not self.max > 0:
            raise ConfigurationError(
                needed="a positive bound on |A|", given=str(self.max), remedy="Use 3, as the paper does."
            )

    def kept(self, inputs: FilterInputs) -> Bool[Tensor, "N"]:
        """True up to the bound."""
        return inputs.advantage.abs() <= self.max


Filter = OffPolicy | TopEntropy | SamplerRejection | SecondMoment | Stale | AdvantageOutliers
