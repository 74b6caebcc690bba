"""The likelihood of what tools and environments say, as a term of the loss beside the policy's own tokens (ECHO).

    loss += coefficient * sum_t v_t (-logp_t),  v_t = 1 / M_all

over the M_all tokens of a step, on all ranks, that a tool or the environment wrote after a turn of the policy. No other
term counts them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from logitless.objective.inputs import check_knobs, shaped
from logitless.objective.over_ranks import GatherOverRanks, one_rank
from logitless.objective.surrogate.policy_loss import check_positive


@shaped
def observation_loss(logp: Float[Tensor, "M"]) -> Float[Tensor, "M"]:
    """The negative log-likelihood of each token.

    ``l = -logp``

    Source: ECHO, arXiv:2605.24517, as in prime-rl 559b447: ``ce_loss_fn`` and ``compute_loss`` in trainer/rl/loss.py,
        orchestrator/algo/echo.py.

    Example:
        >>> observation_loss(torch.tensor([-2.0]))
        tensor([2.])
    """
    return -logp


@dataclass(frozen=True)
class ObservationOutput:
    """What a micro-batch adds to the loss.

    Args:
        loss: this micro-batch's part, to be summed over micro-batches and ranks, never averaged.
        token_loss: [M] nats, detached.
    """

    loss: Float[Tensor, ""]
    token_loss: Float[Tensor, "M"]


@dataclass(frozen=True)
class Observations:
    """``observation_loss`` of the tokens that tools and environments wrote.

    Args:
        coefficient: of their mean, positive.

    Raises:
        ConfigurationError: a coefficient that is not positive.

    Example:
        >>> Observations(0.5)(torch.tensor([-2.0, -4.0]), weight=0.5).loss
        tensor(1.5000)
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    coefficient: float = 0.1

    def __post_init__(self) -> None:
        check_knobs(self, "coefficient")
        check_positive(coefficient=self.coefficient)

    def __call__(self, logp: Float[Tensor, "M"], weight: float) -> ObservationOutput:
        """A micro-batch's part of the term.

        Gradient: ``-coefficient * weight`` through each ``logp``.

        Args:
            logp: [M] nats of the policy being trained, of this micro-batch's tokens.
            weight: ``1 / M_all`` of the step.
        """
        loss = observation_loss(logp)
        return ObservationOutput(self.coefficient * weight * loss.sum(), loss.detach())


def observation_diagnostics(
    outputs: Sequence[ObservationOutput], *, gather: GatherOverRanks = one_rank
) -> dict[str, Float[Tensor, ""]]:
    """``loss/observations``: the mean over the step's tokens before the coefficient, on the device; 0 without any.

    Args:
        outputs: of every micro-batch of the step on this rank.
        gather: over all ranks.

    Example:
        >>> one = ObservationOutput(torch.tensor(1.0), torch.tensor([3.0, 1.0]))
        >>> observation_diagnostics([one])["loss/observations"].item()
        2.0
    """
    sums = [
        torch.stack([each.token_loss.double().sum(), each.loss.new_tensor(len(each.token_loss)).double()])
        for each in outputs
    ]
    total, count = gather(torch.stack(sums)).sum(0)
    return {"loss/observations": total / count.clamp(min=1)}
