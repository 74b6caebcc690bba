"""IPO and KPop: the importance ratio where the probability has moved little, a squared log ratio for every token."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.inputs import check_knobs, required, shaped
from logitless.objective.surrogate.dppo import bernoulli_kl, dppo_mask
from logitless.objective.surrogate.policy_loss import (
    PolicyLoss,
    RatioLevel,
    SurrogateInputs,
    SurrogateTerms,
    check_positive,
)


@shaped
def ipo_mask(
    logp: Float[Tensor, "N"],
    logp_old: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    *,
    max_change: float,
    sides: Literal["both", "advantage"] = "both",
) -> Bool[Tensor, "N"]:
    """True where the probability has moved by at most ``max_change``.

    ``m = 1 where |p - p_old| <= max_change, else 0``; with ``sides=advantage`` only moves in the direction of A count,
    as in ``dppo_mask``

    Source: prime-rl's losses ``ipo`` (both sides) and ``default`` (advantage).

    Example:
        >>> moved, old = torch.tensor([0.7, 0.7]).log(), torch.tensor([0.5, 0.5]).log()
        >>> ipo_mask(moved, old, torch.tensor([1.0, -1.0]), max_change=0.1)
        tensor([False, False])
        >>> ipo_mask(moved, old, torch.tensor([1.0, -1.0]), max_change=0.1, sides="advantage")
        tensor([False,  True])
    """
    if sides == "advantage":
        return dppo_mask(logp, logp_old, advantage, divergence="tv", max_low=max_change, max_high=max_change)
    return (logp.exp() - logp_old.exp()).abs() <= max_change


NEAREST = 1e-6
"""To 0 and 1 that ``kpop_mask`` takes a probability to be, as prime-rl does: beside 1 the divergence has no bound."""


@shaped
def kpop_mask(logp: Float[Tensor, "N"], logp_old: Float[Tensor, "N"], *, max_divergence: float) -> Bool[Tensor, "N"]:
    """True where the token against all others has moved by at most ``max_divergence``, in nats, either way.

    ``m = 1 where max(KL(Bernoulli(p) || Bernoulli(p_old)), KL(Bernoulli(p_old) || Bernoulli(p))) <= max_divergence``

    Source: prime-rl's loss ``kpop`` (its branch feat/kpop-loss), after ringtech.notion.site/kpop.

    Example:
        >>> kpop_mask(torch.tensor([0.7, 0.9]).log(), torch.tensor([0.5, 0.5]).log(), max_divergence=0.1)
        tensor([ True, False])
    """
    logp, logp_old = (each.clamp(math.log(NEAREST), math.log1p(-NEAREST)) for each in (logp, logp_old))
    return torch.maximum(bernoulli_kl(logp, logp_old), bernoulli_kl(logp_old, logp)) <= max_divergence


@shaped
def ipo_loss(
    log_ratio: Float[Tensor, "N"], advantage: Float[Tensor, "N"], inside: Bool[Tensor, "N"], *, beta: float
) -> Float[Tensor, "N"]:
    """The importance ratio inside a trust region, with the squared log ratio as a penalty everywhere.

    ``l = -A r m + beta lr^2``

    Gradient: ``-A r m + 2 beta lr`` through ``log_ratio``.

    Source: prime-rl's loss ``ipo``; the penalty is Kimi K2.5's, arXiv:2602.02276.

    Example:
        >>> doubled = torch.full((2,), 2.0).log()
        >>> ipo_loss(doubled, torch.ones(2), torch.tensor([True, False]), beta=0.5)
        tensor([-1.7598,  0.2402])
    """
    # no exp of what has no gradient: 0 times a ratio that overflows would be NaN
    ratio = torch.where(inside & (advantage != 0), log_ratio, 0.0).exp()
    return beta * log_ratio.square() - torch.where(inside, advantage, 0.0) * ratio


@dataclass(frozen=True)
class Ipo(PolicyLoss):
    """``ipo_loss`` with ``ipo_mask`` as m.

    Args:
        max_change: of the probability, inside the trust region.
        beta: weight of the squared log ratio, at least 0.
        sides: ``both``, or ``advantage``: only moves in the direction of the advantage are masked.

    Raises:
        ConfigurationError: a ``max_change`` that is not positive, or a negative weight.
    """

    reads: ClassVar[RatioLevel] = "token"
    max_change: float = 0.1
    beta: float = 1e-3
    sides: Literal["both", "advantage"] = "both"
    name: Literal["ipo"] = field(default="ipo", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self, "beta")
        check_positive(max_change=self.max_change)
        check_weight(self.beta)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        logp_old = required(inputs.logp_old, "logp_old")
        inside = ipo_mask(inputs.logp, logp_old, inputs.advantage, max_change=self.max_change, sides=self.sides)
        return _terms(inputs, inside, self.beta)


@dataclass(frozen=True)
class KPop(PolicyLoss):
    """``ipo_loss`` with ``kpop_mask`` as m.

    Args:
        max_divergence: of the token against all others, in nats, inside the trust region.
        beta: weight of the squared log ratio, at least 0.

    Raises:
        ConfigurationError: a ``max_divergence`` that is not positive, or a negative weight.
    """

    reads: ClassVar[RatioLevel] = "token"
    max_divergence: float = 0.1
    beta: float = 1e-3
    name: Literal["kpop"] = field(default="kpop", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self, "beta")
        check_positive(max_divergence=self.max_divergence)
        check_weight(self.beta)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        logp_old = required(inputs.logp_old, "logp_old")
        return _terms(inputs, kpop_mask(inputs.logp, logp_old, max_divergence=self.max_divergence), self.beta)


def check_weight(beta: float) -> None:
    """Raises ConfigurationError for a negative weight of the squared log ratio."""
    if beta < 0:
        raise ConfigurationError(needed="beta of at least 0", given=str(beta), remedy="Use 1e-3, or 0 for no penalty.")


def _terms(inputs: SurrogateInputs, inside: Tensor, beta: float) -> SurrogateTerms:
    log_ratio = required(inputs.token_log_ratio, "logp_old")
    loss = ipo_loss(log_ratio, inputs.advantage, inside, beta=beta)
    return SurrogateTerms(loss, ~inside & (log_ratio < 0), ~inside & (log_ratio > 0))
