"""The gated delta rule of Qwen3-Next and Qwen3.5: chunks for training and prefill, steps for decoding, the same bits.

    S <- exp(g) S;   S <- S + k (beta (v - k S))^T;   out = scale * q S

with queries and keys of length 1. ``forward.py`` says how a row has the same bits in both forms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from delta_net import backward as backward_kernels
from delta_net import forward as forward_kernels
from logitless.models.kernels.overlap import overlapping
from logitless.models.kernels.rows import divided_up, power_of_two


class DeltaTile(NamedTuple):
    """Columns, warps and stages of a kernel's programs; results do not depend on them."""

    columns: int
    warps: int
    stages: int


class DeltaTiles(NamedTuple):
    """Tiles of the kernels; results do not depend on them. With ``output``, outputs are a kernel of their own."""

    scan: DeltaTile = DeltaTile(64, 4, 2)
    scan_again: DeltaTile = DeltaTile(64, 4, 2)
    solve: DeltaTile = DeltaTile(0, 4, 1)
    output: DeltaTile | None = None
    reverse: DeltaTile = DeltaTile(64, 4, 2)
    gradient: DeltaTile = DeltaTile(64, 8, 2)
    gradient_depth: int = 64
    step: DeltaTile = DeltaTile(128, 4, 1)
    step_early: bool = False
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


@dataclass(frozen=True)
class Chunks:
    """Where the chunks of packed sequences lie.

    Args:
        segments: [S, 4] int32: first token, first position, end, first chunk.
        segment_of: [chunks] int32.
        order: [S] int32, the longest first.
        size: C.
    """

    segments: Int[Tensor, "S 4"]
    segment_of: Int[Tensor, "chunks"]
    order: Int[Tensor, "S"]
    size: int

    @classmethod
    def of(cls, lengths: Sequence[int], size: int = 64, device: torch.device | str = "cpu") -> "Chunks":
        """Of sequences that lie end to end.

        Example:
            >>> Chunks.of([3, 20], size=16).segments.tolist()
            [[0, 0, 3, 0], [3, 0, 20, 1]]
        """
        rows: list[list[int]] = []
        owners: list[int] = []
        token = 0
        for n, length in enumerate(lengths):
            rows.append([token, 0, length, len(owners)])
            owners += [n] * divided_up(length, size)
            token += length
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        segments, segment_of, longest_first = (
            torch.tensor(part, dtype=torch.int32).to(device) for part in (rows, owners, order)
        )
        return cls(segments, segment_of, longest_first, size)

    @property
    def count(self) -> int:
        """Chunks."""
        return self.segment_of.shape[0]


class Ends(NamedTuple):
    """What continues packed sequences: the state before each one's unfinished chunk, and that chunk's rows.

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


class DeltaCache(Ends):
    """``Ends`` by slot, which decoding steps read and write."""

    @classmethod
    def empty(
        cls, slots: int, key_heads: int, heads: int, key_width: int, width: int, *,
        size: int = 64, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu",
    ) -> "DeltaCache":  # fmt: skip
        """Of sequences without tokens: states are 0."""
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        wide = dtype == torch.float32
        return cls(
            high=torch.zeros(slots, heads, key_width, width, **options),
            low=None if wide else torch.zeros(slots, heads, key_width, width, dtype=torch.int16, device=device),
            keys=torch.zeros(slots, size, key_heads, key_width, **options),
            total=torch.zeros(slots, heads, size, dtype=torch.float32, device=device),
            betas=torch.zeros(slots, heads, size, dtype=torch.float32, device=device),
            inverse=torch.zeros(slots, heads, size, _BLOCK, dtype=torch.float32, device=device),
            solve=torch.zeros(slots, heads, size, size, **options),
            rest=torch.zeros(slots, heads, size, width, **options),
        )

    def put(self, slots: Int[Tensor, "S"], ends: Ends) -> None:
        """Store the ends of sequences in slots."""
        for mine, theirs in zip(self, ends, strict=True):
            if mine is not None and theirs is not None:
                mine[slots.long()] = theirs

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


def as_rows(x: Tensor) -> Tensor:
    """x [T, heads, width] with heads side by side."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


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
    inverse: Tensor
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
) -> Inner:
    """Everything inside chunks that does not depend on values and states."""
    unit_query, unit_key = unit_rows(query, key)
    total = decay_sums(log_decay, heads, chunks)
    inverse = block_inverses(unit_key, beta, total, chunks)
    return Inner(
        unit_query, unit_key, total, inverse,
        *solved(unit_query, unit_key, beta, total, inverse, chunks, tiles.solve),
    )  # fmt: skip


def scan(
    made: Inner, value: Tensor, beta: Tensor, chunks: Chunks, tile: DeltaTile, *,
    out: Tensor | None = None, states: Tensor | None = None, deltas: Tensor | None = None,
    ends: tuple[Tensor, Tensor | None, Tensor] | None = None,
    all_rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Walk over the chunks and write what is given."""
    shape = Shape.of(made.unit_query, value)
    high, low, rest = ends or (None, None, None)
    columns = min(tile.columns, shape.width)
    grid = (shape.heads * (shape.width // columns), chunks.segments.shape[0])
    forward_kernels.scan_kernel[grid](
        made.unit_query, made.unit_key, value, beta, made.total, chunks.segments, chunks.order, made.solve, made.mix,
        out, states, deltas, all_rows, high, low, rest, value.stride(0), shape.scale,
        **shape.constants, C=chunks.size, BV=columns, WIDE=value.dtype == torch.float32,
        PRECISION=_precision(value.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def forward(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, chunks: Chunks, tiles: DeltaTiles, *,
    with_ends: bool = False,
) -> tuple[Tensor, Inner, Ends | None]:  # fmt: skip
    """Output [T, HV, V], what the backward reads, and what continues each sequence."""
    query, key, value = as_rows(query), as_rows(key), as_rows(value)
    shape, size = Shape.of(query, value), chunks.size
    made = inner(query, key, log_decay, beta, shape.heads, chunks, tiles)
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if not with_ends:
        if tiles.output is None:
            scan(made, value, beta, chunks, tiles.scan, out=out)
            return out, made, None
        states = value.new_empty(chunks.count, shape.heads, shape.key_width, shape.width)
        scan(made, value, beta, chunks, tiles.scan, states=states, all_rows=out)
        return outputs(made, states, out, chunks, tiles.output), made, None
    count = chunks.segments.shape[0]
    empty = DeltaCache.empty(count, *shape, size=size, dtype=value.dtype, device=value.device)
    scan(made, value, beta, chunks, tiles.scan, out=out, ends=(empty.high, empty.low, empty.rest))
    first, start, stop, first_chunk = chunks.segments.long().unbind(1)
    num_rows = stop % size
    last = first_chunk + stop // size  # the unfinished chunk; of a sequence without one, any
    last = last.clamp_max(chunks.count - 1)
    row = torch.arange(size, device=value.device)
    token = (first + stop - num_rows - start)[:, None] + row
    token = torch.where(row < num_rows[:, None], token, 0)
    ends = Ends(
        empty.high,
        empty.low,
        made.unit_key[token],
        made.total[last],
        beta[token].transpose(1, 2).float(),
        made.inverse[last],
        made.solve[last],
        empty.rest,
    )
    return out, made, ends


def outputs(made: Inner, states: Tensor, all_rows: Tensor, chunks: Chunks, tile: DeltaTile) -> Tensor:
    """Outputs by stored states and R: a kernel that is parallel over chunks."""
    shape, out = Shape.of(made.unit_query, all_rows), torch.empty_like(all_rows)
    columns = min(tile.columns, shape.width)
    forward_kernels.output_kernel[(shape.heads * (shape.width // columns), chunks.count)](
        made.unit_query, made.total, chunks.segments, chunks.segment_of, made.mix, states, all_rows, out, shape.scale,
        **shape.constants, C=chunks.size, BV=columns, PRECISION=_precision(out.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def reversed_scan(
    made: Inner, grad_out: Tensor, beta: Tensor, chunks: Chunks, tile: DeltaTile
) -> tuple[Tensor, Tensor]:
    """Gradients of the states after each chunk [chunks, HV, K, V], and of R [T, HV, V]."""
    shape = Shape.of(made.unit_query, grad_out)
    grad_states = grad_out.new_empty(chunks.count, shape.heads, shape.key_width, shape.width)
    grad_rows = torch.empty_like(grad_out)
    columns = min(tile.columns, shape.width)
    backward_kernels.reverse_kernel[(shape.heads * (shape.width // columns), chunks.segments.shape[0])](
        made.unit_query, made.unit_key, grad_out, beta, made.total, chunks.segments, chunks.order, made.solve, made.mix,
        grad_states, grad_rows, shape.scale, **shape.constants, C=chunks.size, BV=columns,
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
    grads = InChunks(
        *(value.new_empty(rows, shape.heads, width) for width in (shape.key_width, shape.key_width, shape.width)),
        *(made.total.new_empty(parts, *made.total.shape) for _ in range(2)),
    )
    backward_kernels.gradient_kernel[(shape.heads * parts, chunks.count)](
        made.unit_query, made.unit_key, value, beta, made.total, chunks.segments, chunks.segment_of, states,
        grad_states, deltas, grad_out, grad_rows, *grads, value.stride(0), shape.scale, chunks.count,
        **shape.constants, C=chunks.size, BK=depth, BV=min(tile.columns, shape.width),
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
    states = value.new_empty(chunks.count, shape.heads, shape.key_width, shape.width)
    deltas = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    scan(made, value, beta, chunks, tiles.scan_again, states=states, deltas=deltas)
    grad_states, grad_rows = reversed_scan(made, grad_out, beta, chunks, tiles.reverse)
    inside = chunk_gradients(
        made, value, beta, grad_out, states, deltas, grad_states, grad_rows, chunks, tiles.gradient,
        tiles.gradient_depth,
    )  # fmt: skip
    grad_decay, grad_beta = made.total.new_empty(rows, shape.heads), torch.empty_like(beta)
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


class _Delta(torch.autograd.Function):
    """The rule with its backward; T and M are kept, states are recomputed."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, chunks: Chunks,
        tiles: DeltaTiles,
    ) -> Tensor:  # fmt: skip
        out, made, _ = forward(query, key, value, log_decay, beta, chunks, tiles)
        ctx.save_for_backward(query, key, value, beta, *made)
        ctx.chunks, ctx.tiles = chunks, tiles
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, beta, *made = ctx.saved_tensors
        grads = backward(query, key, value, beta, Inner(*made), grad_out, ctx.chunks, ctx.tiles)
        return *grads, None, None


def delta_rule(
    query: Float[Tensor, "T H K"], key: Float[Tensor, "T H K"], value: Float[Tensor, "T HV V"],
    log_decay: Float[Tensor, "T HV"], beta: Float[Tensor, "T HV"], chunks: Chunks, tiles: DeltaTiles | None = None,
) -> Float[Tensor, "T HV V"]:  # fmt: skip
    """The rule over packed sequences, differentiable.

    Args:
        query, key: bfloat16 or float32, normalised inside; HV is a multiple of H.
        value: in the same dtype.
        log_decay: float32, nats, at most 0.
        beta: in (0, 1).
        chunks: of the sequences; widths are powers of two from 16 on.

    Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks.
    """
    out: Tensor = _Delta.apply(  # type: ignore[no-untyped-call]
        query, key, value, log_decay, beta, chunks, tiles or tiles_of(value.device)
    )
    return out


def delta_step(
    query: Float[Tensor, "R H K"], key: Float[Tensor, "R H K"], value: Float[Tensor, "R HV V"],
    log_decay: Float[Tensor, "R HV"], beta: Float[Tensor, "R HV"], cache: DeltaCache,
    slot: Int[Tensor, "R"], index: Int[Tensor, "R"], place: Int[Tensor, "R"], tiles: DeltaTiles | None = None,
) -> Float[Tensor, "R HV V"]:  # fmt: skip
    """One token of each of R sequences: the row that ``delta_rule`` computes for it, in every bit.

    Args:
        query, key, value, log_decay, beta: as of ``delta_rule``.
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
        **shape.constants, C=size, BV=shape.width if tiles.step_early else min(tiles.step.columns, shape.width),
        EARLY=tiles.step_early, PRECISION=precision,
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
