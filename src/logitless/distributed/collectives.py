"""Collectives as functions of tensors: gathers, sums and exchanges over the ranks of a group.

The loss is the sum of the ranks' parts, and gradients are summed over ranks. Ranks that share a sequence follow Ulysses
(Jacobs et al. 2023, arXiv:2309.14509): a rank has some of the tokens and all heads, except in attention, where it has
all tokens and some heads. One all-to-all before attention and one after it change between the two.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup


def gather_over_group(group: ProcessGroup | None) -> Callable[[Tensor], Tensor]:
    """All-gather of rows for statistics, without gradient.

    ``y = cat(x_0, x_1, ...)`` on every rank; lengths may differ, 0 included

    Args:
        group: the ranks that share the data; None for a single rank, without a process group.

    Returns:
        A collective: every rank calls it equally often, in the same order, with tensors of one dtype that differ in
        their first dimension at most. It synchronizes with the GPU: gather several columns as one tensor.

    Example:
        >>> gather_over_group(None)(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    if group is None:
        return lambda rows: rows
    return lambda rows: _gather(rows, group)


def all_gathered(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    """The tensors of all ranks, which have one shape."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor, group=group)
    return found


def num_rows_of_all(num_rows: int, device: torch.device, group: ProcessGroup) -> Int[Tensor, "ranks"]:
    """The number of rows of each rank; does not synchronize with the GPU."""
    return torch.cat(all_gathered(torch.full((1,), num_rows, dtype=torch.int64, device=device), group))


def _gather(rows: Shaped[Tensor, "n *rest"], group: ProcessGroup) -> Shaped[Tensor, "m *rest"]:
    counts: list[int] = num_rows_of_all(len(rows), rows.device, group).tolist()
    # padded to equally many rows: only NCCL gathers unequal ones
    sent = rows.new_zeros((max(counts), *rows.shape[1:]))
    sent[: len(rows)] = rows.detach()
    received = all_gathered(sent, group)
    return torch.cat([each[:count] for each, count in zip(received, counts, strict=True)])


def sum_over_group(group: ProcessGroup | None) -> Callable[[Tensor], Tensor]:
    """Differentiable all-reduce (sum) over the ranks of a process group.

    ``y = sum_r x_r`` on every rank

    Gradient: ``dL/dx_r = sum_s dL_s/dy`` with ``L = sum_s L_s``, L_s being the part that rank s computes.

    Args:
        group: the ranks that share the data; None for a single rank, without a process group.

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
    def forward(ctx: Any, part: Shaped[Tensor, "..."], group: ProcessGroup) -> Shaped[Tensor, "..."]:
        ctx.group = group
        total = part.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Shaped[Tensor, "..."]) -> tuple[Shaped[Tensor, "..."], None]:  # type: ignore[override]
        return _sum(gradient, ctx.group), None


def _sum(part: Tensor, group: ProcessGroup) -> Tensor:
    return _SumOverGroup.apply(part, group)  # type: ignore[no-untyped-call]


def exchanged(x: Shaped[Tensor, "..."], group: ProcessGroup, *, split: int, join: int) -> Shaped[Tensor, "..."]:
    """All-to-all: split a tensor along one dimension, and join the pieces of all ranks along another.

    ``y_r = cat_s(x_s.chunk(S, split)[r], join)``. Gradient: the reverse exchange.

    Args:
        x: of the same shape on every rank; S divides ``split``.
        split: dimension that is whole before and split after.
        join: dimension that is split before and whole after.
    """
    return _Exchange.apply(x, group, split, join)  # type: ignore[no-untyped-call]


def pieced_together(
    rows: Float[Tensor, "k C"], places: Int[Tensor, "k"], total: int, group: ProcessGroup
) -> Float[Tensor, "N C"]:
    """All N rows on every rank, each computed by one of them.

    Gradient: each rank takes that of its rows. All ranks compute the same loss, so nothing is exchanged.

    Args:
        rows: of this rank.
        places: their indices among the N.
    """
    return _PiecedTogether.apply(rows, places, total, group)  # type: ignore[no-untyped-call]


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, split: int, join: int) -> Tensor:
        ctx.options = group, join, split
        sent = torch.stack(x.chunk(dist.get_world_size(group), split))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(list(received), join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        group, split, join = ctx.options
        return exchanged(gradient, group, split=split, join=join), None, None, None


class _PiecedTogether(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, total: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        whole = rows.new_zeros(total, rows.shape[1])
        whole[places] = rows.detach()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        return gradient[places], None, None, None
