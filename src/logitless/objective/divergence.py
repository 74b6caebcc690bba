"""KL to the reference: three estimators from a sampled token, in the loss or in the reward.

``d = logp - logp_ref`` of tokens sampled from the policy. Names k1, k2, k3 are Schulman's. In a loss the expected
**gradient** counts:

    in the loss                     expected gradient
    k1, k2, k3 ratio-corrected      KL(pi || ref)
    k2 uncorrected                  KL(pi || ref), on-policy only
    k3 uncorrected                  KL(ref || pi), on-policy; what most libraries train
    k1 uncorrected                  0, on-policy: an error here
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.inputs import check_knobs, required, shaped

_ALIASES = {"mse": "k2", "low_var_kl": "k3"}


@shaped
def k1(log_ratio_ref: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """``k1 = d``: unbiased, of either sign.

    Gradient: 1 through ``d``, whose expectation under the policy is 0.

    Source: Schulman 2020, Approximating KL Divergence.

    Example:
        >>> k1(torch.tensor([0.5]))
        tensor([0.5000])
    """
    return log_ratio_ref


@shaped
def k2(log_ratio_ref: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """``k2 = d^2 / 2``: biased in value, never negative.

    Gradient: ``d``, whose expectation under the policy is the gradient of KL(pi || ref).

    Source: Schulman 2020, Approximating KL Divergence.

    Example:
        >>> k2(torch.tensor([-1.0]))
        tensor([0.5000])
    """
    return 0.5 * log_ratio_ref.square()


@shaped
def k3(log_ratio_ref: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """``k3 = exp(-d) - 1 + d``: unbiased and never negative.

    Gradient: ``1 - exp(-d)``, whose expectation under the policy is the gradient of KL(ref || pi).

    Source: Schulman 2020, Approximating KL Divergence.

    Example:
        >>> k3(torch.tensor([-1.0]))
        tensor([0.7183])
    """
    return torch.expm1(-log_ratio_ref) + log_ratio_ref


@shaped
def kl_in_reward(logp_old: Float[Tensor, "N"], logp_ref: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """``sg(logp_old - logp_ref)``: the KL of each token to subtract from rewards (k1, the only unbiased one there).

    For token returns subtract ``beta`` times it from each token's reward; for group-relative advantages subtract
    ``beta`` times its sum over the sequence (``Ranges.sum``) before group statistics.

    Source: PPO-RLHF, arXiv:2203.02155, eq. 2.

    Example:
        >>> kl_in_reward(torch.tensor([-1.0]), torch.tensor([-1.5]))
        tensor([0.5000])
    """
    return (logp_old - logp_ref).detach()


@dataclass(frozen=True)
class KLTerms:
    """The KL of each token as it enters the loss, before beta.

    Args:
        kl: [N], differentiable.
        log_ratio_ref: [N] d before the clamp, detached.
        clamped: [N] tokens whose d was clamped; they have no gradient.
    """

    kl: Float[Tensor, "N"]
    log_ratio_ref: Float[Tensor, "N"]
    clamped: Bool[Tensor, "N"]


@dataclass(frozen=True)
class KLPenalty:
    """A KL term in the loss, ``beta * kl_t``.

    Args:
        estimator: ``k1``, ``k2`` (also called ``mse``) or ``k3`` (also called ``low_var_kl``).
        ratio_corrected: ``token``: times the token's ratio (k1 and k3 differentiable, k2 detached); ``surrogate``:
            times the surrogate's ratio (TRL under a sequence ratio); None: uncorrected.
        clamp: bound on ``|d|`` in nats; clamped tokens are counted. None: no bound (TRL).

    Raises:
        ConfigurationError: ``k1`` without correction (its expected gradient is 0), or a clamp that is not positive.

    Source: GRPO, arXiv:2402.03300, eq. 4 (k3); ratio-corrected, DeepSeek-V3.2, arXiv:2512.02556.

    Example:
        >>> KLPenalty("low_var_kl").estimator
        'k3'
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    estimator: Literal["k1", "k2", "k3", "mse", "low_var_kl"] = "k3"
    ratio_corrected: Literal["token", "surrogate"] | None = None
    clamp: float | None = 20.0
    name: Literal["kl"] = field(default="kl", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self)
        object.__setattr__(self, "estimator", _ALIASES.get(self.estimator, self.estimator))
        if self.estimator == "k1" and self.ratio_corrected is None:
            raise ConfigurationError(
                needed="an estimator with a nonzero expected gradient in the loss",
                given="k1 without ratio correction, whose expected gradient is 0",
                remedy="Set ratio_corrected='token', use k2 or k3, or put k1 in the reward.",
            )
        if self.clamp is not None and not self.clamp > 0:
            raise ConfigurationError(
                needed="a positive clamp", given=str(self.clamp), remedy="Use 20.0, or None for no bound."
            )

    def __call__(
        self,
        logp: Float[Tensor, "N"],
        logp_ref: Float[Tensor, "N"],
        token_log_ratio: Float[Tensor, "N"] | None,
        surrogate_log_ratio: Float[Tensor, "N"] | None,
    ) -> KLTerms:
        """The penalty of each token.

        Args:
            logp, logp_ref: [N] nats.
            token_log_ratio, surrogate_log_ratio: [N], read by the correction of that name.
        """
        difference = logp - logp_ref.detach()
        bounded = difference if self.clamp is None else difference.clamp(-self.clamp, self.clamp)
        kl = {"k1": k1, "k2": k2, "k3": k3}[self.estimator](bounded)
        if self.ratio_corrected is not None:
            log_ratio = token_log_ratio if self.ratio_corrected == "token" else surrogate_log_ratio
            ratio = required(log_ratio, "logp_old").exp()
            kl = kl * (ratio.detach() if self.estimator == "k2" else ratio)
        clamped = torch.zeros_like(logp, dtype=torch.bool) if self.clamp is None else difference.abs() > self.clamp
        return KLTerms(kl, difference.detach(), clamped)
