"""VESPO: a soft weight of the whole sequence's importance."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from logitless.objective.inputs import check_knobs, required, shaped
from logitless.objective.ranges import Ranges
from logitless.objective.surrogate.policy_loss import PolicyLoss, RatioLevel, SurrogateInputs, SurrogateTerms, by_sign
from logitless.objective.surrogate.unclipped import reinforce_loss

VESPO_LOG_WEIGHT_MIN = math.log(1e-8)
VESPO_LOG_WEIGHT_MAX = 20.0
VESPO_LAMBDA_MIN = 1e-4


@shaped
def vespo_weight(
    log_ratio: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    ranges: Ranges,
    *,
    k_positive: float,
    lambda_positive: float,
    k_negative: float,
    lambda_negative: float,
    correction: Float[Tensor, "N"] | None = None,
) -> Float[Tensor, "N"]:
    """A weight of the sequence's importance ratio w: 1 at w = 1, less on both sides, 0 if it is not finite.

    ``phi = sg(exp(lambda + k log w - lambda w))``
    ``log w = clamp( sum_S clamp(lr, -20, 20) + sum_S clamp(log c, log 1e-8, 20), log 1e-8, 20 )``
    ``k, lambda = k_positive, lambda_positive where A >= 0, else k_negative, lambda_negative``, lambda at least 1e-4

    Gradient: none.

    Args:
        log_ratio: [N] per token, nats.
        advantage: [N].
        ranges: the sequences.
        k_positive, lambda_positive, k_negative, lambda_negative: exponents and decays by the sign of the advantage.
        correction: [N] token-level sampler correction c after its truncation, or None.

    Source: VESPO, arXiv:2602.10693, in TRL's form.

    Example:
        >>> one = Ranges(torch.tensor([0]), 1, torch.tensor([True]))
        >>> knobs = dict(k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0)
        >>> vespo_weight(torch.zeros(1), torch.ones(1), one, **knobs)
        tensor([1.])
    """
    log_weight = ranges.sum(log_ratio.detach().clamp(-20.0, 20.0))
    if correction is not None:
        log_correction = correction.detach().log()
        log_weight = log_weight + ranges.sum(log_correction.clamp(VESPO_LOG_WEIGHT_MIN, VESPO_LOG_WEIGHT_MAX))
    log_weight = ranges.spread(log_weight.clamp(VESPO_LOG_WEIGHT_MIN, VESPO_LOG_WEIGHT_MAX))
    k = by_sign(advantage, k_positive, k_negative)
    decay = by_sign(advantage, lambda_positive, lambda_negative).clamp(min=VESPO_LAMBDA_MIN)
    phi = (decay + k * log_weight - decay * log_weight.exp()).exp()
    return torch.where(phi.isfinite(), phi, 0.0)


@dataclass(frozen=True)
class Vespo(PolicyLoss):
    """The log-likelihood under ``vespo_weight``; takes a token-level sampler correction c into phi, not beside it.

    ``l = -phi A logp``

    Args:
        k_positive, lambda_positive, k_negative, lambda_negative: exponents and decays by the sign of the advantage.

    Raises:
        ConfigurationError: one of them is not finite.
    """

    reads: ClassVar[RatioLevel] = "token"
    uses_correction: ClassVar[bool] = True
    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0
    name: Literal["vespo"] = field(default="vespo", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self, "k_positive", "lambda_positive", "k_negative", "lambda_negative")

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        weight = vespo_weight(
            required(inputs.token_log_ratio, "logp_old"),
            inputs.advantage,
            inputs.sequences,
            k_positive=self.k_positive,
            lambda_positive=self.lambda_positive,
            k_negative=self.k_negative,
            lambda_negative=self.lambda_negative,
            correction=inputs.correction,
        )
        return SurrogateTerms(weight * reinforce_loss(inputs.logp, inputs.advantage))
