"""Losses without a clip: REINFORCE, the plain importance ratio, DRO, and the negative log-likelihood."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
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
def reinforce_loss(logp: Float[Tensor, "N"], advantage: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """The log-likelihood in proportion to the advantage.

    ``l = -A logp``

    Gradient: ``-A`` through ``logp``. Without a ratio: for one step on each batch.

    Source: Williams 1992; RLOO, arXiv:2402.14740.

    Example:
        >>> import torch
        >>> reinforce_loss(torch.tensor([-2.0]), torch.tensor([0.5]))
        tensor([1.])
    """
    return -advantage * logp


@shaped
def importance_loss(log_ratio: Float[Tensor, "N"], advantage: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """The importance ratio, unclipped.

    ``l = -r A``

    Gradient: ``-A r`` through ``log_ratio``, unbounded.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 6.

    Example:
        >>> import torch
        >>> importance_loss(torch.zeros(1), torch.tensor([0.5]))
        tensor([-0.5000])
    """
    # where A = 0, because 0 times a ratio that overflows would be NaN, also in the gradient
    return -advantage * torch.where(advantage == 0, 0.0, log_ratio).exp()


@shaped
def dro_loss(
    logp: Float[Tensor, "N"], log_ratio: Float[Tensor, "N"], advantage: Float[Tensor, "N"], *, beta: float
) -> Float[Tensor, "N"]:
    """The log-likelihood, with the squared log ratio as a penalty.

    ``l = -(A logp - beta/2 lr^2)``

    Gradient: ``-(A - beta lr)`` through ``logp``.

    Source: DRO, arXiv:2405.19107, as verl's ``dro`` writes it.

    Example:
        >>> import torch
        >>> dro_loss(torch.tensor([-1.0]), torch.tensor([2.0]), torch.tensor([3.0]), beta=0.5)
        tensor([4.])
    """
    return -(advantage * logp - 0.5 * beta * log_ratio.square())


@shaped
def nll_loss(logp: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """The negative log-likelihood.

    ``l = -logp``

    Gradient: -1 through ``logp``.

    Source: supervised warm start; VAPO's term on positive examples, arXiv:2504.05118.

    Example:
        >>> import torch
        >>> nll_loss(torch.tensor([-2.0]))
        tensor([2.])
    """
    return -logp


@dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """``reinforce_loss``; needs no ``logp_old``."""

    reads: ClassVar[RatioLevel] = "none"
    name: Literal["reinforce"] = field(default="reinforce", kw_only=True)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        return SurrogateTerms(reinforce_loss(inputs.logp, inputs.advantage))


@dataclass(frozen=True)
class Importance(PolicyLoss):
    """``importance_loss``."""

    name: Literal["importance"] = field(default="importance", kw_only=True)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        return SurrogateTerms(importance_loss(required(inputs.log_ratio, "logp_old"), inputs.advantage))


@dataclass(frozen=True)
class Dro(PolicyLoss):
    """``dro_loss``.

    Args:
        beta: weight of the squared log ratio.

    Raises:
        ConfigurationError: a weight that is not positive.
    """

    reads: ClassVar[RatioLevel] = "token"
    beta: float
    name: Literal["dro"] = field(default="dro", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self, "beta")
        check_positive(beta=self.beta)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        log_ratio = required(inputs.token_log_ratio, "logp_old")
        return SurrogateTerms(dro_loss(inputs.logp, log_ratio, inputs.advantage, beta=self.beta))


@dataclass(frozen=True)
class Nll(PolicyLoss):
    """``nll_loss``; needs neither ``logp_old`` nor an advantage."""

    reads: ClassVar[RatioLevel] = "none"
    reads_advantage: ClassVar[bool] = False
    name: Literal["nll"] = field(default="nll", kw_only=True)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        return SurrogateTerms(nll_loss(inputs.logp))
