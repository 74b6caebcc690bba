"""CISPO: a detached, truncated ratio as the weight of the log-likelihood."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.inputs import check_knobs, required, shaped
from logitless.objective.surrogate.policy_loss import PolicyLoss, SurrogateInputs, SurrogateTerms, check_bounds


@shaped
def cispo_loss(
    logp: Float[Tensor, "N"],
    log_ratio: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    *,
    ratio_max: float,
    ratio_min: float | None = None,
) -> Float[Tensor, "N"]:
    """A truncated ratio, without its gradient, as the weight of the log-likelihood.

    ``l = -sg(clip(r, ratio_min, ratio_max)) A logp``

    Gradient: ``-clip(r) A`` through ``logp``: bounded, and never cut off by the bounds.

    Source: MiniMax-M1, arXiv:2506.13585; ratio_max 5 from ScaleRL, arXiv:2510.13786.

    Example:
        >>> cispo_loss(torch.tensor([-2.0]), torch.tensor([9.0]), torch.tensor([1.0]), ratio_max=5.0)
        tensor([10.])
    """
    # finite, because an advantage of 0 times infinity would be NaN
    largest = min(ratio_max, torch.finfo(log_ratio.dtype).max)
    weight = log_ratio.detach().exp().clamp(min=ratio_min, max=largest)
    return -weight * advantage * logp


@dataclass(frozen=True)
class Cispo(PolicyLoss):
    """``cispo_loss`` (MiniMax-M1).

    Args:
        ratio_max, ratio_min: absolute bounds of the detached weight; no lower bound by default.
        ceiling_below_one: ``refuse`` or ``accept`` a ratio_max below 1, which scales every gradient down.

    Raises:
        ConfigurationError: bounds out of order, or a ratio_max below 1 that is not accepted.
    """

    ratio_max: float = 5.0
    ratio_min: float | None = None
    ceiling_below_one: Literal["refuse", "accept"] = "refuse"
    name: Literal["cispo"] = field(default="cispo", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self)
        check_bounds(0.0 if self.ratio_min is None else self.ratio_min, self.ratio_max)
        if self.ratio_max < 1 and self.ceiling_below_one == "refuse":
            raise ConfigurationError(
                needed="ratio_max of at least 1",
                given=f"{self.ratio_max}, a ceiling that scales every gradient down",
                remedy="Bounds are absolute: use ratio_max=5.0.",
            )

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        log_ratio = required(inputs.log_ratio, "logp_old")
        loss = cispo_loss(inputs.logp, log_ratio, inputs.advantage, ratio_max=self.ratio_max, ratio_min=self.ratio_min)
        ratio = log_ratio.exp()
        low = torch.zeros_like(inputs.sequences.counted) if self.ratio_min is None else ratio < self.ratio_min
        return SurrogateTerms(loss, low, ratio > self.ratio_max)
