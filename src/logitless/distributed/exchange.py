"""Collectives of ranks that share a sequence.

Ulysses (Jacobs et al. 2023, arXiv:2309.14509): each rank has some of a row's tokens and all heads, but in the attention
all tokens and some heads. One all-to-all changes between the two, another back.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup


def exchanged(x: Shaped[Tensor, "..."], group: ProcessGroup, *, split: int, join: int) -> Shaped[Tensor, "..."]:
    """All-to-all: cut a tensor along one dimension, and join the pieces of all ranks along another.

    ``y_r = cat_s(x_s.chunk(S, split)[r], join)``. Gradient: the reverse exchange.

    Args:
        x: of the same shape on every rank; S divides ``split``.
        group: of S ranks.
        split: dimension that is whole here and is cut.
        join: dimension that is cut here and becomes whole.
    """
    return _Exchange.apply(x, group, split, join)  # type: ignore[no-untyped-call]


def pieced_together(
    rows: Float[Tensor, "k C"], places: Int[Tensor, "k"], total: int, group: ProcessGroup
) -> Float[Tensor, "N C"]:
    """All N rows on every rank, each computed by one of them.

    Gradient: of this rank's rows. All ranks compute the same loss from all rows, so no exchange is needed.

    Args:
        rows: of this rank.
        places: their indices among the N.
        total: N.
        group: that shares the rows.
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
