"""The value loss of PPO: fits predictions V to returns R, moving them a bounded way from where they were."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from logitless.errors import ConfigurationError


@dataclass(frozen=True)
class ValueLoss:
    """The value term of a loss: ``coefficient * sum_t v_t * clipped_value_loss_t``.

    Args:
        coefficient: 0.5 is usual.
        clip: how far a prediction may move from ``value_old`` before it earns nothing more; None for no limit.

    Raises:
        ConfigurationError: a negative coefficient or a clip that is not positive.

    Example:
        >>> ValueLoss(clip=None).coefficient
        0.5
    """

    coefficient: float = 0.5
    clip: float | None = 0.2
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.coefficient < 0 or (self.clip is not None and not self.clip > 0):
            raise ConfigurationError(
                needed="a value coefficient of at least 0 and a positive value clip",
                given=f"coefficient={self.coefficient}, clip={self.clip}",
                remedy="Write clip: null to switch clipping off.",
            )


def value_loss(value: Float[Tensor, "N"], value_target: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Half the squared error.

    ``1/2 (V - R)^2``

    Gradient: ``V - R`` through ``value`` only.

    Args:
        value: [N] current predictions.
        value_target: [N] returns (``advantage.gae``).

    Returns:
        [N], to be weighted and summed by the caller.

    Example:
        >>> value_loss(torch.tensor([3.0]), torch.tensor([1.0]))
        tensor([2.])
    """
    return (value - value_target.detach()).square() / 2


def clipped_value_loss(
    value: Float[Tensor, "N"], value_old: Float[Tensor, "N"], value_target: Float[Tensor, "N"], clip: float
) -> Float[Tensor, "N"]:
    """The larger of the squared errors of the prediction and of the prediction held near the old one.

    ``1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)``

    Gradient: ``V - R`` through ``value`` where the first is the larger, exactly 0 where the second is.

    Args:
        value: [N] current predictions.
        value_old: [N] predictions of the scoring pass.
        value_target: [N] returns from unwhitened advantages (``advantage.gae``).
        clip: largest useful change; 0.2.

    Returns:
        [N], to be weighted and summed by the caller.

    Source: PPO's reference implementation; arXiv:2005.12729 sec. 3.

    Example:
        >>> zero = torch.zeros(2)
        >>> clipped_value_loss(torch.tensor([1.0, -1.0]), zero, torch.tensor([2.0, 2.0]), clip=0.5)  # 1.5^2/2, 3^2/2
        tensor([1.1250, 4.5000])
    """
    held = torch.clamp(value, value_old.detach() - clip, value_old.detach() + clip)
    return torch.maximum(value_loss(value, value_target), value_loss(held, value_target))


def value_is_clipped(
    value: Float[Tensor, "N"], value_old: Float[Tensor, "N"], value_target: Float[Tensor, "N"], clip: float
) -> Bool[Tensor, "N"]:
    """Where ``clipped_value_loss`` has no gradient because the prediction has moved far enough towards its target.

    Example:
        >>> zero = torch.zeros(2)
        >>> value_is_clipped(torch.tensor([1.0, -1.0]), zero, torch.tensor([2.0, 2.0]), clip=0.5)
        tensor([ True, False])
    """
    return clipped_value_loss(value, value_old, value_target, clip) > value_loss(value, value_target)
