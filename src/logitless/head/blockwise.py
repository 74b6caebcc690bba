"""Logits in tiles under a memory budget, and sums of gradients over tiles; for ``chunked``, ``divergence_chunked``.

A tile spans all rows if the budget allows it: each block of the weight's gradient is then one product, rounded once.
"""

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from logitless.distributed.sharding import is_sharded
from logitless.head import sharded, vocab_parallel
from logitless.head.contract import logits_dtype
from logitless.head.kernels.variants import truncation
from logitless.head.sharded import Shard, shards
from logitless.head.vocab_parallel import Partial
from logitless.types import LMHead

logger = logging.getLogger("logitless")

CPU_BUDGET = 256 * 2**20
"""The default memory budget on other devices than CUDA, in bytes."""

CUDA_SHARE = 32
"""The default budget on CUDA is the device's memory divided by this: 4.4 GiB of 140, 0.75 GiB of 24."""

MIN_ROWS, MIN_COLUMNS = 16, 512
"""Tiles are not made smaller than this, however small the budget."""

FLOOR = -1e4
"""Replaces -inf in differences of logits: its exp is exactly 0, and 0 times it is 0 and not NaN."""


class Tile(NamedTuple):
    """Number of rows and columns of a full tile of logits."""

    rows: int
    columns: int


def tile(num_rows: int, vocabulary: int, dtype: torch.dtype, memory_budget: int) -> Tile:
    """The largest tile of which three fit into the budget: all rows and some columns if possible.

    Example:
        >>> tile(1000, 50_000, torch.float32, 12 * 1000 * 10_300)
        Tile(rows=1000, columns=10112)
        >>> tile(100_000, 50_000, torch.float32, 12 * 512 * 9_000)
        Tile(rows=9000, columns=512)
    """
    entries = memory_budget // (3 * dtype.itemsize)
    columns = even(max(entries // max(num_rows, 1), MIN_COLUMNS), vocabulary)
    return Tile(rows=min(max(entries // columns, MIN_ROWS), max(num_rows, 1)), columns=columns)


def even(columns: int, vocabulary: int) -> int:
    """A block width of at most ``columns`` for which the last block is about as wide as the others.

    Example:
        >>> even(4096, 5000), even(4096, 300)
        (2560, 300)
    """
    if columns < vocabulary:
        blocks = -(-vocabulary // columns)
        columns = min(columns, -(-vocabulary // (128 * blocks)) * 128)
    return min(columns, vocabulary)


def default_budget(device: torch.device) -> int:
    """The default memory budget in bytes."""
    if device.type != "cuda":
        return CPU_BUDGET
    return torch.cuda.get_device_properties(device).total_memory // CUDA_SHARE


class Call(NamedTuple):
    """The arguments of a call other than tensors.

    Args:
        product: the dtype that operands are rounded to.
        narrow: the dtype of these operands in products over the vocabulary.
        wide: the dtype of the products' results, of logits and of every sum.
        one_pass: whether kernels that read a tile once replace torch's operations.
        gain: factor of the products that corrects the mean error of matrix units that truncate (docs/numerics.md).
        inside: logits are ``outside * tanh(inside * product)``, or with None ``outside * product``.
    """

    product: torch.dtype
    narrow: torch.dtype
    wide: torch.dtype
    one_pass: bool
    gain: float
    inside: float | None
    lora_scale: float
    memory_budget: int
    group: ProcessGroup | None


class HeadBlock(NamedTuple):
    """This rank's LM head, or a block of its vocabulary (columns of the logits)."""

    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None

    @classmethod
    def of(cls, head: LMHead) -> "HeadBlock":
        """The tensors of a head."""
        return cls(head.weight, head.bias, head.lora_a, head.lora_b)


class Rows(NamedTuple):
    """Rows of hidden states, converted for the products.

    Args:
        hidden: [n, D] in ``Call.narrow``.
        low: [n, R] lora_scale * hidden @ lora_a.T, in the logits' dtype, or None.
        target: [n] index relative to the tile's first column.
        outside: [n] the last factor of the logits, or None for 1.
    """

    hidden: Tensor
    low: Tensor | None
    target: Tensor
    outside: Tensor | None

    def cut(self, rows: slice, first_column: int) -> "Rows":
        some = Rows(*at(rows, *self))
        return some._replace(target=some.target - first_column)


def call_of(
    hidden: Tensor,
    head: LMHead,
    temperature: float | Tensor,
    memory_budget: int | None,
    *,
    one_pass: bool,
    group: ProcessGroup | None = None,
) -> tuple[Call, Tensor | None]:
    """The ``Call`` and ``Rows.outside`` for a call's arguments."""
    wide = logits_dtype(hidden.dtype)
    last = (head.scale if head.softcap is None else head.softcap) / temperature
    outside: Tensor | None
    if isinstance(last, Tensor):
        outside = last
    else:
        outside = None if last == 1 else torch.full((len(hidden),), last, dtype=wide, device=hidden.device)
    call = Call(
        product=hidden.dtype,
        narrow=_multiplied_in(hidden),
        wide=wide,
        one_pass=one_pass and wide == torch.float32,
        gain=1 + truncation(hidden.device, _multiplied_in(hidden)) * hidden.shape[1],
        inside=None if head.softcap is None else head.scale / head.softcap,
        lora_scale=head.lora_scale,
        memory_budget=default_budget(hidden.device) if memory_budget is None else memory_budget,
        group=group,
    )
    return call, outside


def at(index: slice | Tensor, *columns: Any) -> list[Any]:
    """Index each of ``columns``; None stays None."""
    return [None if column is None else column[index] for column in columns]


def rows_of(hidden: Tensor, head: HeadBlock, target: Tensor, outside: Tensor | None, call: Call) -> Rows:
    low = None
    if head.lora_a is not None:
        low = call.lora_scale * (hidden.to(call.wide) @ multiplied(head.lora_a, call).T)
    return Rows(hidden.to(call.narrow), low, target, outside)


def block_of(head: HeadBlock, shard: Shard, columns: slice, call: Call) -> HeadBlock:
    """Some columns of a shard, converted for the products: ``weight`` narrow, ``bias`` and ``lora_b`` wide."""
    among_all = slice(shard.first + columns.start, shard.first + columns.stop)
    return HeadBlock(
        weight=shard.weight[columns].to(call.product).to(call.narrow),
        bias=None if head.bias is None else head.bias[among_all].to(call.wide),
        lora_a=None,
        lora_b=None if head.lora_b is None else multiplied(head.lora_b[among_all], call),
    )


def blocks(head: HeadBlock, columns: int, call: Call) -> Iterator[tuple[int, HeadBlock]]:
    """Every block of at most so many columns of the vocabulary: its first column, and the block as ``block_of``."""
    for shard in shards(head.weight, call.product):
        for part in slices(len(shard.weight), columns):
            yield shard.first + part.start, block_of(head, shard, part, call)


def multiplied(factor: Tensor, call: Call) -> Tensor:
    """A LoRA factor converted for the products: rounded like the weight, in the logits' dtype."""
    return factor.to(call.product).to(call.wide)


class Scored(NamedTuple):
    """Values of each row that the forward saves.

    Args:
        top, others: as in ``Partial``.
        normaliser: sum over the whole vocabulary of exp(logit - top).
        logp, entropy: the results.
    """

    top: Tensor
    others: Tensor
    normaliser: Tensor
    logp: Tensor
    entropy: Tensor


def scored(partial: Partial) -> Scored:
    """Log-probabilities and entropies from the sums over the whole vocabulary."""
    below = partial.target_logit - partial.top
    at_target = below.exp()
    normaliser = partial.others + at_target
    log_normaliser = torch.log1p(partial.others + torch.expm1(below))
    return Scored(
        top=partial.top,
        others=partial.others,
        normaliser=normaliser,
        logp=below - log_normaliser,
        entropy=log_normaliser - (partial.weighted + at_target * below.clamp(min=FLOOR)) / normaliser,
    )


def scales(size: Tensor, outside: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    """[n] each: what a backward divides its incoming gradients by, and the ``factor`` of ``LogitGradient``.

    Divided by ``size``, the larger of a row's incoming gradients, u is of the order of a probability, which float16 can
    hold. bfloat16 holds any gradient: there u has all of it, and the hidden states of the weight's gradient are not
    multiplied and so rounded once more.
    """
    if call.narrow == torch.bfloat16:
        derivative = torch.ones_like(size) if outside is None else outside
        derivative = derivative if call.inside is None else derivative * call.inside
        return 1 / derivative, torch.ones_like(size)
    factor = size if outside is None else size * outside
    return size, factor if call.inside is None else factor * call.inside


class LogitGradient(Protocol):
    """The gradient by the products' output, one tile at a time: ``factor * u``.

    Args:
        factor: [n] one number per row.
    """

    @property
    def factor(self) -> Tensor: ...

    def of_tile(self, rows: slice, first_column: int, block: HeadBlock, *, wide: bool) -> tuple[Tensor, Tensor]:
        """u of some rows and a block's columns: in the logits' dtype (only if ``wide``), and in that of operands."""
        ...


def gradients(
    head: HeadBlock, rows: Rows, gradient: LogitGradient, needed: Sequence[bool], call: Call, size: Tile
) -> tuple[Tensor | None, ...]:
    """Gradients by hidden (of these rows), weight, bias, lora_a and lora_b; None where not needed."""
    sums = _Sums(head, rows, gradient, needed, call)
    is_dtensor = is_sharded(head.weight)
    of_weight = None
    fresh = torch.empty_like if len(rows.target) else torch.zeros_like  # the first tile of rows overwrites
    of_shards = sharded.GradientOfShards(head.weight) if is_dtensor else None
    for shard in shards(head.weight, call.product):
        dtype = call.wide if is_dtensor else head.weight.dtype
        of_shard = fresh(shard.weight, dtype=dtype) if sums.for_weight else None
        for columns in slices(len(shard.weight), size.columns):
            block = block_of(head, shard, columns, call)
            of_block = None if of_shard is None else of_shard[columns]
            if of_block is not None and dtype != call.wide:
                of_block = fresh(of_block, dtype=call.wide)  # which is rounded once
            for some in slices(len(rows.target), size.rows):
                sums.add(some, shard.first + columns.start, block, of_block)
            if of_block is not None and of_shard is not None:
                if sums.unit is not None:
                    of_block *= sums.unit
                if of_shard.dtype != call.wide:
                    of_shard[columns] = of_block
        if of_shard is not None and of_shards is not None:
            of_shards.add(of_shard, shard)
        else:
            of_weight = of_shard
    if sums.for_weight and of_shards is not None:
        of_weight = sharded.like(head.weight, of_shards.mine())
    of_hidden, of_lora_a = sums.of_hidden_and_lora_a()
    return of_hidden, of_weight, sums.of_bias, of_lora_a, sums.of_lora_b


def in_all_rows(found: Tensor | None, rows: Tensor, hidden: Tensor) -> Tensor | None:
    """A gradient by these rows of the hidden states as that by all of them, in their dtype; 0 in the others."""
    if found is None:
        return None
    found = found.to(hidden.dtype)
    return found if len(rows) == len(hidden) else torch.zeros_like(hidden).index_copy_(0, rows, found)


class _Sums:
    """Sums of gradients over tiles, in the logits' dtype; None where not needed.

    With float16 the weight's gradient is summed divided by ``unit``, the largest factor: small values do not underflow.
    """

    def __init__(
        self, head: HeadBlock, rows: Rows, gradient: LogitGradient, needed: Sequence[bool], call: Call
    ) -> None:
        for_hidden, self.for_weight, for_bias, self.for_lora_a, for_lora_b = needed
        self.rows, self.gradient, self.call, self.lora_a = rows, gradient, call, head.lora_a
        self.factor = gradient.factor[:, None]
        self.unit = gradient.factor.abs().amax() if call.narrow == torch.float16 and len(self.factor) else None
        scale = self.factor if self.unit is None else self.factor / self.unit
        self.scaled = (rows.hidden * scale).to(call.narrow) if self.for_weight else None
        self.of_hidden = torch.zeros_like(rows.hidden, dtype=call.wide) if for_hidden else None
        self.of_bias = None if head.bias is None or not for_bias else torch.zeros_like(head.bias, dtype=call.wide)
        self.of_low = self.of_lora_b = None
        if rows.low is not None and head.lora_b is not None:
            self.of_low = torch.zeros_like(rows.low) if for_hidden or self.for_lora_a else None
            self.of_lora_b = torch.zeros_like(head.lora_b, dtype=call.wide) if for_lora_b else None

    def add(self, some: slice, first_column: int, block: HeadBlock, of_weight: Tensor | None) -> None:
        """Add one tile's gradients; that of the weight goes into ``of_weight``, which the first rows overwrite."""
        factor = self.factor[some]
        wide = self.of_bias is not None or self.of_lora_b is not None or self.of_low is not None
        u, narrow = self.gradient.of_tile(some, first_column, block, wide=wide)
        columns = slice(first_column, first_column + u.shape[1])
        if of_weight is not None and self.scaled is not None:
            _add_product(of_weight, narrow.T, self.scaled[some], beta=1 if some.start else 0)
        if self.of_hidden is not None:
            _add_product(self.of_hidden[some], narrow, block.weight)
        if self.of_bias is not None:
            self.of_bias[columns].addmv_(u.T, factor.squeeze(1))
        if self.of_lora_b is not None and self.rows.low is not None:
            self.of_lora_b[columns].addmm_(u.T, factor * self.rows.low[some])
        if self.of_low is not None and block.lora_b is not None:
            self.of_low[some].addmm_(u, block.lora_b)

    def of_hidden_and_lora_a(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients by hidden and lora_a, summed over all columns, including those of the group's other ranks."""
        call, of_hidden, of_lora_a = self.call, self.of_hidden, None
        if self.of_low is not None and self.lora_a is not None:
            if self.for_lora_a:
                of_lora_a = call.lora_scale * (self.factor * self.of_low).T @ self.rows.hidden.to(call.wide)
            if of_hidden is not None:
                of_hidden.addmm_(self.of_low, multiplied(self.lora_a, call), alpha=call.lora_scale)
        if of_hidden is not None:
            of_hidden *= self.factor
        if call.group is not None:
            for partial in (of_hidden, of_lora_a):
                if partial is not None:
                    vocab_parallel.summed(partial, call.group)
        return of_hidden, of_lora_a


def logits_of(z: Tensor, rows: Rows, call: Call) -> Tensor:
    """Turn a tile's product into its logits, in place."""
    if call.inside is not None:
        z.mul_(call.inside).tanh_()
    return z if rows.outside is None else z.mul_(rows.outside[:, None])


def logits_and_tanh(z: Tensor, rows: Rows, call: Call) -> tuple[Tensor, Tensor | None]:
    """``logits_of``; with a softcap in a new buffer, while the product becomes its tanh."""
    if call.inside is None:
        return logits_of(z, rows, call), None
    tanh = z.mul_(call.inside).tanh_()
    return tanh.clone() if rows.outside is None else tanh * rows.outside[:, None], tanh


def of_product(u: Tensor, tanh: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    """The gradient of a tile by its product, from that by the softcap's output; in the logits' dtype and narrow."""
    if tanh is not None:
        u.mul_(tanh.square_().neg_().add_(1))
    return u, u.to(call.narrow)


def anchor(z: Tensor, target: Tensor, *, masked: bool) -> tuple[Tensor, Tensor]:
    """Subtract each row's maximum from a tile of logits, in place, and remove its target from the sums.

    Args:
        z: [n, columns] logits; becomes ``z - top``, and FLOOR at the target.
        target: [n] index among the columns of the tile.
        masked: whether a bias may hold -inf.

    Returns:
        ``Partial.top`` and ``Partial.target_logit``.
    """
    # a tile may be all -inf (a shard of padding): its maximum must be finite too
    top = z.amax(1).clamp(min=torch.finfo(z.dtype).min)
    owned, column = owned_column(target, z.shape[1])
    target_logit = torch.where(owned, z.gather(1, column).squeeze(1), 0)
    z -= top[:, None]
    if masked:
        z.clamp_(min=FLOOR)
    write_target(z, target, torch.full_like(top, FLOOR))
    return top, target_logit


def product(rows: Rows, block: HeadBlock, call: Call, out: Tensor | None = None) -> Tensor:
    """hidden @ weight.T + low @ lora_b.T + bias of one tile, in the logits' dtype; written to ``out`` if given."""
    if call.narrow == call.wide:
        z = torch.mm(rows.hidden, block.weight.T, out=out)
    else:
        z = rows.hidden.new_empty(len(rows.hidden), len(block.weight), dtype=call.wide) if out is None else out
        torch.addmm(z, rows.hidden, block.weight.T, out_dtype=call.wide, beta=0, alpha=call.gain, out=z)
    if rows.low is not None and block.lora_b is not None:
        z.addmm_(rows.low, block.lora_b.T)
    return z if block.bias is None else z.add_(block.bias)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, beta: int = 1) -> None:
    """total = beta * total + a @ b, where total may be wider than a and b; with beta 0 it is not read."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=beta)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)


def owned_column(target: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Whether each row's target is in the tile, and its column [n, 1] (0 if it is not)."""
    owned = (target >= 0) & (target < columns)
    return owned, torch.where(owned, target, 0)[:, None]


def write_target(matrix: Tensor, target: Tensor, value: Tensor) -> None:
    """Set each row's target column to ``value``, if it is in the tile."""
    owned, column = owned_column(target, matrix.shape[1])
    matrix.scatter_(1, column, torch.where(owned, value, matrix.gather(1, column).squeeze(1))[:, None])


def slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _multiplied_in(hidden: Tensor) -> torch.dtype:
    """``Call.narrow``: the dtype of hidden if the device can multiply it into float32, else float32."""
    if hidden.dtype in (torch.float32, torch.float64) or _float32_output(hidden.device, hidden.dtype):
        return hidden.dtype
    return torch.float32


@functools.cache
def _float32_output(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch can multiply half-precision matrices into float32 on this device; warns if it cannot."""
    if device.type != "cuda":
        return False
    operand = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.mm(operand, operand, out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        logger.warning(
            "torch %s cannot multiply %s into float32 on %s (%s); the chunked head multiplies in float32, several "
            "times slower. Use a newer torch.",
            torch.__version__,
            dtype,
            device,
            error,
        )
        return False
    return True
