"""SAPO: a sigmoid of the ratio in place of the clip."""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from logitless.objective.inputs import check_knobs, required, shaped
from logitless.objective.surrogate.policy_loss import (
    PolicyLoss,
    SurrogateInputs,
    SurrogateTerms,
    by_sign,
    check_positive,
)


@shaped
def sapo_loss(
    log_ratio: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> Float[Tensor, "N"]:
    """A sigmoid gate around a ratio of 1.

    ``l = -(4 / tau) sigmoid(tau (r - 1)) A``
    ``tau = temperature_positive where A >= 0, else temperature_negative``

    Gradient: ``-4 p (1 - p) r A`` with p the sigmoid: exactly ``-A`` at r = 1, fading smoothly on both sides.

    Source: SAPO, arXiv:2511.20347.

    Example:
        >>> sapo_loss(torch.zeros(1), torch.ones(1), temperature_positive=1.0, temperature_negative=1.05)
        tensor([-2.])
    """
    tau = by_sign(advantage, temperature_positive, temperature_negative)
    # the sigmoid is 1 above this: the clamp keeps exp finite, and 0 * inf out of its gradient
    ratio = log_ratio.clamp(max=-math.log(torch.finfo(log_ratio.dtype).tiny)).exp()
    return -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantage


@dataclass(frozen=True)
class Sapo(PolicyLoss):
    """``sapo_loss``.

    Args:
        temperature_positive, temperature_negative: tau where A >= 0 and where A < 0.

    Raises:
        ConfigurationError: a temperature that is not positive.
    """

    temperature_positive: float = 1.0
    temperature_negative: float = 1.05
    name: Literal["sapo"] = field(default="sapo", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self, "temperature_positive", "temperature_negative")
        check_positive(temperature_positive=self.temperature_positive, temperature_negative=self.temperature_negative)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        return SurrogateTerms(
            sapo_loss(
                required(inputs.log_ratio, "logp_old"),
                inputs.advantage,
                temperature_positive=self.temperature_positive,
                temperature_negative=self.temperature_negative,
            )
        )
