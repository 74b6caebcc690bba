"""The value loss of PPO: fits predictions V to returns R, with a bound on each move.

    loss = policy loss  +  coefficient * sum_t v_t * clipped_value_loss_t

The weights v (``value_weight``) are equal for all trained tokens of the step with a return.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.inputs import check_knobs, required, shaped
from logitless.objective.over_ranks import GatherOverRanks, SumOverRanks, one_rank
from logitless.types import TokenBatch


@dataclass(frozen=True)
class ValueOutput:
    """The value term of a micro-batch, and its diagnostics.

    Args:
        loss: to be added to the policy's; differentiable.
        mean: ``sum_t v_t * clipped_value_loss_t``, before the coefficient, detached.
        fitted: [N] tokens of nonzero weight.
        clipped: [N] those whose gradient the clip removes.
    """

    loss: Float[Tensor, ""]
    mean: Float[Tensor, ""]
    fitted: Bool[Tensor, "N"]
    clipped: Bool[Tensor, "N"]


@dataclass(frozen=True)
class ValueLoss:
    """The value term of a loss, the mean over the step's trained tokens with a return.

    ``coefficient * sum_t v_t * 1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)``, v_t being 1 over the
    step's trained tokens with a return

    Args:
        coefficient: 0.5 is usual.
        clip: bound on the useful change from ``value_old``; None for no bound.

    Raises:
        ConfigurationError: a negative coefficient or a clip that is not positive.

    Example:
        >>> batch = TokenBatch(
        ...     sequence=torch.tensor([0, 0]), num_sequences=1, advantage=torch.zeros(2), token_weight=torch.ones(2),
        ...     value_target=torch.tensor([2.0, float("nan")]), value_weight=torch.tensor([1.0, 0.0]))
        >>> ValueLoss(clip=None)(torch.tensor([1.0, 7.0]), batch).loss  # 0.5 * 1^2 / 2
        tensor(0.2500)
    """

    coefficient: float = 0.5
    clip: float | None = 0.2
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        check_knobs(self, "coefficient")
        if self.coefficient < 0 or (self.clip is not None and not self.clip > 0):
            raise ConfigurationError(
                needed="a value coefficient of at least 0 and a positive value clip",
                given=f"coefficient={self.coefficient}, clip={self.clip}",
                remedy="Write clip: null to switch clipping off.",
            )

    def __call__(self, value: Float[Tensor, "N"], batch: TokenBatch) -> ValueOutput:
        """The value term of a micro-batch.

        Gradient: through ``value``; exactly 0 in tokens of weight 0.

        Args:
            value: [N] current predictions.
            batch: with ``value_target``, ``value_weight`` and, under a clip, ``value_old``, on the same device.

        Raises:
            InputError: one of them is missing.
        """
        dtype = torch.promote_types(value.dtype, torch.float32)
        weight = required(batch.value_weight, "value_weight").to(dtype)
        fitted = weight != 0

        def read(each: Tensor | None, name: str) -> Tensor:
            return torch.where(fitted, required(each, name).to(dtype), 0.0)

        value, target = read(value, "value"), read(batch.value_target, "value_target")
        if self.clip is None:
            token_loss, clipped = value_loss(value, target), torch.zeros_like(fitted)
        else:
            value_old = read(batch.value_old, "value_old")
            token_loss = clipped_value_loss(value, value_old, target, self.clip)
            clipped = value_is_clipped(value, value_old, target, self.clip)
        mean = (weight * token_loss).sum()
        return ValueOutput(loss=self.coefficient * mean, mean=mean.detach(), fitted=fitted, clipped=clipped)


@shaped
def value_loss(value: Float[Tensor, "N"], value_target: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """``1/2 (V - R)^2``, [N], to be weighted and summed by the caller.

    Args:
        value: [N] current predictions.
        value_target: [N] returns (``advantage.gae``).

    Example:
        >>> value_loss(torch.tensor([3.0]), torch.tensor([1.0]))
        tensor([2.])
    """
    return (value - value_target.detach()).square() / 2


@shaped
def clipped_value_loss(
    value: Float[Tensor, "N"], value_old: Float[Tensor, "N"], value_target: Float[Tensor, "N"], clip: float
) -> Float[Tensor, "N"]:
    """The larger of the squared errors of the prediction and of the prediction clipped around the old one.

    ``1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)``, [N], to be weighted and summed by the caller

    Gradient: ``V - R`` through ``value`` where the first is the larger, exactly 0 where the second is.

    Args:
        value: [N] current predictions.
        value_old: [N] of the scoring pass.
        value_target: [N] returns from unwhitened advantages (``advantage.gae``).
        clip: largest useful change; 0.2.

    Source: PPO's reference implementation; arXiv:2005.12729 sec. 3.

    Example:
        >>> zero = torch.zeros(2)
        >>> clipped_value_loss(torch.tensor([1.0, -1.0]), zero, torch.tensor([2.0, 2.0]), clip=0.5)  # 1.5^2/2, 3^2/2
        tensor([1.1250, 4.5000])
    """
    held = torch.clamp(value, value_old.detach() - clip, value_old.detach() + clip)
    return torch.maximum(value_loss(value, value_target), value_loss(held, value_target))


@shaped
def value_is_clipped(
    value: Float[Tensor, "N"], value_old: Float[Tensor, "N"], value_target: Float[Tensor, "N"], clip: float
) -> Bool[Tensor, "N"]:
    """Where ``clipped_value_loss`` has no gradient.

    Example:
        >>> zero = torch.zeros(2)
        >>> value_is_clipped(torch.tensor([1.0, -1.0]), zero, torch.tensor([2.0, 2.0]), clip=0.5)
        tensor([ True, False])
    """
    return clipped_value_loss(value, value_old, value_target, clip) > value_loss(value, value_target)


def value_weight(step: TokenBatch, sum_over_ranks: SumOverRanks = one_rank) -> Float[Tensor, "N"]:
    """Weights of the value loss for an optimizer step: 1 over its fitted tokens on all ranks, 0 on the others.

    ``v_t = fitted_t / sum_u fitted_u``; fitted are the trained tokens with a return

    Args:
        step: every sequence of the step on this rank, with weights and ``value_target``.
        sum_over_ranks: of a number, over all ranks.

    Example:
        >>> value_weight(TokenBatch(
        ...     sequence=torch.tensor([0, 0, 1, 2]), num_sequences=3, advantage=torch.zeros(4),
        ...     token_weight=torch.tensor([0.1, 0.2, 0.0, 0.3]), value_target=torch.tensor([1.0, 1.0, 1.0, torch.nan])))
        tensor([0.5000, 0.5000, 0.0000, 0.0000])
    """
    fitted = (step.token_weight != 0) & ~required(step.value_target, "value_target").isnan()
    number = sum_over_ranks(fitted.double().sum()).clamp(min=1.0)
    return (fitted.double() / number).to(step.token_weight.dtype)


@shaped
def explained_variance(value: Float[Tensor, "N"], value_target: Float[Tensor, "N"]) -> Float[Tensor, ""]:
    """``1 - Var(R - V) / Var(R)`` over the tokens with a return: 1 is perfect, 0 no better than a constant.

    Returns:
        float64; not finite if the returns do not differ.

    Example:
        >>> explained_variance(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([0.0, 2.0, torch.nan]))  # 1 - 0.25 / 1
        tensor(0.7500, dtype=torch.float64)
    """
    known = ~value_target.isnan()
    target, error = value_target[known].double(), (value_target - value)[known].double()
    return 1 - (error - error.mean()).square().mean() / (target - target.mean()).square().mean()


def value_diagnostics(
    outputs: Sequence[ValueOutput], *, gather: GatherOverRanks = one_rank
) -> dict[str, Float[Tensor, ""]]:
    """Metrics of an optimizer step's value loss, on the device.

    Args:
        outputs: of every micro-batch of the step on this rank.
        gather: over all ranks.

    Returns:
        ``loss/value``, the mean over the fitted tokens before the coefficient; ``value/clipped_fraction`` of them.

    Example:
        >>> one = ValueOutput(torch.tensor(1.0), torch.tensor(2.0), torch.tensor([True]), torch.tensor([False]))
        >>> value_diagnostics([one])["loss/value"].item()
        2.0
    """
    sums = [torch.stack([getattr(each, name).sum() for each in outputs]) for name in ("mean", "fitted", "clipped")]
    mean, num_fitted, num_clipped = gather(torch.stack([each.double().sum() for each in sums])[None]).sum(0)
    return {"loss/value": mean, "value/clipped_fraction": num_clipped / num_fitted.clamp(min=1)}
