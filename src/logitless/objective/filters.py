"""Filters: tokens whose policy loss is dropped, without gradient, and whose weight stays in every denominator."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import ConfigDict, Field
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.inputs import check_choices
from logitless.objective.ranges import Ranges


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
class OffPolicy:
    """Drop sequences with a negative advantage that the policy has moved away from: ``off_policy_keep``.

    Args:
        threshold: nats a token.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    threshold: float
    name: Literal["off_policy"] = field(default="off_policy", kw_only=True)


@dataclass(frozen=True)
class TopEntropy:
    """Keep the fraction of tokens with the highest entropy.

    Args:
        quantile: fraction kept, 0.2; 0 keeps only the largest.
        scope: ``block``: entropy and threshold of the scoring pass, once a block; ``micro_batch``: of current values,
            so that the result depends on how the step is cut (TRL).

    Raises:
        ConfigurationError: a fraction outside [0, 1].

    Source: arXiv:2506.01939.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
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

    def threshold(self, entropy: Float[Tensor, "n"], counted: Bool[Tensor, "n"]) -> Float[Tensor, ""]:
        """The entropy from which tokens are kept: the ``1 - quantile`` quantile of the counted tokens."""
        return quantile(entropy, 1 - self.quantile, counted)


Filter = Annotated[OffPolicy | TopEntropy, Field(discriminator="name")]
