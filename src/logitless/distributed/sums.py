"""Sums over ranks that gradients pass through.

Convention: every rank holds a part of the loss, the loss is the sum of the parts, and gradients are summed over ranks.
A sum over ranks that enters every rank's part then hands back the sum over ranks of what each part asks of it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd import Function


def sum_over_group(group: dist.ProcessGroup | None) -> Callable[[Tensor], Tensor]:
    """The element-wise sum over the ranks of a process group, as a function of a tensor.

    ``y = sum_r x_r`` on every rank

    Gradient: ``dL/dx_r = sum_s dL_s/dy`` with ``L = sum_s L_s``, L_s being the part that rank s computes.

    Args:
        group: the ranks that share the data (``torch.distributed.group.WORLD`` for all of them); None for one rank
            alone, where the sum is the tensor itself and no process group need exist.

    Returns:
        A collective: every rank of the group calls it equally often, in the same order, with the same shape, and either
        all or none of them with a tensor that needs a gradient; all of them then run backward through it.

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
