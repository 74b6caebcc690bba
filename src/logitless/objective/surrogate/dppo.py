"""DPPO: a trust region of the probability instead of the ratio."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from logitless.objective.inputs import check_knobs, required, shaped
from logitless.objective.surrogate.policy_loss import (
    PolicyLoss,
    RatioLevel,
    SurrogateInputs,
    SurrogateTerms,
    check_positive,
)


@shaped
def bernoulli_kl(logp_old: Float[Tensor, "N"], logp: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """``KL(Bernoulli(p_old) || Bernoulli(p)) = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))``.

    Source: DPPO, arXiv:2602.04879 (binary KL).

    Example:
        >>> bernoulli_kl(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())
        tensor([0.1438])
    """
    rest_old, rest = -torch.expm1(logp_old.clamp(max=0.0)), -torch.expm1(logp.clamp(max=0.0))
    return logp_old.exp() * (logp_old - logp) + torch.xlogy(rest_old, rest_old) - torch.xlogy(rest_old, rest)


@shaped
def dppo_mask(
    logp: Float[Tensor, "N"],
    logp_old: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    *,
    divergence: Literal["tv", "kl"],
    max_low: float,
    max_high: float,
) -> Bool[Tensor, "N"]:
    """True inside the trust region: the probability has not moved too far in the direction of the advantage.

    ``m = 0 where A > 0 and p - p_old > max_high, or A <= 0 and p - p_old < -max_low; else 1``
    ``divergence=kl: KL(Bernoulli(p_old) || Bernoulli(p)) against the same bounds, where p moved that way``

    Source: DPPO, arXiv:2602.04879 (binary TV and KL).

    Example:
        >>> moved, old = torch.tensor([0.7, 0.7]).log(), torch.tensor([0.5, 0.5]).log()
        >>> dppo_mask(moved, old, torch.tensor([1.0, -1.0]), divergence="tv", max_low=0.15, max_high=0.15)
        tensor([False,  True])
    """
    change = logp.exp() - logp_old.exp()
    distance = change if divergence == "tv" else change.sign() * bernoulli_kl(logp_old, logp)
    outside = torch.where(advantage > 0, distance > max_high, -distance > max_low)
    return ~outside


@shaped
def dppo_loss(
    logp: Float[Tensor, "N"],
    logp_old: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    inside: Bool[Tensor, "N"],
    *,
    ratio_cap: float,
) -> Float[Tensor, "N"]:
    """The log-likelihood inside a trust region, under a truncated ratio.

    ``l = -A sg(min(exp(lr), ratio_cap)) logp m``

    Gradient: ``-A min(r, ratio_cap)`` through ``logp`` inside, 0 outside.

    Source: DPPO, arXiv:2602.04879.

    Example:
        >>> one = torch.tensor([-1.0])
        >>> dppo_loss(one, one, torch.tensor([2.0]), torch.tensor([True]), ratio_cap=20.0)
        tensor([2.])
    """
    # finite, because 0 (an advantage, or a gradient outside) times infinity would be NaN
    largest = min(ratio_cap, torch.finfo(logp.dtype).max)
    weight = torch.where(inside, (logp - logp_old).detach().exp().clamp(max=largest), 0.0)
    return -advantage * weight * logp


@dataclass(frozen=True)
class Dppo(PolicyLoss):
    """``dppo_loss`` with ``dppo_mask`` as m.

    Args:
        divergence: ``tv`` or ``kl``, of the sampled token against all others.
        max_low, max_high: thresholds for A <= 0 and A > 0; None is 0.15 for ``tv`` and 0.05 for ``kl``.
        ratio_cap: ceiling of the detached weight.

    Raises:
        ConfigurationError: a threshold or cap that is not positive.
    """

    reads: ClassVar[RatioLevel] = "token"
    divergence: Literal["tv", "kl"] = "tv"
    max_low: float | None = None
    max_high: float | None = None
    ratio_cap: float = 20.0
    name: Literal["dppo"] = field(default="dppo", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self)
        for bound in ("max_low", "max_high"):
            if getattr(self, bound) is None:
                object.__setattr__(self, bound, 0.15 if self.divergence == "tv" else 0.05)
        check_positive(max_low=self.max_low, max_high=self.max_high, ratio_cap=self.ratio_cap)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        logp_old = required(inputs.logp_old, "logp_old")
        assert self.max_low is not None
        assert self.max_high is not None
        inside = dppo_mask(
            inputs.logp,
            logp_old,
            inputs.advantage,
            divergence=self.divergence,
            max_low=self.max_low,
            max_high=self.max_high,
        )
        loss = dppo_loss(inputs.logp, logp_old, inputs.advantage, inside, ratio_cap=self.ratio_cap)
        return SurrogateTerms(loss, ~inside & (inputs.advantage <= 0), ~inside & (inputs.advantage > 0))
