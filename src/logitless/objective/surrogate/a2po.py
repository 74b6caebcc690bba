"""A2PO: the log ratio of a whole completion to the reference is fitted to its advantage."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from logitless.objective.inputs import required, shaped
from logitless.objective.ranges import Level, Ranges
from logitless.objective.surrogate.policy_loss import (
    PolicyLoss,
    RatioLevel,
    SurrogateInputs,
    SurrogateTerms,
    check_positive,
)


@shaped
def a2po_loss(
    logp: Float[Tensor, "N"],
    logp_ref: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    ranges: Ranges,
    *,
    beta: float,
) -> Float[Tensor, "N"]:
    """The squared distance of a sequence's implicit reward from its advantage, the same for every token.

    ``l = (beta sum_S (logp - logp_ref) - A)^2``

    Gradient: ``2 beta (beta sum_S (logp - logp_ref) - A)`` through every token of the sequence.

    Source: A*-PO, arXiv:2505.20686, as in TRL 1.16, experimental/a2po/a2po_trainer.py, ``compute_loss``.

    Example:
        >>> import torch
        >>> pair = Ranges(torch.tensor([0, 0]), 1, torch.tensor([True, True]))
        >>> a2po_loss(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -3.0]), torch.ones(2), pair, beta=1.0)
        tensor([1., 1.])
    """
    return (beta * ranges.spread(ranges.sum(logp - logp_ref)) - advantage).square()


@dataclass(frozen=True)
class A2po(PolicyLoss):
    """``a2po_loss``.

    Args:
        beta: weight of the log ratio to the reference.

    Raises:
        ConfigurationError: a weight that is not positive.
    """

    reads: ClassVar[RatioLevel] = "none"
    level: ClassVar[Level] = "sequence"
    reads_reference: ClassVar[bool] = True
    beta: float = 1e-3
    name: Literal["a2po"] = field(default="a2po", kw_only=True)

    def __post_init__(self) -> None:
        check_positive(beta=self.beta)

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        logp_ref = required(inputs.logp_ref, "logp_ref")
        return SurrogateTerms(a2po_loss(inputs.logp, logp_ref, inputs.advantage, inputs.sequences, beta=self.beta))
