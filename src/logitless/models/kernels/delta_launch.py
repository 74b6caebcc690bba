"""The gated delta rule of Qwen3-Next and Qwen3.5: chunks for training and prefill, steps for decoding, the same bits.

    S <- exp(g) S;   S <- S + k (beta (v - k S))^T;   out = scale * q S

with queries and keys of length 1. ``delta_forward.py`` says how a row has the same bits in both forms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logitless.models.kernels import delta_backward as backward_kernels
from logitless.models.kernels import delta_forward as forward_kernels
from logitless.models.kernels.overlap import overlapping
from logitless.models.kernels.rows import as_rows, divided_up, power_of_two
from logitless.transfer import sent


class DeltaTile(NamedTuple):
    """Columns, warps and stages of a kernel's programs; results do not depend on them."""

    columns: int
    warps: int
    stages: int


class DeltaTiles(NamedTuple):
    """Tiles of the kernels; results do not depend on them."""

    scan: DeltaTile = DeltaTile(64, 4, 2)
    scan_again: DeltaTile = DeltaTile(64, 4, 2)
    solve: DeltaTile = DeltaTile(0, 4, 1)
    reverse: DeltaTile = DeltaTile(64, 4, 2)
    gradient: DeltaTile = DeltaTile(64, 8, 2)
    gradient_depth: int = 64
    step: DeltaTile = DeltaTile(128, 4, 1)
    advance: DeltaTile = DeltaTile(64, 4, 1)


SMALL = DeltaTiles(
    scan=DeltaTile(32, 4, 1), scan_again=DeltaTile(32, 4, 1), reverse=DeltaTile(32, 4, 1),
    gradient=DeltaTile(32, 8, 1), advance=DeltaTile(32, 4, 1),
)  # fmt: skip
"""Within 99 KiB of shared memory."""


def tiles_of(device: torch.device) -> DeltaTiles:
    """Tiles that fit a device; those of H100 and H200 take up to 132 KiB of shared memory.

    Example:
        >>> tiles_of(torch.device("cpu")).scan
        DeltaTile(columns=64, warps=4, stages=2)
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
        return SMALL
    return DeltaTiles()


class Segment(NamedTuple):
    """Consecutive positions of a sequence, from the start of a chunk on.

    Args:
        token: the row of its first position.
        start: that position, a multiple of C.
        stop: the position after its last.
        before: row of the state before it; -1: zeros.
        gradient: row of that state's gradient; -1: none.
        after: row for the state at the start of its unfinished chunk, or at its end; -1: none.
        following: the first of consecutive gradients of segments that begin with that state.
        num_following: their number.
        level: greater than that of the segment before it.
    """

    token: int
    start: int
    stop: int
    before: int = -1
    gradient: int = -1
    after: int = -1
    following: int = 0
    num_following: int = 0
    level: int = 0


@dataclass(frozen=True)
class Chunks:
    """Where the chunks of packed sequences lie. Build it with ``of`` or ``laid``.

    Args:
        segments: [S, 9] int32, the columns of ``delta_forward``.
        segment_of: [chunks] int32.
        orders: of segments of one level, the longest first.
        size: C.
        num_states: rows of states.
        num_gradients: rows of their gradients.
        every_row: whether each row of the pass is in a segment.
    """

    segments: Int[Tensor, "S 9"]
    segment_of: Int[Tensor, "chunks"]
    orders: tuple[Int[Tensor, "n"], ...]
    size: int
    num_states: int = 0
    num_gradients: int = 0
    every_row: bool = True

    @classmethod
    def laid(
        cls, segments: Sequence[Segment], size: int, device: torch.device | str, *, every_row: bool = True
    ) -> "Chunks":
        """Of these segments.

        Example:
            >>> Chunks.laid([Segment(0, 0, 16, after=0), Segment(16, 16, 20, before=0, level=1)], 16, "cpu").orders
            (tensor([0], dtype=torch.int32), tensor([1], dtype=torch.int32))
        """
        rows, owners = [], list[int]()
        for n, each in enumerate(segments):
            rows.append([*each[:3], len(owners), *each[3:8]])
            owners += [n] * (divided_up(each.stop, size) - each.start // size)
        longest_first = sorted(range(len(rows)), key=lambda n: segments[n].start - segments[n].stop)
        levels = range(1 + max(each.level for each in segments))
        orders = [[n for n in longest_first if segments[n].level == level] for level in levels]
        parts = [[x for row in rows for x in row], owners, *orders]
        # At multiples of 16 bytes, because kernels are compiled for an alignment.
        padded = [part + [0] * (-len(part) % 4) for part in parts]
        numbers = sent(torch.tensor([x for part in padded for x in part], dtype=torch.int32), device)
        places = numbers.split([len(part) for part in padded])  # type: ignore[no-untyped-call]
        table, segment_of, *split = (place[: len(part)] for place, part in zip(places, parts, strict=True))
        return cls(
            table.view(len(rows), -1), segment_of, tuple(split), size,
            1 + max(max(each.before, each.after) for each in segments),
            1 + max(each.gradient for each in segments), every_row,
        )  # fmt: skip

    @classmethod
    def of(
        cls, lengths: Sequence[int], size: int = 64, device: torch.device | str = "cpu",
        slots: Sequence[int] | None = None,
    ) -> "Chunks":  # fmt: skip
        """Of sequences that lie end to end; ``slots`` are their rows of a cache.

        Example:
            >>> Chunks.of([3, 20], size=16).segments[:, :4].tolist()
            [[0, 0, 3, 0], [3, 0, 20, 1]]
        """
        starts = accumulate(lengths, initial=0)
        after = [-1] * len(lengths) if slots is None else slots
        return cls.laid(
            [Segment(s, 0, n, after=a) for s, n, a in zip(starts, lengths, after, strict=False)], size, device
        )

    @property
    def count(self) -> int:
        """Chunks."""
        return self.segment_of.shape[0]


class DeltaCache(NamedTuple):
    """By slot, what continues a sequence: the state before its unfinished chunk, and that chunk's rows.

    Args:
        high: [S, HV, K, V] state as an operand (float32: itself).
        low: [S, HV, K, V] int16 its other half; None in float32.
        keys: [S, C, H, K].
        total: [S, HV, C] float32.
        betas: [S, HV, C] float32.
        inverse: [S, HV, C, 16] float32.
        solve: [S, HV, C, C].
        rest: [S, HV, C, V].
    """

    high: Tensor
    low: Tensor | None
    keys: Tensor
    total: Tensor
    betas: Tensor
    inverse: Tensor
    solve: Tensor
    rest: Tensor

    @classmethod
    def empty(
        cls, slots: int, key_heads: int, heads: int, key_width: int, width: int, *,
        size: int = 64, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu",
    ) -> "DeltaCache":  # fmt: skip
        """Of sequences without tokens: states are 0."""
        fields: Any = (
            None if field is None else torch.zeros(slots, *field[0], dtype=field[1], device=device)
            for field in cls.fields(key_heads, heads, key_width, width, size=size, dtype=dtype)
        )
        return cls(*fields)

    @staticmethod
    def fields(
        key_heads: int, heads: int, key_width: int, width: int, *, size: int, dtype: torch.dtype
    ) -> tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]:
        """Shape and dtype of a slot of each field.

        Example:
            >>> DeltaCache.fields(1, 2, 16, 32, size=64, dtype=torch.bfloat16)[2]
            ((64, 1, 16), torch.bfloat16)
        """
        state, float32 = (heads, key_width, width), torch.float32
        return (
            (state, dtype),
            None if dtype == float32 else (state, torch.int16),
            ((size, key_heads, key_width), dtype),
            ((heads, size), float32),
            ((heads, size), float32),
            ((heads, size, _BLOCK), float32),
            ((heads, size, size), dtype),
            ((heads, size, width), dtype),
        )

    @property
    def size(self) -> int:
        """C."""
        return self.keys.shape[1]


class Shape(NamedTuple):
    """Key heads, value heads and their widths."""

    key_heads: int
    heads: int
    key_width: int
    width: int

    @classmethod
    def of(cls, query: Tensor, value: Tensor) -> "Shape":
        """For query [T, H, K] and value [T, HV, V]."""
        return cls(query.shape[1], value.shape[1], query.shape[2], value.shape[2])

    @property
    def state(self) -> tuple[int, int, int]:
        """Of a sequence."""
        return self.heads, self.key_width, self.width

    @property
    def constants(self) -> dict[str, int]:
        """Of kernels."""
        return {"H": self.key_heads, "HV": self.heads, "K": self.key_width, "V": self.width}

    @property
    def scale(self) -> float:
        """Of queries."""
        return float(self.key_width**-0.5)


_BLOCK = forward_kernels.BLOCK.value
_UNIT_ROWS, _UNIT_WARPS = 8, 2  # equal in both forms: the order of a row's sum depends on them


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def unit_rows(
    query: Tensor, key: Tensor, keys: Tensor | None = None, place: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Queries and keys [T, H, K] of length 1; keys go to ``keys[place]`` if given."""
    rows, heads, width = query.shape
    unit_query = torch.empty(rows, heads, width, dtype=query.dtype, device=query.device)
    unit_key = torch.empty_like(unit_query) if keys is None else keys
    forward_kernels.unit_kernel[(divided_up(rows * heads, _UNIT_ROWS), 2)](
        query, key, unit_query, unit_key, place, rows * heads, query.stride(0), key.stride(0),
        H=heads, K=width, ROWS=_UNIT_ROWS, num_warps=_UNIT_WARPS, **overlapping(query.device),
    )  # fmt: skip
    return unit_query, unit_key


class Inner(NamedTuple):
    """What the chunks of a forward pass have in common with its backward."""

    unit_query: Tensor
    unit_key: Tensor
    total: Tensor
    solve: Tensor
    mix: Tensor


def decay_sums(log_decay: Tensor, heads: int, chunks: Chunks) -> Tensor:
    """G [chunks, HV, C] float32, in powers of two."""
    total = torch.empty(chunks.count, heads, chunks.size, dtype=torch.float32, device=log_decay.device)
    forward_kernels.decay_kernel[(chunks.count,)](
        log_decay, total, chunks.segments, chunks.segment_of, HV=heads, HEADS=power_of_two(heads), C=chunks.size,
        num_warps=1,
    )  # fmt: skip
    return total


def block_inverses(unit_key: Tensor, beta: Tensor, total: Tensor, chunks: Chunks) -> Tensor:
    """[chunks, HV, C, 16] float32: the inverse of ``I + A`` in each block of 16 rows and columns."""
    (_, key_heads, key_width), (count, heads, size) = unit_key.shape, total.shape
    inverse = torch.empty(count, heads, size, _BLOCK, dtype=torch.float32, device=total.device)
    forward_kernels.inverse_kernel[(count * (size // _BLOCK), heads)](
        unit_key, beta, total, chunks.segments, chunks.segment_of, inverse,
        H=key_heads, HV=heads, K=key_width, C=size, PRECISION=_precision(unit_key.dtype), num_warps=1,
    )  # fmt: skip
    return inverse


def solved(
    unit_query: Tensor, unit_key: Tensor, beta: Tensor, total: Tensor, inverse: Tensor, chunks: Chunks, tile: DeltaTile
) -> tuple[Tensor, Tensor]:
    """T and M [chunks, HV, C, C]."""
    (_, key_heads, key_width), (count, heads, size) = unit_key.shape, total.shape
    solve = torch.empty(count, heads, size, size, dtype=unit_key.dtype, device=total.device)
    mix = torch.empty_like(solve)
    forward_kernels.solve_kernel[(count, heads)](
        unit_query, unit_key, beta, total, chunks.segments, chunks.segment_of, inverse, solve, mix,
        H=key_heads, HV=heads, K=key_width, C=size, PRECISION=_precision(unit_key.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return solve, mix


def inner(
    query: Tensor, key: Tensor, log_decay: Tensor, beta: Tensor, heads: int, chunks: Chunks, tiles: DeltaTiles
) -> tuple[Inner, Tensor]:
    """Everything inside chunks that does not depend on values and states; and ``block_inverses``."""
    unit_query, unit_key = unit_rows(query, key)
    total = decay_sums(log_decay, heads, chunks)
    inverse = block_inverses(unit_key, beta, total, chunks)
    solve, mix = solved(unit_query, unit_key, beta, total, inverse, chunks, tiles.solve)
    return Inner(unit_query, unit_key, total, solve, mix), inverse


def scan(
    made: Inner, value: Tensor, beta: Tensor, chunks: Chunks, tile: DeltaTile, *,
    out: Tensor | None = None, states: Tensor | None = None, deltas: Tensor | None = None,
    cache: DeltaCache | None = None,
) -> None:  # fmt: skip
    """Walk over the chunks and write what is given; states between segments are in the cache, if there is one."""
    shape, wide = Shape.of(made.unit_query, value), value.dtype == torch.float32
    high, low, rest = (None, None, None) if cache is None else (cache.high, cache.low, cache.rest)
    if cache is None and chunks.num_states:
        high = value.new_empty(chunks.num_states, *shape.state)
        low = None if wide else torch.empty_like(high, dtype=torch.int16)
    columns = min(tile.columns, shape.width)
    for order in chunks.orders:
        forward_kernels.scan_kernel[(shape.heads * (shape.width // columns), len(order))](
            made.unit_query, made.unit_key, value, beta, made.total, chunks.segments, order, made.solve, made.mix,
            out, states, deltas, high, low, rest, value.stride(0), shape.scale,
            **shape.constants, C=chunks.size, BV=columns, WIDE=wide,
            PRECISION=_precision(value.dtype), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def forward(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, chunks: Chunks, tiles: DeltaTiles, *,
    cache: DeltaCache | None = None,
) -> tuple[Tensor, Inner]:  # fmt: skip
    """Output [T, HV, V], and what the backward reads.

    Args:
        cache: continues sequences from its slots and keeps there what continues them further.
    """
    query, key, value = as_rows(query), as_rows(key), as_rows(value)
    made, inverse = inner(query, key, log_decay, beta, value.shape[1], chunks, tiles)
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    scan(made, value, beta, chunks, tiles.scan, out=out, cache=cache)
    if cache is not None:
        _keep_rows(made, inverse, beta, chunks, cache)
    return out, made


def _keep_rows(made: Inner, inverse: Tensor, beta: Tensor, chunks: Chunks, cache: DeltaCache) -> None:
    """Store the rows of each segment's unfinished chunk, but R, which the scan stores."""
    size = chunks.size
    first, start, stop, first_chunk, _, _, slot, *_ = chunks.segments.long().unbind(1)
    num_rows = stop % size
    # the unfinished chunk; of a sequence without one, any
    last = (first_chunk + stop // size - start // size).clamp_max(chunks.count - 1)
    row = torch.arange(size, device=beta.device)
    token = (first + stop - num_rows - start)[:, None] + row
    token = torch.where(row < num_rows[:, None], token, 0)
    cache.keys[slot] = made.unit_key[token]
    cache.total[slot] = made.total[last]
    cache.betas[slot] = beta[token].transpose(1, 2).float()
    cache.inverse[slot] = inverse[last]
    cache.solve[slot] = made.solve[last]


def reversed_scan(
    made: Inner, grad_out: Tensor, beta: Tensor, chunks: Chunks, tile: DeltaTile
) -> tuple[Tensor, Tensor]:
    """Gradients of the states after each chunk [chunks, HV, K, V], and of R [T, HV, V]."""
    shape = Shape.of(made.unit_query, grad_out)
    grad_states = grad_out.new_empty(chunks.count, *shape.state)
    grad_rows = torch.empty_like(grad_out)
    before = None
    if chunks.num_gradients:
        before = torch.empty(chunks.num_gradients, *shape.state, dtype=torch.float32, device=grad_out.device)
    columns = min(tile.columns, shape.width)
    for order in chunks.orders[::-1]:
        backward_kernels.reverse_kernel[(shape.heads * (shape.width // columns), len(order))](
            made.unit_query, made.unit_key, grad_out, beta, made.total, chunks.segments, order, made.solve, made.mix,
            grad_states, grad_rows, before, shape.scale, **shape.constants, C=chunks.size, BV=columns,
            PRECISION=_precision(grad_out.dtype), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return grad_states, grad_rows


class InChunks(NamedTuple):
    """Gradients that ``chunk_gradients`` finds.

    Args:
        unit_query, unit_key: [T, HV, K], for each value head.
        value: [T, HV, V].
        total, beta: [parts, chunks, HV, C] float32: of G and beta, to be summed.
    """

    unit_query: Tensor
    unit_key: Tensor
    value: Tensor
    total: Tensor
    beta: Tensor


def chunk_gradients(
    made: Inner, value: Tensor, beta: Tensor, grad_out: Tensor, states: Tensor, deltas: Tensor, grad_states: Tensor,
    grad_rows: Tensor, chunks: Chunks, tile: DeltaTile, depth: int,
) -> InChunks:  # fmt: skip
    """Gradients inside chunks, by the states and their gradients."""
    shape, rows = Shape.of(made.unit_query, value), value.shape[0]
    depth = min(depth, shape.key_width)
    parts = shape.key_width // depth
    # Of more columns than keys, in one round of the kernel's loop, Triton 3.6 addresses memory that is not there.
    columns = min(tile.columns, shape.width, depth)
    new = value.new_empty if chunks.every_row else value.new_zeros
    grads = InChunks(
        *(new(rows, shape.heads, width) for width in (shape.key_width, shape.key_width, shape.width)),
        *(made.total.new_empty(parts, *made.total.shape) for _ in range(2)),
    )
    backward_kernels.gradient_kernel[(shape.heads * parts, chunks.count)](
        made.unit_query, made.unit_key, value, beta, made.total, chunks.segments, chunks.segment_of, states,
        grad_states, deltas, grad_out, grad_rows, *grads, value.stride(0), shape.scale, chunks.count,
        **shape.constants, C=chunks.size, BK=depth, BV=columns,
        PRECISION=_precision(value.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return grads


def backward(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, made: Inner, grad_out: Tensor, chunks: Chunks,
    tiles: DeltaTiles,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key, value, log-decay and beta."""
    query, key, value, grad_out = as_rows(query), as_rows(key), as_rows(value), grad_out.contiguous()
    shape, rows = Shape.of(query, value), value.shape[0]
    states = value.new_empty(chunks.count, *shape.state)
    deltas = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    scan(made, value, beta, chunks, tiles.scan_again, states=states, deltas=deltas)
    grad_states, grad_rows = reversed_scan(made, grad_out, beta, chunks, tiles.reverse)
    inside = chunk_gradients(
        made, value, beta, grad_out, states, deltas, grad_states, grad_rows, chunks, tiles.gradient,
        tiles.gradient_depth,
    )  # fmt: skip
    new = torch.empty if chunks.every_row else torch.zeros
    grad_decay, grad_beta = (
        new(rows, shape.heads, dtype=kind, device=beta.device) for kind in (torch.float32, beta.dtype)
    )
    backward_kernels.decay_backward_kernel[(chunks.count,)](
        inside.total, inside.beta, grad_decay, grad_beta, chunks.segments, chunks.segment_of, inside.total.stride(0),
        PARTS=inside.total.shape[0], HV=shape.heads, HEADS=power_of_two(shape.heads), C=chunks.size, num_warps=1,
    )  # fmt: skip
    grad_query, grad_key = (torch.empty(query.shape, dtype=query.dtype, device=query.device) for _ in range(2))
    backward_kernels.unit_backward_kernel[(divided_up(rows * shape.key_heads, _UNIT_ROWS), 2)](
        query, key, inside.unit_query, inside.unit_key, grad_query, grad_key, rows * shape.key_heads, query.stride(0),
        key.stride(0), H=shape.key_heads, GROUP=shape.heads // shape.key_heads, K=shape.key_width, ROWS=_UNIT_ROWS,
        num_warps=_UNIT_WARPS,
    )  # fmt: skip
    return grad_query, grad_key, inside.value, grad_decay, grad_beta


def delta_step(
    query: Float[Tensor, "R H K"], key: Float[Tensor, "R H K"], value: Float[Tensor, "R HV V"],
    log_decay: Float[Tensor, "R HV"], beta: Float[Tensor, "R HV"], cache: DeltaCache,
    slot: Int[Tensor, "R"], index: Int[Tensor, "R"], place: Int[Tensor, "R"], tiles: DeltaTiles | None = None,
) -> Float[Tensor, "R HV V"]:  # fmt: skip
    """One token of each of R sequences: the row that ``forward`` computes for it, in every bit.

    Args:
        query, key, value, log_decay, beta: as of ``forward``.
        cache: read and written.
        slot: int32 of each sequence; -1: no token.
        index: int32, the token's position modulo C.
        place: int32, ``slot * C + index``; -1: no token.
    """
    tiles = tiles or tiles_of(value.device)
    query, key, value = as_rows(query), as_rows(key), as_rows(value)
    shape, size, rows = Shape.of(query, value), cache.size, query.shape[0]
    precision, overlap = _precision(value.dtype), overlapping(value.device)
    unit_query, _ = unit_rows(query, key, cache.keys, place)
    out = torch.empty(rows, shape.heads, shape.width, dtype=value.dtype, device=value.device)
    forward_kernels.step_kernel[(rows, shape.heads)](
        unit_query, value, log_decay, beta, slot, index, cache.keys, cache.total, cache.betas, cache.inverse,
        cache.solve, cache.rest, cache.high, out, value.stride(0), shape.scale,
        **shape.constants, C=size, BV=min(tiles.step.columns, shape.width), PRECISION=precision,
        num_warps=tiles.step.warps, num_stages=tiles.step.stages, **overlap,
    )  # fmt: skip
    together = next(n for n in (4, 2, 1) if shape.heads % n == 0)
    forward_kernels.advance_kernel[(rows, shape.heads // together)](
        slot, index, cache.keys, cache.total, cache.solve, cache.rest, cache.high, cache.low,
        **shape.constants, C=size, BV=min(tiles.advance.columns, shape.width), HEADS=together,
        WIDE=value.dtype == torch.float32, PRECISION=precision,
        num_warps=tiles.advance.warps, num_stages=tiles.advance.stages, **overlap,
    )  # fmt: skip
    return out
