"""A vocabulary sharded over a process group.

Rank r holds the contiguous rows ``weight[offset_r : offset_r + V_r]`` of the head (and of ``bias`` and ``lora_b``);
hidden states, targets and ``lora_a`` are replicated. Each rank reduces its columns to four numbers a row, and one
gather of [4, N] completes them; the gradients of replicated inputs are summed. Partial sums are relative to their own
maximum, so that they never underflow.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from logitless.distributed.collectives import all_gathered, num_rows_of_all
from logitless.head.contract import require


class Partial(NamedTuple):
    """Sums over the columns v != y of a shard or block, relative to its own maximum; each [N].

    Args:
        top: its largest logit, the target's included.
        others: sum of exp(z_v - top) over v != y.
        weighted: sum of exp(z_v - top) (z_v - top) over v != y.
        target_logit: z_y if it holds the target, else 0.
    """

    top: Tensor
    others: Tensor
    weighted: Tensor
    target_logit: Tensor


def merged(parts: Sequence[Partial]) -> Partial:
    """The sums over several shards or blocks, from those over each.

    Example:
        >>> block = Partial(*torch.tensor([[2.0], [1.0], [0.0], [0.0]]))
        >>> [float(column) for column in merged([block, block])]
        [2.0, 2.0, 0.0, 0.0]
    """
    tops, others, weighted, target_logit = (torch.stack(column) for column in zip(*parts, strict=True))
    top = tops.amax(0)
    # -1e4 instead of -inf: a part that is masked with -inf then adds exactly 0, not NaN
    below = (tops - top).clamp(min=-1e4)
    scale = below.exp()
    return Partial(
        top=top,
        others=(scale * others).sum(0),
        weighted=(scale * (weighted + others * below)).sum(0),
        target_logit=target_logit.sum(0),
    )


def gathered(partial: Partial, group: ProcessGroup) -> Partial:
    """The sums over the whole vocabulary, merged in rank order; bitwise identical on every rank."""
    return merged([Partial(*part) for part in all_gathered(torch.stack(partial), group)])


def within_shard(target: Int[Tensor, "N"], num_rows: int, group: ProcessGroup) -> Int[Tensor, "N"]:
    """Targets as indices among this rank's rows; does not synchronize with the GPU.

    Raises:
        InputError: a target beyond the whole vocabulary (on CUDA: a device-side assertion).
    """
    ends = num_rows_of_all(num_rows, target.device, group).cumsum(0)
    require(
        (target >= 0) & (target < ends[-1]),
        needed="targets within the vocabulary that the group shares",
        given="one outside of it",
        remedy="Give rows of scored tokens only, ids counted over the whole vocabulary.",
    )
    return target - (ends[dist.get_rank(group)] - num_rows)


def summed(partial: Float[Tensor, "..."], group: ProcessGroup) -> Float[Tensor, "..."]:
    """The sum over the ranks, in place."""
    dist.all_reduce(partial, group=group)
    return partial
