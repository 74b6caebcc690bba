"""What ranks that share a sequence hand each other: rows for heads around the attention, and the scores of their rows.

Ulysses (Jacobs et al. 2023, arXiv:2309.14509): each rank has some of a row's tokens and all heads, but in the attention
all tokens and some of the heads. One all-to-all changes from the one to the other, another back.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup


def exchanged(x: Shaped[Tensor, "..."], group: ProcessGroup, *, split: int, join: int) -> Shaped[Tensor, "..."]:
    """Cut a tensor along one dimension, give each rank a piece, and lay what comes end to end along another.

    ``y_r = cat_s(x_s.chunk(S, split)[r], join)``

    Gradient: the same the other way round.

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
    """The rows of all ranks on every rank, where each is computed by one of them.

    Gradient: of this rank's rows. Every rank goes on with all rows and computes the same loss from them, once; what
    that loss asks of another rank's rows, the other rank knows too.

    Args:
        rows: of this rank.
        places: of them among the N.
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
