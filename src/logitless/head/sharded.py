"""A weight sharded by rows over ranks with different tokens (FSDP2): its shards are broadcast in turn.

Each rank scores its own tokens against one shard while the next is broadcast. The gradient of a shard is reduced to its
owner while the next shard is multiplied. All ranks call the head and run backward together, also those without tokens.
The collectives of a backward have a fixed order: the first shard's broadcast; for each shard, the next one's broadcast
and the reduction of its gradient; then the sums of bias, lora_a and lora_b. DTensor is imported inside functions,
because that takes seconds.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from logitless.distributed.sharding import is_sharded, local_part, with_local_part
from logitless.errors import InputError
from logitless.types import LMHead

AHEAD = 1
"""Shards, and reductions of gradients, under way while another shard is multiplied; 0 waits for each."""


class Shard(NamedTuple):
    """Rows of a weight: the index of the first, the rows, and the rank that owns them."""

    first: int
    weight: Tensor
    owner: int


def shards(weight: Tensor, dtype: torch.dtype) -> Iterator[Shard]:
    """All shards in order, broadcast in ``dtype``; an unsharded weight unchanged, as the only shard."""
    if not is_sharded(weight):
        yield Shard(0, weight, 0)
        return
    group, local, most = _group(weight), local_part(weight), most_rows(weight)
    firsts = list(range(0, len(weight), most))

    def sent(owner: int) -> tuple[Shard, dist.Work]:
        first = firsts[owner]
        if owner == dist.get_rank(group):
            rows = local.to(dtype, copy=True)
        else:
            rows = local.new_empty(min(most, len(weight) - first), weight.shape[1], dtype=dtype)
        work = dist.broadcast(rows, group=group, group_src=owner, async_op=True)
        assert work is not None
        return Shard(first, rows, owner), work

    coming = deque(sent(owner) for owner in range(min(AHEAD, len(firsts))))
    for owner in range(len(firsts)):
        if owner + AHEAD < len(firsts):
            coming.append(sent(owner + AHEAD))
        yield _arrived(*coming.popleft())


def _arrived(shard: Shard, work: dist.Work) -> Shard:
    """The shard after its broadcast; on a GPU only the stream waits."""
    work.wait()
    return shard


def most_rows(weight: Tensor) -> int:
    """Rows of every shard but the last and empty ones."""
    return -(-len(weight) // dist.get_world_size(_group(weight))) if is_sharded(weight) else len(weight)


class GradientOfShards:
    """The gradient of a sharded weight; each shard's is reduced while the next is computed.

    Args:
        weight: the DTensor.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._group = weight, _group(weight)
        self._reducing: tuple[Tensor, int, dist.Work] | None = None
        self._mine: Tensor | None = None

    def add(self, gradient: Tensor, shard: Shard) -> None:
        """Start to reduce all ranks' gradients of a shard; the tensor is overwritten."""
        work = dist.reduce(gradient, group=self._group, group_dst=shard.owner, async_op=True)
        assert work is not None
        before, self._reducing = self._reducing, (gradient, shard.owner, work)
        if before is not None:
            self._keep(*before)
        if not AHEAD:
            self.mine()

    def mine(self) -> Tensor | None:
        """The summed gradient of this rank's rows, or None without rows; call it after the last ``add``."""
        if self._reducing is not None:
            self._keep(*self._reducing)
            self._reducing = None
        return self._mine

    def _keep(self, gradient: Tensor, owner: int, work: dist.Work) -> None:
        work.wait()
        if owner == dist.get_rank(self._group):
            if (copies := _copies(self._weight)) is not None:
                dist.all_reduce(gradient, group=copies)
            self._mine = gradient


def like(weight: Tensor, local: Tensor | None) -> Tensor:
    """A tensor sharded like ``weight``, from this rank's rows of it (None if it owns none)."""
    return with_local_part(weight, torch.empty_like(local_part(weight)) if local is None else local.to(weight.dtype))


def whole(tensor: Tensor | None) -> Tensor | None:
    """A small tensor (bias, LoRA factor), gathered if it is sharded, in float32 or wider.

    Call it inside an autograd function, and ``summed_like`` for its gradient: as separate nodes of the graph, ranks
    might run these collectives in different orders.
    """
    if tensor is None or not is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach().to(torch.promote_types(tensor.dtype, torch.float32))


def summed_like(gradient: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    """The gradient of a small tensor in its dtype; if the tensor is sharded, summed over ranks and sharded like it.

    Accumulation: in the dtype of ``gradient``, this rank's part of the sum; rounded after the sum.
    """
    if gradient is None or tensor is None:
        return None
    if not is_sharded(tensor):
        return gradient.to(tensor.dtype)
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(tensor, DTensor)
    mesh, total = tensor.device_mesh, gradient.contiguous()
    for dimension in range(mesh.ndim):
        dist.all_reduce(total, group=mesh.get_group(dimension))
    everywhere = DTensor.from_local(total.to(tensor.dtype), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=tensor.placements)  # each rank keeps its part, without communication


def gathered(head: LMHead) -> LMHead:
    """A head whose parameters are whole on this rank; their gradients are summed over ranks and sharded again.

    All ranks call it, and run backward, together. Gradients are rounded to the parameter's dtype before they are
    summed.

    Memory: the whole parameters, and in the backward the whole gradients.
    """
    names = ("weight", "bias", "lora_a", "lora_b")
    found = _Gathered.apply(*(getattr(head, name) for name in names))  # type: ignore[no-untyped-call]
    return replace(head, **dict(zip(names, found, strict=True)))


class _Gathered(torch.autograd.Function):
    """Tensors, each gathered if it is sharded. One node of the graph, so that all ranks gather and sum in one order."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> tuple[Tensor | None, ...]:
        ctx.tensors = tensors
        return tuple(each.full_tensor().detach() if each is not None and is_sharded(each) else each for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = zip(gradients, ctx.tensors, ctx.needs_input_grad, strict=True)
        return tuple(summed_like(gradient, tensor) if needed else None for gradient, tensor, needed in pairs)


def _group(weight: Any) -> ProcessGroup:
    """The ranks that together hold one copy of the weight."""
    *copies, rows = weight.placements
    if not rows.is_shard(0) or len(copies) > 1 or not all(placement.is_replicate() for placement in copies):
        raise InputError(
            needed="a weight sharded by rows over a mesh of one dimension, or of two: copies and shards",
            given=f"placements {tuple(weight.placements)} over a mesh of {weight.device_mesh.ndim} dimensions",
            remedy="Give the gathered weight: weight.full_tensor(grad_placements=...).",
        )
    return weight.device_mesh.get_group(len(copies))


def _copies(weight: Any) -> ProcessGroup | None:
    """The ranks that hold the same rows; None if only this rank does."""
    return None if weight.device_mesh.ndim == 1 else weight.device_mesh.get_group(0)
