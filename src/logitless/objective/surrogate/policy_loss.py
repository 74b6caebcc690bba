"""The interface of policy losses."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.over_ranks import GatherOverRanks, one_rank
from logitless.objective.ranges import Level, Ranges

RatioLevel = Literal["any", "token", "none"]
"""What a surrogate reads: a ratio at any level, each token's log ratio, or none."""

Scope = Literal["block", "micro_batch"]
"""Where tokens are selected: once a block from the scoring pass, or in each micro-batch from current values."""


@dataclass(frozen=True)
class SurrogateInputs:
    """What a surrogate may read; tokens of weight 0 hold 0 everywhere.

    Args:
        logp, advantage: [N].
        sequences: the sequences as ranges.
        logp_old, token_log_ratio, log_ratio: [N], None without ``logp_old``; ``log_ratio`` is at the configured level.
        correction: [N] sampler correction, or None.
        logp_ref: [N] of the reference, where there is one; else None.
        selected: [N] result of ``PolicyLoss.select``, or None.
    """

    logp: Float[Tensor, "N"]
    advantage: Float[Tensor, "N"]
    sequences: Ranges
    logp_old: Float[Tensor, "N"] | None = None
    token_log_ratio: Float[Tensor, "N"] | None = None
    log_ratio: Float[Tensor, "N"] | None = None
    correction: Float[Tensor, "N"] | None = None
    selected: Bool[Tensor, "N"] | None = None
    logp_ref: Float[Tensor, "N"] | None = None


@dataclass(frozen=True)
class SurrogateTerms:
    """A surrogate's loss per token, and where its bounds clip.

    Args:
        loss: [N], differentiable.
        clipped_low, clipped_high: [N] tokens whose gradient a bound of the ratio removes or caps; None without bounds.
    """

    loss: Float[Tensor, "N"]
    clipped_low: Bool[Tensor, "N"] | None = None
    clipped_high: Bool[Tensor, "N"] | None = None


@dataclass(frozen=True)
class SelectionInputs:
    """What the selection of tokens may read.

    Args:
        logp: [N] nats: of the scoring pass, or of the policy being trained, by the scope.
        advantage: [N].
        trained: [N] tokens with a weight.
        log_ratio: [N] at the configured level; None in the scoring pass, where every ratio is 1.
        gather: over all ranks.
        generator: random numbers, seeded differently on every rank; or None.
    """

    logp: Float[Tensor, "N"]
    advantage: Float[Tensor, "N"]
    trained: Bool[Tensor, "N"]
    log_ratio: Float[Tensor, "N"] | None = None
    gather: GatherOverRanks = one_rank
    generator: torch.Generator | None = None


class PolicyLoss(ABC):
    """Base class of the surrogates: a frozen dataclass, called with ``SurrogateInputs``.

    Attributes:
        name: what recipes call it.
        reads: which ratio it reads.
        level: the level at which tokens share their loss, and must share their advantage.
        reads_advantage: whether it reads the advantage.
        reads_reference: whether it reads ``logp_ref``.
        uses_correction: whether it uses the (token-level) sampler correction itself; any other loss is multiplied by
            it.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    name: str = "own"
    reads: ClassVar[RatioLevel] = "any"
    level: ClassVar[Level] = "token"
    reads_advantage: ClassVar[bool] = True
    reads_reference: ClassVar[bool] = False
    uses_correction: ClassVar[bool] = False

    @property
    def selects(self) -> Scope | None:
        """Where ``select`` selects tokens for separate treatment; None if it does not."""
        return None

    def select(self, inputs: SelectionInputs) -> Bool[Tensor, "N"]:
        """[N] the selected tokens, for a loss with ``selects``."""
        raise NotImplementedError(f"{self.name!r} selects no tokens")

    @abstractmethod
    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        """The loss per token, to be minimized."""


def by_sign(advantage: Tensor, positive: float, negative: float) -> Tensor:
    """One number where A >= 0, another where A < 0, in the dtype of A."""
    return torch.where(advantage >= 0, advantage.new_full((), positive), advantage.new_full((), negative))


def check_bounds(ratio_min: float, ratio_max: float) -> None:
    """Raises ConfigurationError unless ``0 <= ratio_min < ratio_max``."""
    if not 0 <= ratio_min < ratio_max:
        raise ConfigurationError(
            needed="0 <= ratio_min < ratio_max",
            given=f"ratio_min={ratio_min}, ratio_max={ratio_max}",
            remedy="Bounds are absolute: an epsilon of 0.2 is ratio_min=0.8, ratio_max=1.2.",
        )


def check_trust_region(ratio_min: float, ratio_max: float) -> None:
    """Raises ConfigurationError unless ``0 <= ratio_min < ratio_max`` and the two enclose 1.

    A bound on the wrong side of 1 takes the gradient from every token with an advantage of one sign: before the first
    step all ratios are 1.
    """
    check_bounds(ratio_min, ratio_max)
    if not ratio_min <= 1 <= ratio_max:
        raise ConfigurationError(
            needed="ratio_min <= 1 <= ratio_max",
            given=f"ratio_min={ratio_min}, ratio_max={ratio_max}",
            remedy="Bounds are absolute: epsilons of 0.2 and 0.28 are ratio_min=0.8, ratio_max=1.28.",
        )


def check_fraction(fraction: float) -> None:
    """Raises ConfigurationError unless the fraction is in (0, 1]."""
    if not 0 < fraction <= 1:
        raise ConfigurationError(
            needed="a fraction above 0 and at most 1", given=str(fraction), remedy="Use about 2e-4."
        )


def check_positive(**values: float | None) -> None:
    """Raises ConfigurationError for a number that is not positive; None is ignored."""
    wrong = {name: value for name, value in values.items() if value is not None and not value > 0}
    if wrong:
        raise ConfigurationError(
            needed=f"positive {', '.join(wrong)}",
            given=", ".join(str(value) for value in wrong.values()),
            remedy="Use the default, or any number above 0.",
        )
