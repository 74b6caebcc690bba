"""Sums of gradients over ranks, a bucket at a time: communication of one bucket overlaps with copies of the next.

Gradients are summed in float32, or float64 for float64 parameters, and rounded once.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from logitless.distributed.sharding import is_sharded
from logitless.distributed.tree import TreeSum

BUCKET_BYTES = 64 * 2**20  # of gradients that are copied together and summed in one collective
ALONE_BYTES = 8 * 2**20  # a gradient this large is summed by itself, without a copy


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """See ``Ranks.sum_gradients``."""
    trained = [p for p in parameters if p.requires_grad and not is_sharded(p)]
    if trained:
        any_has = _has_gradient(trained)
        dist.all_reduce(any_has, op=dist.ReduceOp.MAX, group=group)
        with_gradient = [p for p, has in zip(trained, any_has.tolist(), strict=True) if has]
        _finish_in_turn(_Sum(bucket, group) for bucket in _buckets(with_gradient, BUCKET_BYTES))


def sum_gradients_in_order(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """See ``Ranks.sum_gradients_in_order``."""
    trained = [p for p in parameters if p.requires_grad]
    if trained:
        has, num_ranks = _has_gradient(trained), dist.get_world_size(group)
        has_of_ranks = has.new_empty(num_ranks * len(has))
        dist.all_gather_into_tensor(has_of_ranks, has, group=group)
        by_parameter = has_of_ranks.view(num_ranks, -1).bool().T.tolist()
        ranks_of = {id(p): of_ranks for p, of_ranks in zip(trained, by_parameter, strict=True)}
        with_gradient = [p for p in trained if any(ranks_of[id(p)])]
        _finish_in_turn(
            _SumInOrder(bucket, [ranks_of[id(p)] for p in bucket], group)
            for bucket in _buckets(with_gradient, BUCKET_BYTES // num_ranks)
        )


def _has_gradient(parameters: list[nn.Parameter]) -> Tensor:
    """1 for each parameter with a gradient, else 0."""
    return torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)


def _finish_in_turn(sums: "Iterable[_Sum | _SumInOrder]") -> None:
    """Finish each sum once the next has started, so that communication overlaps with copies."""
    previous: _Sum | _SumInOrder | None = None
    for started in sums:
        if previous is not None:
            previous.finish()
        previous = started
    if previous is not None:
        previous.finish()


class _Sum:
    """One bucket of ``sum_gradients``, reduced while the next is copied."""

    def __init__(self, bucket: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._bucket, self._flat = bucket, None
        gradient = bucket[0].grad
        in_place = len(bucket) == 1 and gradient is not None and gradient.dtype == _sum_dtype(bucket[0])
        if not in_place or gradient is None or not gradient.is_contiguous():
            self._flat = gradient = _flat(bucket)
        self._work = dist.all_reduce(gradient, op=dist.ReduceOp.SUM, group=group, async_op=True)

    def finish(self) -> None:
        """Write the sum to the gradients."""
        assert self._work is not None
        self._work.wait()
        if self._flat is not None:
            parts = torch.split(self._flat, [p.numel() for p in self._bucket])
            for p, total in zip(self._bucket, parts, strict=True):
                _set_gradient(p, total)


class _SumInOrder:
    """One bucket of ``sum_gradients_in_order``, added along the tree while the next bucket is sent.

    Args:
        bucket: parameters with a gradient on some rank.
        has_gradient: for each parameter and rank, whether it has a gradient.
        group: of the ranks.
    """

    def __init__(self, bucket: list[nn.Parameter], has_gradient: list[list[bool]], group: dist.ProcessGroup) -> None:
        self._bucket, self._has_gradient = bucket, has_gradient
        self._flat = _flat(bucket)
        self._parts = self._flat.new_empty(len(has_gradient[0]) * len(self._flat))
        self._work = dist.all_gather_into_tensor(self._parts, self._flat, group=group, async_op=True)

    def finish(self) -> None:
        """Write the sums to the gradients."""
        self._work.wait()
        parts, sizes = self._parts.chunk(len(self._has_gradient[0])), [p.numel() for p in self._bucket]
        if all(map(all, self._has_gradient)):
            whole = _along_tree(parts)
            sums: list[Tensor | None] = list(torch.split(whole, sizes)) if whole is not None else []
        else:
            split = [torch.split(part, sizes) for part in parts]
            sums = [
                _along_tree([split[rank][i] if has else None for rank, has in enumerate(of_ranks)])
                for i, of_ranks in enumerate(self._has_gradient)
            ]
        for parameter, total in zip(self._bucket, sums, strict=True):
            if total is not None:
                _set_gradient(parameter, total)


def _along_tree(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of the ranks' tensors along the tree."""
    total = TreeSum()
    for part in parts:
        total.add([part])
    return total.whole()[0]


def _sum_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _flat(bucket: list[nn.Parameter]) -> Tensor:
    """The gradients flattened, in the dtype of their sum; 0 where there is none."""
    dtype = _sum_dtype(bucket[0])
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).to(dtype) for p in bucket])


def _set_gradient(parameter: nn.Parameter, total: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    parameter.grad.copy_(total.view_as(parameter))


def _buckets(parameters: list[nn.Parameter], most_bytes: int) -> Iterator[list[nn.Parameter]]:
    """The parameters in order, in buckets of one dtype and device; a large parameter has its own."""
    bucket: list[nn.Parameter] = []
    size = 0
    for p in parameters:
        num_bytes = p.numel() * _sum_dtype(p).itemsize
        differs = bucket and (_sum_dtype(p), p.device) != (_sum_dtype(bucket[0]), bucket[0].device)
        alone = max(num_bytes, size if len(bucket) == 1 else 0) >= ALONE_BYTES
        if bucket and (differs or alone or size + num_bytes > most_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += num_bytes
    if bucket:
        yield bucket
