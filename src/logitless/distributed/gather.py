"""The rows of all ranks on every rank, in rank order."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor


def gather_over_group(group: dist.ProcessGroup | None) -> Callable[[Tensor], Tensor]:
    """All-gather of rows for statistics, without gradient.

    ``y = cat(x_0, x_1, ...)`` on every rank; lengths may differ, 0 included

    Args:
        group: the ranks that share the data; None for one rank alone, without a process group.

    Returns:
        A collective: every rank calls it equally often, in the same order, with tensors of one dtype that differ in
            their
        first dimension at most. It synchronizes with a GPU: gather columns together.

    Example:
        >>> gather_over_group(None)(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    if group is None:
        return lambda rows: rows
    return lambda rows: _gather(rows, group)


def _gather(rows: Shaped[Tensor, "n *rest"], group: dist.ProcessGroup) -> Shaped[Tensor, "m *rest"]:
    lengths = [torch.empty(1, dtype=torch.int64, device=rows.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.full_like(lengths[0], len(rows)), group=group)
    counts: list[int] = torch.cat(lengths).tolist()
    # Ranks send equally many rows: the collective of unequal ones exists on NCCL only.
    sent = rows.new_zeros((max(counts), *rows.shape[1:]))
    sent[: len(rows)] = rows.detach()
    received = [torch.empty_like(sent) for _ in counts]
    dist.all_gather(received, sent, group=group)
    return torch.cat([each[:count] for each, count in zip(received, counts, strict=True)])
