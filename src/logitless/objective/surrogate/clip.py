"""PPO's clipped ratio: the loss of PPO, GRPO, DAPO and, over whole sequences, GSPO."""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from logitless.errors import ConfigurationError
from logitless.objective.inputs import check_knobs, required, shaped
from logitless.objective.surrogate.policy_loss import (
    PolicyLoss,
    SurrogateInputs,
    SurrogateTerms,
    check_bounds,
    check_trust_region,
)


@shaped
def clip_loss(
    log_ratio: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    *,
    ratio_min: float,
    ratio_max: float,
    ratio_cap: float | None = None,
    dual: float | None = None,
) -> Float[Tensor, "N"]:
    """PPO's loss: no gain from moving the ratio further out of its bounds.

    ``l = -min( min(r, ratio_cap) A, clip(r, ratio_min, ratio_max) A )``; with ``dual``, at most ``-dual A`` where A < 0

    Gradient: ``-A r`` through ``log_ratio``; exactly 0 where A > 0 and r > ratio_max, where A < 0 and r < ratio_min,
    r > ratio_cap or r > dual, and where A = 0.

    Args:
        log_ratio: [N] nats.
        advantage: [N].
        ratio_min, ratio_max: bounds of the trust region, 0.8 and 1.2.
        ratio_cap: upper bound of r for negative advantages too (TRL's ``delta``), above ratio_max.
        dual: c > 1 of dual-clip.

    Source: PPO, arXiv:1707.06347, eq. 7; asymmetric bounds DAPO, arXiv:2503.14476; cap INTELLECT-2, arXiv:2505.07291;
        dual clip arXiv:1912.09729.

    Example:
        >>> up = torch.tensor([0.5, 0.5]).exp().log()
        >>> clip_loss(up, torch.tensor([1.0, -1.0]), ratio_min=0.8, ratio_max=1.2)
        tensor([-1.2000,  1.6487])
    """
    if dual == math.inf:  # no bound; infinity times an advantage of 0 would be NaN
        dual = None
    bounded_for_all = [bound for bound in (ratio_cap, dual) if bound is not None and bound < math.inf]
    constant_above = math.log1p(max([ratio_max, *bounded_for_all]))
    never_matters = torch.ones_like(advantage, dtype=torch.bool) if bounded_for_all else advantage >= 0
    if constant_above == math.inf:
        never_matters, constant_above = advantage == 0, 0.0
    # the loss is constant above this: the clamp keeps exp finite, and 0 * inf out of its gradient
    ratio = torch.where(never_matters, log_ratio.clamp(max=constant_above), log_ratio).exp()
    capped = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    loss = -torch.minimum(capped * advantage, ratio.clamp(ratio_min, ratio_max) * advantage)
    return loss if dual is None else torch.minimum(loss, dual * advantage.abs())  # the loss is not positive for A >= 0


@shaped
def clip_sides(
    log_ratio: Float[Tensor, "N"],
    advantage: Float[Tensor, "N"],
    ratio_min: float,
    ratio_max: float,
    ceiling: float = math.inf,
) -> tuple[Bool[Tensor, "N"], Bool[Tensor, "N"]]:
    """Where ``clip_loss`` has no gradient: below ratio_min (A < 0); above ratio_max (A > 0) or the ceiling (A < 0).

    Args:
        log_ratio: [N] nats.
        advantage: [N].
        ratio_min, ratio_max: as in ``clip_loss``.
        ceiling: the smaller of its ``ratio_cap`` and ``dual``.

    Example:
        >>> clip_sides(torch.tensor([1.0, -1.0]), torch.tensor([1.0, -1.0]), 0.8, 1.2)
        (tensor([False,  True]), tensor([ True, False]))
    """
    ratio = log_ratio.exp()
    low = (advantage < 0) & (ratio < ratio_min)
    return low, ((advantage > 0) & (ratio > ratio_max)) | ((advantage < 0) & (ratio > ceiling))


@dataclass(frozen=True)
class Clip(PolicyLoss):
    """``clip_loss`` (PPO, GRPO, DAPO, GSPO).

    Args:
        ratio_min, ratio_max: absolute bounds, 0 <= ratio_min <= 1 <= ratio_max.
        ratio_cap: bound of the ratio for negative advantages, at least ratio_max.
        dual: c > 1 of dual-clip.

    Raises:
        ConfigurationError: bounds out of order or on one side of 1, a cap below ratio_max, or ``dual`` not above 1.
    """

    ratio_min: float = 0.8
    ratio_max: float = 1.2
    ratio_cap: float | None = None
    dual: float | None = None
    name: Literal["clip"] = field(default="clip", kw_only=True)

    def __post_init__(self) -> None:
        check_knobs(self)
        # with a cap ratio_max may be below 1, as TRL's ``delta``
        check = check_trust_region if self.ratio_cap is None else check_bounds
        check(self.ratio_min, self.ratio_max)
        if self.ratio_cap is not None and self.ratio_cap < self.ratio_max:
            raise ConfigurationError(
                needed=f"ratio_cap of at least ratio_max ({self.ratio_max})",
                given=str(self.ratio_cap),
                remedy="Raise ratio_cap above the clip range, or leave it out.",
            )
        if self.dual is not None and self.dual <= 1:
            raise ConfigurationError(
                needed="dual above 1", given=str(self.dual), remedy="Use about 3, or leave it out."
            )

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        log_ratio = required(inputs.log_ratio, "logp_old")
        loss = clip_loss(
            log_ratio,
            inputs.advantage,
            ratio_min=self.ratio_min,
            ratio_max=self.ratio_max,
            ratio_cap=self.ratio_cap,
            dual=self.dual,
        )
        ceiling = min(bound for bound in (self.ratio_cap, self.dual, math.inf) if bound is not None)
        return SurrogateTerms(loss, *clip_sides(log_ratio, inputs.advantage, self.ratio_min, self.ratio_max, ceiling))
