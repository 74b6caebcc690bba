"""Filters: tokens whose policy loss is dropped, without gradient, and whose weight stays in every denominator."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from logitless.errors import ConfigurationError, InputError
from logitless.objective.inputs import check_choices, required, shaped
from logitless.objective.over_ranks import GatherOverRanks
from logitless.objective.ranges import Ranges


@shaped
def off_policy_keep(
    logp: Float[Tensor, "N"],
    logp_drawn: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    ranges: Ranges,
    threshold: float,
) -> Bool[Tensor, "N"]:
    """True where ``A >= 0`` or ``mean_S (logp_drawn - logp) <= threshold``; a NaN in ``logp_drawn`` counts as 0.

    Args:
        logp: [N] the trained policy.
        logp_drawn: [N] the policy that drew the tokens: the sampler's where known, else the old one's.
        advantage: [N].
        ranges: the sequences.
        threshold: nats a token, 0.5.

    Source: DeepSeek-V3.2, arXiv:2512.02556, eq. 9.

    Example:
        >>> two = Ranges(torch.tensor([0, 1]), 2, torch.tensor([True, True]))
        >>> off_policy_keep(torch.tensor([-2.0, -2.0]), torch.tensor([-1.0, -1.0]), torch.tensor([1.0, -1.0]), two, 0.5)
        tensor([ True, False])
    """
    drift = ranges.mean(torch.where(logp_drawn.isnan(), 0.0, logp_drawn - logp))
    return (advantage >= 0) | (ranges.spread(drift) <= threshold)


@shaped
def quantile(values: Float[Tensor, "n"], q: float, counted: Bool[Tensor, "n"] | None = None) -> Float[Tensor, ""]:
    """The q-th quantile with linear interpolation, of any number of values.

    Equals ``torch.quantile(values[counted], q)``, which refuses more than 2^24 elements and needs a synchronisation to
    pick the counted ones. NaN where nothing is counted.

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
    """What a filter may read; vectors but ``logp_sampler`` and ``entropy_old`` hold 0 in rows of weight 0.

    Args:
        logp, advantage: [N].
        trained: [N] tokens with a weight.
        sequences: the sequences as ranges.
        gather: over all ranks.
        logp_old, logp_sampler: [N], None where the batch has none; NaN in the latter where the engine gave no value.
        entropy: [N] of current values, or None.
        entropy_old: [N] of the scoring pass, or None.
        block_threshold: of ``block_threshold``, for a filter that ``settles_once_a_block``; None where nobody asked it.
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
    block_threshold: Float[Tensor, ""] | None = None


class TokenFilter(ABC):
    """A frozen dataclass of knobs that says of each token whether it is kept.

    Attributes:
        name: how recipes and metrics call it.
        narrows_entropy_bonus: whether the tokens that it drops are left out of the entropy bonus, too.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    name: str
    narrows_entropy_bonus: ClassVar[bool] = False

    @property
    def settles_once_a_block(self) -> bool:
        """Whether it keeps tokens by a threshold of the whole block's scoring pass."""
        return False

    def block_threshold(self, entropy_old: Float[Tensor, "n"], trained: Bool[Tensor, "n"]) -> Float[Tensor, ""]:
        """That threshold, from the tokens of the block on all ranks."""
        raise NotImplementedError(f"{self.name!r} has no threshold of the block")

    @abstractmethod
    def kept(self, inputs: FilterInputs) -> Bool[Tensor, "N"]:
        """True where the token stays in the policy loss."""


@dataclass(frozen=True)
class OffPolicy(TokenFilter):
    """Drop sequences with a negative advantage that the policy has moved away from: ``off_policy_keep``.

    Args:
        threshold: nats a token.
    """

    threshold: float
    name: Literal["off_policy"] = field(default="off_policy", kw_only=True)

    def kept(self, inputs: FilterInputs) -> Bool[Tensor, "N"]:
        """``off_policy_keep`` against the sampler, or where it gave nothing, the old policy.

        Raises:
            InputError: the batch has neither.
        """
        drawn = inputs.logp_sampler if inputs.logp_sampler is not None else required(inputs.logp_old, "logp_old")
        return off_policy_keep(inputs.logp, drawn, inputs.advantage, inputs.sequences, self.threshold)


@dataclass(frozen=True)
class TopEntropy(TokenFilter):
    """Keep the fraction of tokens with the highest entropy.

    Args:
        quantile: fraction kept, 0.2; 0 keeps only the largest.
        scope: ``block``: entropy and threshold of the scoring pass, once a block; ``micro_batch``: of current values,
            so that the result depends on how the step is cut (TRL).

    Raises:
        ConfigurationError: a fraction outside [0, 1].

    Source: arXiv:2506.01939.
    """

    narrows_entropy_bonus: ClassVar[bool] = True
    quantile: float
    scope: Literal["block", "micro_batch"] = "block"
    name: Literal["top_entropy"] = field(default="top_entropy", kw_only=True)

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0 <= self.quantile <= 1:
            raise ConfigurationError(
                needed="a fraction of tokens to keep from 0 to 1",
                given=str(self.quantile),
                remedy="Use 0.2 to train on the fifth of the tokens with the highest entropy.",
            )

    @property
    def settles_once_a_block(self) -> bool:
        return self.scope == "block"

    def block_threshold(self, entropy_old: Float[Tensor, "n"], trained: Bool[Tensor, "n"]) -> Float[Tensor, ""]:
        return self.threshold(entropy_old, trained)

    def kept(self, inputs: FilterInputs) -> Bool[Tensor, "N"]:
        """True from the threshold on.

        Raises:
            InputError: the entropy, or the block's threshold, is missing.
        """
        if self.scope == "block":
            return above_threshold(inputs.entropy_old, inputs.block_threshold)
        entropy = required(inputs.entropy, "entropy")
        return entropy >= self.threshold(inputs.gather(entropy), inputs.gather(inputs.trained))

    def threshold(self, entropy: Float[Tensor, "n"], counted: Bool[Tensor, "n"]) -> Float[Tensor, ""]:
        """The entropy from which tokens are kept: the ``1 - quantile`` quantile of the counted tokens."""
        return quantile(entropy, 1 - self.quantile, counted)


@shaped
def above_threshold(entropy_old: Float[Tensor, "N"] | None, threshold: Float[Tensor, ""] | None) -> Bool[Tensor, "N"]:
    """True where the entropy of the scoring pass is at least the block's threshold.

    Raises:
        InputError: one of them is missing.

    Example:
        >>> above_threshold(torch.tensor([0.1, 0.5]), torch.tensor(0.5))
        tensor([False,  True])
    """
    entropy_old = required(entropy_old, "entropy_old")
    if threshold is None:
        raise InputError(
            needed="the block's entropy threshold",
            given="None",
            remedy="Pass block=objective.block_statistics(whole_block), or set TopEntropy(scope='micro_batch').",
        )
    return entropy_old >= threshold


Filter = OffPolicy | TopEntropy
