"""GMPO: the geometric mean of a sequence's clipped token ratios."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.inputs import required, shaped
from logitless.objective.ranges import Level, Ranges
from logitless.objective.surrogate.policy_loss import PolicyLoss, RatioLevel, SurrogateInputs, SurrogateTerms


@shaped
def gmpo_loss(
    log_ratio: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    ranges: Ranges,
    *,
    log_ratio_min: float,
    log_ratio_max: float,
) -> Float[Tensor, "N"]:
    """The geometric mean of a sequence's clipped ratios, the same for every token: ``sequence_mean`` counts it once.

    ``l = -A exp( mean_S sgn(A) min( sgn(A) lr, sgn(A) clip(lr, log_ratio_min, log_ratio_max) ) )``

    Gradient: through every token of the sequence that is not clipped on the side its advantage pushes.

    Source: GMPO, arXiv:2507.20673.

    Example:
        >>> pair = Ranges(torch.tensor([0, 0]), 1, torch.tensor([True, True]))
        >>> gmpo_loss(torch.tensor([0.0, 2.0]), torch.ones(2), pair, log_ratio_min=-0.4, log_ratio_max=0.4)
        tensor([-1.2214, -1.2214])
    """
    clipped = log_ratio.clamp(log_ratio_min, log_ratio_max)
    sign = advantage.sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
    return -advantage * ranges.spread(ranges.mean(pessimistic)).exp()


@dataclass(frozen=True)
class Gmpo(PolicyLoss):
    """``gmpo_loss``; its geometric mean is over sequences, so one advantage a sequence.

    Args:
        log_ratio_min, log_ratio_max: bounds of each token's log ratio, in nats.

    Raises:
        ConfigurationError: bounds that do not enclose 0.
    """

    reads: ClassVar[RatioLevel] = "token"
    level: ClassVar[Level] = "sequence"
    log_ratio_min: float = -0.4
    log_ratio_max: float = 0.4
    name: Literal["gmpo"] = field(default="gmpo", kw_only=True)

    def __post_init__(self) -> None:
        if not self.log_ratio_min <= 0 <= self.log_ratio_max:
            raise ConfigurationError(
                needed="log_ratio_min <= 0 <= log_ratio_max",
                given=f"{self.log_ratio_min} and {self.log_ratio_max}",
                remedy="Bounds are of the log ratio, in nats: use -0.4 and 0.4.",
            )

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        log_ratio = required(inputs.token_log_ratio, "logp_old")
        loss = gmpo_loss(
            log_ratio,
            inputs.advantage,
            inputs.sequences,
            log_ratio_min=self.log_ratio_min,
            log_ratio_max=self.log_ratio_max,
        )
        low = (inputs.advantage < 0) & (log_ratio < self.log_ratio_min)
        high = (inputs.advantage > 0) & (log_ratio > self.log_ratio_max)
        return SurrogateTerms(loss, low, high)
