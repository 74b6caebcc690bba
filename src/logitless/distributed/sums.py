"""Differentiable sums over ranks.

The loss is the sum of the ranks' parts, and gradients are summed over ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd import Function


def sum_over_group(group: dist.ProcessGroup | None) -> Callable[[Tensor], Tensor]:
    """Differentiable all-reduce (sum) over the ranks of a process group.

    ``y = sum_r x_r`` on every rank

    Gradient: ``dL/dx_r = sum_s dL_s/dy`` with ``L = sum_s L_s``, L_s being the part that rank s computes.

    Args:
        group: the ranks that share the data; None for one rank alone, without a process group.

    Returns:
        A collective: every rank calls it equally often, in the same order, with the same shape, and all or none with a
        tensor that needs a gradient; all of them then run backward through it.

    Example:
        >>> sum_over_group(None)(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    if group is None:
        return lambda part: part
    return lambda part: _sum(part, group)


class _SumOverGroup(Function):
    @staticmethod
    def forward(ctx: Any, part: Shaped[Tensor, "..."], group: dist.ProcessGroup) -> Shaped[Tensor, "..."]:
        ctx.group = group
        total = part.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Shaped[Tensor, "..."]) -> tuple[Shaped[Tensor, "..."], None]:  # type: ignore[override]
        return _sum(gradient, ctx.group), None


def _sum(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _SumOverGroup.apply(part, group)  # type: ignore[no-untyped-call]
