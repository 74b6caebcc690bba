"""A weight sharded by rows over ranks that hold different tokens (FSDP2): its shards are broadcast in turn.

Each rank scores its own tokens against one shard after the other, so no rank ever holds the whole weight. The gradient
of a shard is summed over the ranks and stays with the rank that owns it. All ranks must call the head together, also
those without tokens, and run backward together. Every collective of a backward belongs to one autograd function, which
issues them in this order on every rank: each shard of the weight and the sum of its gradient, then the sums of bias,
lora_a and lora_b.

torch's DTensor takes seconds to import, so only what meets one does.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from logitless.distributed.sharding import is_sharded
from logitless.errors import InputError


class Shard(NamedTuple):
    """Some rows of a weight: the first one's place in the whole, the rows, and the rank that owns them."""

    first: int
    weight: Tensor
    owner: int


def shards(weight: Tensor, dtype: torch.dtype) -> Iterator[Shard]:
    """All shards in order, in the ``dtype`` they travel in; a weight that is not sharded as it is.

    Example:
        >>> [shard.weight.shape for shard in shards(torch.zeros(11, 4), torch.float32)]
        [torch.Size([11, 4])]
    """
    if not is_sharded(weight):
        yield Shard(0, weight, 0)
        return
    group, local, most = _group(weight), _local(weight), most_rows(weight)
    for owner, first in enumerate(range(0, len(weight), most)):
        if owner == dist.get_rank(group):
            rows = local.to(dtype, copy=True)
        else:
            rows = local.new_empty(min(most, len(weight) - first), weight.shape[1], dtype=dtype)
        dist.broadcast(rows, group=group, group_src=owner)
        yield Shard(first, rows, owner)


def most_rows(weight: Tensor) -> int:
    """Rows of the largest shard, which is every shard but the last of those that have any.

    Example:
        >>> most_rows(torch.zeros(11, 4))
        11
    """
    return -(-len(weight) // dist.get_world_size(_group(weight))) if is_sharded(weight) else len(weight)


def summed_on_owner(gradient: Tensor, shard: Shard, weight: Tensor) -> Tensor | None:
    """The sum of all ranks' gradients of a shard, on its owner in each copy of the weight; None on the others."""
    group = _group(weight)
    dist.reduce(gradient, group=group, group_dst=shard.owner)
    if shard.owner != dist.get_rank(group):
        return None
    if (copies := _copies(weight)) is not None:
        dist.all_reduce(gradient, group=copies)
    return gradient


def like(weight: Tensor, local: Tensor | None) -> Tensor:
    """A tensor sharded as ``weight`` is, from this rank's rows of it (None where it owns none)."""
    from torch.distributed.tensor import DTensor

    assert isinstance(weight, DTensor)
    local = torch.empty_like(_local(weight)) if local is None else local.to(weight.dtype)
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def whole(tensor: Tensor | None) -> Tensor | None:
    """A small tensor (bias, LoRA factor) made whole where it is sharded, in float32 or wider; any other as it is.

    For use inside an autograd function, which sums its gradient by ``summed_like``: were these collectives nodes of
    the graph, autograd would choose their order, and it may choose another on another rank.

    Example:
        >>> whole(torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.bfloat16
    """
    if tensor is None or not is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach().to(torch.promote_types(tensor.dtype, torch.float32))


def summed_like(gradient: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    """The gradient of a small tensor in its dtype; where that is sharded, summed over ranks and sharded like it.

    Accumulation: in the dtype of ``gradient``, rounded after the sum.

    Args:
        gradient: of the whole tensor, this rank's part of the sum.
        tensor: as the caller gave it.

    Example:
        >>> summed_like(torch.ones(2), torch.ones(2, dtype=torch.bfloat16)).dtype
        torch.bfloat16
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
    return everywhere.redistribute(placements=tensor.placements)  # each rank keeps its part; nothing travels


def _local(weight: Any) -> Tensor:
    return weight.to_local().detach()


def _group(weight: Any) -> ProcessGroup:
    """The ranks that have one copy of the weight together."""
    *copies, rows = weight.placements
    if not rows.is_shard(0) or len(copies) > 1 or not all(placement.is_replicate() for placement in copies):
        raise InputError(
            needed="a weight sharded by rows over a mesh of one dimension, or of two: copies and shards",
            given=f"placements {tuple(weight.placements)} over a mesh of {weight.device_mesh.ndim} dimensions",
            remedy="Give the gathered weight: weight.full_tensor(grad_placements=...).",
        )
    return weight.device_mesh.get_group(len(copies))


def _copies(weight: Any) -> ProcessGroup | None:
    """The ranks that have this rank's rows; None where it alone has them."""
    return None if weight.device_mesh.ndim == 1 else weight.device_mesh.get_group(0)
