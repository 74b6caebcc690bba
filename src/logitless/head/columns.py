"""Which rank holds which columns of the logits.

Three cases: this rank has the whole weight; a process group shares the vocabulary (``group``), so that every rank
multiplies the same rows with its own columns, and sums over columns are all-reduced; or the weight is a DTensor sharded
over ranks with rows of their own, and each shard is broadcast in turn. Collectives never wait for a value on the GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from logitless.distributed.collectives import all_gathered
from logitless.distributed.sharding import is_sharded
from logitless.head import sharded, vocab_parallel
from logitless.head.sharded import GradientOfShards, Shard

UNSEEN = -3e38
"""Stands for the logit of a target whose shard has not arrived yet: its exponential is 0 for every anchor."""


@dataclass(frozen=True)
class Columns:
    """The columns of logits that this rank computes.

    Args:
        weight: [V, D] whole, this rank's rows of it (with ``group``), or a DTensor sharded by rows.
        group: the ranks that hold other columns of the same rows, or None.
        summed_into: the parameter itself where products add to its float32 gradient (``float32_sums``), or None.

    Example:
        >>> columns = Columns(torch.zeros(11, 4), None)
        >>> [(shard.first, columns.kept_block(shard)) for shard in columns.shards_in_turn(torch.bfloat16)]
        [(0, slice(0, 11, None))]
        >>> columns.kept_width
        16
    """

    weight: Tensor
    group: ProcessGroup | None
    summed_into: Tensor | None = field(default=None, kw_only=True)

    @property
    def adds(self) -> bool:
        """Whether products add to an existing gradient."""
        return self.summed_into is not None and self.summed_into.grad is not None

    @property
    def shared(self) -> bool:
        """Whether other ranks hold other columns of the same rows."""
        return self.group is not None

    @property
    def most(self) -> int:
        """Columns of the largest shard."""
        return sharded.most_rows(self.weight)

    @property
    def num_shards(self) -> int:
        """Number of shards to multiply with."""
        return -(-len(self.weight) // self.most)

    @property
    def kept_width(self) -> int:
        """Columns of a matrix that holds every shard's block, each starting at a multiple of 16 bytes."""
        return self.num_shards * self._padded_width

    def kept_block(self, shard: Shard) -> slice:
        """A shard's columns in the matrix of ``kept_width``."""
        first = shard.first // self.most * self._padded_width
        return slice(first, first + len(shard.weight))

    def kept_place(self, target: Tensor) -> Tensor:
        """Each target's column in the matrix of ``kept_width``."""
        return target if self.num_shards == 1 else target + target // self.most * (self._padded_width - self.most)

    @property
    def _padded_width(self) -> int:
        return -(-self.most // 8) * 8

    def shards_in_turn(self, dtype: torch.dtype) -> Iterator[Shard]:
        """Every shard in order, broadcast in ``dtype`` if there are several."""
        return sharded.shards(self.weight, dtype)

    def from_first(self, target: Tensor) -> Tensor:
        """Targets as indices among this rank's columns."""
        return target if self.group is None else vocab_parallel.within_shard(target, len(self.weight), self.group)

    def target_logits(self, like: Tensor) -> Tensor:
        """A buffer for the logits of targets, with placeholders until their columns are computed."""
        return torch.full_like(like, UNSEEN if self.num_shards > 1 else 0.0)

    def summed(self, partial: Tensor) -> Tensor:
        """The sum over all columns, from the sum over this rank's columns; in place."""
        return partial if self.group is None else vocab_parallel.summed(partial, self.group)

    def largest(self, partial: Tensor) -> Tensor:
        """The maximum over all columns, from the maximum over this rank's columns; in place."""
        if self.group is not None:
            dist.all_reduce(partial, dist.ReduceOp.MAX, group=self.group)
        return partial

    def by_rank(self, vectors: Tensor) -> Tensor:
        """[k, N] of every rank as [k, ranks, N], the same on all of them."""
        if self.group is None:
            return vectors[:, None]
        return torch.stack(all_gathered(vectors, self.group), dim=1)

    def gradient_buffer(self, shard: Shard) -> Tensor:
        """Buffer for the gradient of a shard: float32 if it is summed over ranks or with an existing gradient."""
        if self.summed_into is not None:
            if self.summed_into.grad is None:
                return torch.empty_like(self.weight, dtype=torch.float32)
            return self.summed_into.grad
        if is_sharded(self.weight):
            return torch.empty_like(shard.weight, dtype=torch.float32)
        return torch.empty_like(self.weight)

    def gradient_of_shards(self) -> GradientOfShards | None:
        """Sums the gradients of shards over ranks; None for an unsharded weight."""
        return GradientOfShards(self.weight) if is_sharded(self.weight) else None

    def as_weight(self, gradient: Tensor | None) -> Tensor | None:
        """The gradient of this rank's rows, sharded like the weight; None if ``summed_into.grad`` has it."""
        if self.summed_into is not None:
            self.summed_into.grad = gradient
            return None
        return sharded.like(self.weight, gradient) if is_sharded(self.weight) else gradient

    def without_rows(self, dtype: torch.dtype, *, trained: bool) -> Tensor | None:
        """The weight's gradient on a rank without rows, which must take part in every collective."""
        if self.summed_into is not None:
            return None
        if trained and not is_sharded(self.weight):
            return torch.zeros_like(self.weight)
        gradient = self.gradient_of_shards() if trained else None
        for shard in self.shards_in_turn(dtype):
            if gradient is not None:
                gradient.add(self.gradient_buffer(shard).zero_(), shard)
        return None if gradient is None else self.as_weight(gradient.mine())
