"""An algorithm as data: the loss and what goes with it."""

from dataclasses import dataclass

from logitless.objective.advantage import Advantage
from logitless.objective.kl_control import KLControl
from logitless.objective.objective import Objective
from logitless.objective.value import ValueLoss
from logitless.objective.weighting import Weighting


@dataclass(frozen=True)
class Algorithm:
    """What a trainer needs to know of a paper.

    Args:
        objective: the loss.
        advantage: how rewards become advantages; None where the loss reads none.
        weighting: how token losses are averaged.
        value_loss: of the value head, or None.
        kl_control: the coefficient of the KL in the loss, or None where that is the caller's to choose.
        drop_truncated: whether completions cut at their limit are left out of the loss.
        notes: what the reader of a translated configuration should know.
    """

    objective: Objective
    advantage: Advantage | None
    weighting: Weighting
    value_loss: ValueLoss | None = None
    kl_control: KLControl | None = None
    drop_truncated: bool = False
    notes: tuple[str, ...] = ()
