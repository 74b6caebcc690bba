"""A vocabulary sharded over a process group: what the ranks tell each other.

Rank r holds the contiguous rows ``weight[offset_r : offset_r + V_r]`` of the head (and of ``bias`` and ``lora_b``);
hidden states, targets and ``lora_a`` are the same on every rank. Each rank reduces its own columns to four numbers a
row, one gather of [4, N] makes them whole, and one sum makes the gradient of what is replicated. Since partial sums
travel with the maximum they are relative to, no log-prob is too small for them.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup


class Partial(NamedTuple):
    """Sums over the columns v != y of one shard, relative to its own maximum.

    Args:
        top: max over the shard's logits, the target's included.
        others: sum of exp(z_v - top) over v != y.
        weighted: sum of exp(z_v - top) (z_v - top) over v != y.
        target_logit: z_y where the shard owns the target, else 0.
    """

    top: Tensor
    others: Tensor
    weighted: Tensor
    target_logit: Tensor


class Shard(NamedTuple):
    """Where a rank's rows lie in the whole vocabulary: two device scalars."""

    offset: Tensor
    vocabulary: Tensor


def shard(num_rows: int, group: ProcessGroup, device: torch.device) -> Shard:
    """This rank's place, from the sizes of the ranks before it; known on the device only, so nothing waits."""
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.full((1,), num_rows, dtype=torch.int64, device=device), group=group)
    ends = torch.cat(sizes).cumsum(0)
    return Shard(offset=ends[dist.get_rank(group)] - num_rows, vocabulary=ends[-1])


def combined(partial: Partial, group: ProcessGroup) -> Partial:
    """The sums over the whole vocabulary, in rank order, so that every rank has the same bits."""
    mine = torch.stack(partial)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    tops, others, weighted, target_logit = torch.stack(parts, 1)
    top = tops.amax(0)
    # A shard that is 1e4 nats below the top adds exactly 0, also when all of it is masked with -inf.
    below = (tops - top).clamp(min=-1e4)
    scale = below.exp()
    return Partial(
        top=top,
        others=(scale * others).sum(0),
        weighted=(scale * (weighted + others * below)).sum(0),
        target_logit=target_logit.sum(0),
    )


def summed(partial: Float[Tensor, "..."], group: ProcessGroup) -> Float[Tensor, "..."]:
    """The sum over the ranks, in place."""
    dist.all_reduce(partial, group=group)
    return partial
