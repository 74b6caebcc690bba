"""The KL coefficient beta: fixed, or adapted to keep the KL to the reference near a target.

``KLControl`` is the rule, ``KLController`` the state of a run. The caller chooses how often to call ``update``; gains
are meant for that interval.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from logitless.errors import ConfigurationError, InputError
from logitless.objective.inputs import check_knobs, restore_state

Guardrail = Literal["raise_beta", "shorten_rollout"]

_GUARDRAIL_AT = 2.0
_GUARDRAIL_BETA_FACTOR = 1.5
_GUARDRAIL_LENGTH_FACTOR = 0.5
_LARGEST_RELATIVE_ERROR = 0.2


@dataclass(frozen=True)
class FixedKL:
    """A constant ``beta``.

    Args:
        beta: coefficient, at least 0.
    """

    beta: float
    name: Literal["fixed"] = "fixed"
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        check_knobs(self, "beta")
        _require(self.beta >= 0, "beta of at least 0", f"beta={self.beta}")

    def next_beta(self, beta: float, kl_mean: float, num_completions: int) -> float:
        """The same beta."""
        del kl_mean, num_completions
        return beta


@dataclass(frozen=True, kw_only=True)
class _Adaptive:
    """Base of the adaptive rules.

    Args:
        beta: initial coefficient; not 0 for a rule that multiplies it.
        target: wanted KL, nats a token, mean over tokens; 0.03 to 0.10.
        beta_min, beta_max: bounds after every update.
        guardrail: if the KL exceeds twice the target: ``raise_beta`` sets ``1.5 * beta`` instead of applying the rule;
            ``shorten_rollout`` applies the rule and halves the next rollout's length; None does nothing.

    Raises:
        ConfigurationError: a target or gain that is not positive, or a beta outside its bounds.
    """

    beta: float = 0.05
    target: float = 0.05
    beta_min: float = 1e-4
    beta_max: float = 10.0
    guardrail: Guardrail | None = "raise_beta"
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        check_knobs(self, "beta", "target", "gain", "horizon")
        _require(self.target > 0, "a positive KL target", f"target={self.target}")
        _require(
            0 <= self.beta_min <= self.beta <= self.beta_max,
            "0 <= beta_min <= beta <= beta_max",
            f"beta_min={self.beta_min}, beta={self.beta}, beta_max={self.beta_max}",
        )


@dataclass(frozen=True)
class ProportionalKL(_Adaptive):
    """Multiply beta by the exponential of the relative error.

    ``beta <- beta * exp(gain * clip((kl - target) / target, -0.2, 0.2))``

    Args:
        gain: with the default 0.1 an update changes beta by 2% at most.

    Source: ``ZieglerKL`` in the logarithm of beta.

    Example:
        >>> round(ProportionalKL(gain=1.0).next_beta(0.05, kl_mean=0.055, num_completions=64), 6)  # 0.05 * exp(0.1)
        0.055259
    """

    gain: float = 0.1
    name: Literal["proportional"] = "proportional"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.beta > 0, "a positive beta, which this rule multiplies", f"beta={self.beta}")
        _require(self.gain > 0, "a positive gain", f"gain={self.gain}")

    def next_beta(self, beta: float, kl_mean: float, num_completions: int) -> float:
        """Before bounds and guardrail."""
        del num_completions
        return beta * math.exp(self.gain * _relative_error(kl_mean, self.target))


@dataclass(frozen=True)
class LinearKL(_Adaptive):
    """Add the error to beta.

    ``beta <- max(0, beta + gain * (kl - target))``

    Args:
        gain: in beta a nat.

    Source: gradient ascent on the multiplier of the constraint ``kl <= target``.

    Example:
        >>> round(LinearKL(gain=0.1).next_beta(0.05, kl_mean=0.25, num_completions=64), 6)
        0.07
    """

    gain: float = 0.1
    name: Literal["linear"] = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.gain > 0, "a positive gain", f"gain={self.gain}")

    def next_beta(self, beta: float, kl_mean: float, num_completions: int) -> float:
        """Before bounds and guardrail."""
        del num_completions
        return beta + self.gain * (kl_mean - self.target)


@dataclass(frozen=True)
class ZieglerKL(_Adaptive):
    """Multiply beta by the relative error, in proportion to the completions seen.

    ``beta <- beta * (1 + clip(kl / target - 1, -0.2, 0.2) * num_completions / horizon)``

    Args:
        horizon: completions after which beta has changed by a fifth at most.

    Equals: verl's ``AdaptiveKLController``, with ``guardrail=None``.

    Source: arXiv:1909.08593 sec. 2.2.

    Example:
        >>> round(ZieglerKL(horizon=1000.0).next_beta(0.05, kl_mean=0.055, num_completions=100), 6)  # 1 + 0.1 * 0.1
        0.0505
    """

    horizon: float = 1e4
    name: Literal["ziegler"] = "ziegler"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.beta > 0, "a positive beta, which this rule multiplies", f"beta={self.beta}")
        _require(self.horizon > 0, "a positive horizon", f"horizon={self.horizon}")

    def next_beta(self, beta: float, kl_mean: float, num_completions: int) -> float:
        """Before bounds and guardrail."""
        return beta * (1 + _relative_error(kl_mean, self.target) * num_completions / self.horizon)


KLControl = FixedKL | ProportionalKL | LinearKL | ZieglerKL


@dataclass
class KLController:
    """The KL coefficient of a run.

    Args:
        control: the rule.

    Attributes:
        beta: the current coefficient.
        rollout_factor: factor of the next rollout's length: 1, or 0.5 after ``shorten_rollout``.
        num_guarded: updates in which the guardrail acted.
        num_bounded: updates in which a bound held beta.

    Example:
        >>> controller = KLController(ProportionalKL(beta=0.05, target=0.05))
        >>> round(controller.update(kl_mean=0.11, num_completions=64), 6), controller.num_guarded  # over 2 x target
        (0.075, 1)
        >>> other = KLController(controller.control)
        >>> other.load_state_dict(controller.state_dict())
        >>> other == controller
        True
    """

    control: KLControl
    beta: float = field(init=False)
    rollout_factor: float = field(init=False, default=1.0)
    num_guarded: int = field(init=False, default=0)
    num_bounded: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.beta = self.control.beta

    def update(self, kl_mean: float, num_completions: int) -> float:
        """Update with a step's (or epoch's) KL; returns the new ``beta``.

        Args:
            kl_mean: nats, mean over the trained tokens of all ranks, of the chosen estimator.
            num_completions: completions in it, on all ranks.

        Raises:
            InputError: a KL that is not finite.
        """
        if not math.isfinite(kl_mean):
            raise InputError(
                needed="a finite mean KL", given=str(kl_mean), remedy="Skip the update of a step with no finite loss."
            )
        beta = self.control.next_beta(self.beta, kl_mean, num_completions)
        self.rollout_factor = 1.0
        if not isinstance(self.control, FixedKL):
            if self.control.guardrail is not None and kl_mean > _GUARDRAIL_AT * self.control.target:
                self.num_guarded += 1
                if self.control.guardrail == "raise_beta":
                    beta = _GUARDRAIL_BETA_FACTOR * self.beta
                else:
                    self.rollout_factor = _GUARDRAIL_LENGTH_FACTOR
            bounded = min(max(beta, self.control.beta_min), self.control.beta_max)
            self.num_bounded += bounded != beta
            beta = bounded
        self.beta = beta
        return beta

    def state_dict(self) -> dict[str, float]:
        """For a checkpoint, without the rule."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore ``state_dict``."""
        restore_state(self, state, _STATE)


_STATE = ("beta", "rollout_factor", "num_guarded", "num_bounded")


def _relative_error(kl_mean: float, target: float) -> float:
    error = kl_mean / target - 1
    return min(max(error, -_LARGEST_RELATIVE_ERROR), _LARGEST_RELATIVE_ERROR)


def _require(condition: bool, needed: str, given: str) -> None:
    if not condition:
        raise ConfigurationError(needed=needed, given=given, remedy="Change it under the recipe's KL control.")
