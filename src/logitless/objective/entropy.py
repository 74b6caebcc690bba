"""The entropy bonus: a term of the loss with its own weights, and an adaptive coefficient.

``loss += -coefficient * sum_t v_t kept_t H_t``. The weights v are its own, so that a coefficient means the same for
every policy loss.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from logitless.errors import ConfigurationError, InputError
from logitless.objective.inputs import check_knobs, restore_state, shaped


@shaped
def entropy_mean(
    entropy: Float[Tensor, "N"],
    weight: Float[Tensor, "N"],
    kept: Bool[Tensor, "N"],
    *,
    renormalized: bool,
) -> Float[Tensor, ""]:
    """``sum_t v_t kept_t H_t``; ``renormalized``: times ``sum v / sum v kept``, so that dropped tokens leave the mean.

    Args:
        entropy: [N] nats, differentiable.
        weight: [N] v, which sums to 1 over a step.
        kept: [N] tokens that take part.
        renormalized: see above; 0 if nothing is kept.

    Source: Williams and Peng 1991; A3C, arXiv:1602.01783; kept tokens only, as TRL's ``entropy_coef``.

    Example:
        >>> halves, first = torch.tensor([0.5, 0.5]), torch.tensor([True, False])
        >>> entropy_mean(torch.tensor([2.0, 4.0]), halves, first, renormalized=False)
        tensor(1.)
        >>> entropy_mean(torch.tensor([2.0, 4.0]), halves, first, renormalized=True)
        tensor(2.)
    """
    kept_weight = torch.where(kept, weight, 0.0)
    mean = (kept_weight * entropy).sum()
    if not renormalized:
        return mean
    mass = kept_weight.sum()
    return mean * torch.where(mass > 0, weight.sum() / mass, mass)  # nothing kept: 0


@dataclass(frozen=True)
class AdaptiveEntropy:
    """``coefficient + delta`` if the last step's entropy was at most the target, else ``- delta``, within bounds.

    The bonus is applied only while the last step's entropy is at most the target.

    Args:
        target: nats a token; near the entropy seen early in training.
        delta: change of the coefficient a step.
        coefficient_min, coefficient_max: its bounds.

    Raises:
        ConfigurationError: bounds out of order, or a delta that is not positive.

    Source: Skywork-OR1, arXiv:2505.22312, in TRL's form.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    target: float = 0.2
    delta: float = 0.005
    coefficient_min: float = 0.0
    coefficient_max: float = 1.0

    def __post_init__(self) -> None:
        check_knobs(self, "target", "delta", "coefficient_min", "coefficient_max")
        if not (self.delta > 0 and self.coefficient_min <= self.coefficient_max):
            raise ConfigurationError(
                needed="a positive delta and coefficient_min <= coefficient_max",
                given=f"delta={self.delta}, {self.coefficient_min} and {self.coefficient_max}",
                remedy="Use 0.005, 0.0 and 1.0.",
            )


@dataclass(frozen=True)
class EntropyBonus:
    """Subtract ``coefficient`` times the mean entropy of the tokens that the ``top_entropy`` filter keeps.

    Args:
        coefficient: per nat; with ``adaptive``, where it starts.
        adaptive: the rule that changes it (``EntropyController``), or None.
        scope: ``step``: the mean over the step's kept tokens; ``micro_batch``: over those of each micro-batch (TRL).
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    coefficient: float
    adaptive: AdaptiveEntropy | None = None
    scope: Literal["step", "micro_batch"] = "step"
    name: Literal["entropy_bonus"] = field(default="entropy_bonus", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self, "coefficient")


@dataclass
class EntropyController:
    """The coefficient of the entropy bonus over a run.

    Args:
        bonus: the configuration.

    Attributes:
        coefficient: after the last update.
        last_entropy: mean entropy of the last step, infinite before the first.

    Example:
        >>> controller = EntropyController(EntropyBonus(0.5, AdaptiveEntropy(target=0.5, delta=0.25)))
        >>> controller.applied
        0.0
        >>> controller.update(0.4)
        >>> controller.applied
        0.75
        >>> controller.update(0.6)
        >>> controller.coefficient, controller.applied
        (0.5, 0.0)
    """

    bonus: EntropyBonus
    coefficient: float = field(init=False)
    last_entropy: float = field(init=False, default=math.inf)

    def __post_init__(self) -> None:
        self.coefficient = self.bonus.coefficient

    @property
    def applied(self) -> float:
        """The coefficient for the next step."""
        adaptive = self.bonus.adaptive
        return self.coefficient if adaptive is None or self.last_entropy <= adaptive.target else 0.0

    def update(self, entropy: float) -> None:
        """Update with a step's mean entropy (of the kept tokens, over all ranks).

        Raises:
            InputError: an entropy that is not finite.
        """
        if not math.isfinite(entropy):
            raise InputError(
                needed="a finite mean entropy", given=str(entropy), remedy="Skip the update of a step without a loss."
            )
        adaptive = self.bonus.adaptive
        if adaptive is None:
            return
        change = adaptive.delta if entropy <= adaptive.target else -adaptive.delta
        self.coefficient = min(max(self.coefficient + change, adaptive.coefficient_min), adaptive.coefficient_max)
        self.last_entropy = entropy

    def state_dict(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"coefficient": self.coefficient, "last_entropy": self.last_entropy}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore ``state_dict``."""
        restore_state(self, state, ("coefficient", "last_entropy"))
