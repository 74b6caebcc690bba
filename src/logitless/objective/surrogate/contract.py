"""What a policy loss is given, what it gives back, and what it states about itself so that nobody asks for its name."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.over_ranks import GatherOverRanks, one_rank
from logitless.objective.ranges import Grain, Ranges

RatioLevel = Literal["any", "token", "none"]
"""What a surrogate reads: a ratio at any level, the log ratio of each token itself, or no ratio at all."""

Scope = Literal["block", "micro_batch"]
"""Where tokens are chosen: once a block, from the scoring pass, or in each micro-batch, from current values."""


@dataclass(frozen=True)
class SurrogateInputs:
    """What a surrogate may read; rows of weight 0 hold 0 everywhere.

    Args:
        logp, advantage: [N].
        sequences: the sequences as ranges.
        logp_old, token_log_ratio, log_ratio: [N], None where the batch has no ``logp_old``; ``log_ratio`` is the one of
            the configured level.
        correction: [N] sampler correction, or None.
        selected: [N] what ``PolicyLoss.select`` chose, or None for a loss that selects nothing.
    """

    logp: Float[Tensor, "N"]
    advantage: Float[Tensor, "N"]
    sequences: Ranges
    logp_old: Float[Tensor, "N"] | None = None
    token_log_ratio: Float[Tensor, "N"] | None = None
    log_ratio: Float[Tensor, "N"] | None = None
    correction: Float[Tensor, "N"] | None = None
    selected: Bool[Tensor, "N"] | None = None


@dataclass(frozen=True)
class SurrogateTerms:
    """A surrogate's loss per token, and where its bounds cut.

    Args:
        loss: [N], differentiable.
        clipped_low, clipped_high: [N] tokens whose gradient the lower or upper bound of the ratio removes or caps; None
            for a surrogate without bounds.
    """

    loss: Float[Tensor, "N"]
    clipped_low: Bool[Tensor, "N"] | None = None
    clipped_high: Bool[Tensor, "N"] | None = None


@dataclass(frozen=True)
class SelectionInputs:
    """What the choice of tokens may read.

    Args:
        logp: [N] nats: of the scoring pass for a choice of the block, else of the policy being trained.
        advantage: [N].
        trained: [N] tokens with a weight.
        log_ratio: [N] at the configured level; None in the scoring pass, where every ratio is 1.
        gather: over all ranks.
        generator: of random numbers, seeded differently on every rank; None where the caller has none.
    """

    logp: Float[Tensor, "N"]
    advantage: Float[Tensor, "N"]
    trained: Bool[Tensor, "N"]
    log_ratio: Float[Tensor, "N"] | None = None
    gather: GatherOverRanks = one_rank
    generator: torch.Generator | None = None


class PolicyLoss(ABC):
    """A surrogate: a frozen dataclass of knobs that is called with ``SurrogateInputs``.

    The defaults are those of a loss per token of the ratio; a loss that is different says so in its class.

    Attributes:
        name: how recipes call it; one that they name by its path needs none.
        reads: which ratio it reads.
        grain: the tokens that it gives one share of the loss; their advantages must be equal.
        reads_advantage: whether the advantage plays a part.
        uses_correction: whether it takes the sampler correction, which must then be per token, into a weight of its
            own; any other loss is multiplied by it.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    name: str = "own"
    reads: ClassVar[RatioLevel] = "any"
    grain: ClassVar[Grain] = "token"
    reads_advantage: ClassVar[bool] = True
    uses_correction: ClassVar[bool] = False

    @property
    def selects(self) -> Scope | None:
        """Where ``select`` chooses tokens that are treated apart; None for a loss that treats all alike."""
        return None

    def select(self, inputs: SelectionInputs) -> Bool[Tensor, "N"]:
        """The tokens that are treated apart, for a loss with ``selects``."""
        raise NotImplementedError(f"{self.name!r} selects no tokens")

    @abstractmethod
    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        """The loss per token, to be minimised."""


def by_sign(advantage: Tensor, positive: float, negative: float) -> Tensor:
    """One number where A >= 0, another where A < 0; ``torch.where`` of Python numbers would round them to float32."""
    return torch.where(advantage >= 0, advantage.new_full((), positive), advantage.new_full((), negative))


def check_bounds(ratio_min: float, ratio_max: float) -> None:
    """Refuse bounds of the ratio that are out of order.

    Raises:
        ConfigurationError: unless ``0 <= ratio_min < ratio_max``.
    """
    if not 0 <= ratio_min < ratio_max:
        raise ConfigurationError(
            needed="0 <= ratio_min < ratio_max",
            given=f"ratio_min={ratio_min}, ratio_max={ratio_max}",
            remedy="Bounds are absolute: an epsilon of 0.2 is ratio_min=0.8, ratio_max=1.2.",
        )


def check_fraction(fraction: float) -> None:
    """Refuse a fraction of tokens that is not in (0, 1].

    Raises:
        ConfigurationError: such a fraction.
    """
    if not 0 < fraction <= 1:
        raise ConfigurationError(
            needed="a fraction above 0 and at most 1", given=str(fraction), remedy="Use about 2e-4."
        )


def check_positive(**values: float | None) -> None:
    """Refuse knobs that are not positive; None is not looked at.

    Raises:
        ConfigurationError: at least one of them is not.
    """
    wrong = {name: value for name, value in values.items() if value is not None and not value > 0}
    if wrong:
        raise ConfigurationError(
            needed=f"positive {', '.join(wrong)}",
            given=", ".join(str(value) for value in wrong.values()),
            remedy="Use the default, or any number above 0.",
        )
