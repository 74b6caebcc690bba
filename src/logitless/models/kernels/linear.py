"""Matrix products with a fixed order of summation, for every tile and number of rows.

    out[m, n] = sum_k rows[m, k] * weight[n, k]  (+ bias[n])  (then addend[m, n] + scale * that)

A program goes through K from start to end with one float32 accumulator for each output; K is never split. On NVIDIA's
tensor cores the sum is then bitwise the same for every tile, for ``mma`` and ``wgmma``, and with operands swapped: the
hardware's unit is a step of depth 16, and every tile is made of the same steps in the same order. That is an
observation, not guaranteed by the vendor, so a tile is used only if ``self_check`` has compared it.

Two ways to load: TMA descriptors (Hopper and later), or plain masked tiles of less than 99 KiB of shared memory (any
GPU from capability 8.0).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.models.kernels.gate import activation
from logitless.models.kernels.overlap import after_inputs, ask_for_rows, overlapping
from logitless.models.kernels.rows import divided_up, empty_rows, power_of_two
from logitless.quick_launch import descriptor, quick_launch


@dataclass(frozen=True)
class Tile:
    """Tile of a program; the result does not depend on it.

    Args:
        rows, columns: block of the output.
        depth: part of K that is loaded at a time.
        warps, stages: of the program, and of its pipeline of loads.
        swapped: multiply ``weight @ rows.T``, to fill the 64 rows of a ``wgmma`` with the weight's if the batch has
            fewer.
        tma: load through TMA descriptors.

    Example:
        >>> Tile(rows=16, columns=64, depth=128, warps=4, stages=6, swapped=True, tma=True).depth
        128
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swapped: bool = False
    tma: bool = False


INTERPRETED = Tile(rows=32, columns=64, depth=64, warps=1, stages=1)
REFERENCE = Tile(rows=128, columns=128, depth=64, warps=8, stages=3)
"""The tile that other kernels are compared with on GPUs; plain loads, 96 KiB."""
_GROUP = 8  # row tiles processed together, so that the weight's tiles stay in L2


@triton.jit
def across(row, column, SWAPPED: tl.constexpr):
    """Row and column indices of a tile, broadcastable; a swapped tile has columns first."""
    if SWAPPED:
        row_of = row[None, :]
        column_of = column[:, None]
    else:
        row_of = row[:, None]
        column_of = column[None, :]
    return row_of, column_of


@quick_launch
@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    rows,  # [M, K] a row ``row_stride`` after the other, or its TMA descriptor
    weight,  # [N, K] contiguous, or its TMA descriptor
    ahead,  # the weight again, to be prefetched before the inputs are ready; or None
    bias,  # [N] or None
    addend,  # [M, N] a row ``out_stride`` after the other, or None
    out,  # [M, N] likewise; may be ``addend`` itself
    scale,  # of the product, with an addend
    num_rows,  # M
    num_columns,  # N
    length,  # K
    row_stride, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SWAPPED: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,  # whether DEPTH divides K
    PIECES: tl.constexpr,  # of a row of the weight, for prefetching
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of the output."""
    tile = tl.program_id(0)
    num_m = tl.cdiv(num_rows, ROWS)
    num_n = tl.cdiv(num_columns, COLUMNS)
    first = (tile // (GROUP * num_n)) * GROUP
    size = tl.minimum(num_m - first, GROUP)
    inside = tile % (GROUP * num_n)
    row_start = (first + inside % size) * ROWS
    column_start = (inside // size) * COLUMNS
    if ahead is not None:
        ask_for_rows(ahead, column_start, num_columns, length, COLUMNS, PIECES)
    after_inputs(OVERLAP)
    row = row_start + tl.arange(0, ROWS)
    column = column_start + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    if not TMA:  # rows beyond the last read other rows, and are not stored
        row_at = rows + (row % num_rows)[:, None].to(tl.int64) * row_stride + depth[None, :]
        weight_at = weight + (column % num_columns)[:, None].to(tl.int64) * length + depth[None, :]
    acc = tl.zeros((COLUMNS, ROWS) if SWAPPED else (ROWS, COLUMNS), tl.float32)
    for step in range(tl.cdiv(length, DEPTH)):
        if TMA:
            x = rows.load([row_start, step * DEPTH])
            w = weight.load([column_start, step * DEPTH])
        elif EVEN:
            x = tl.load(row_at)
            w = tl.load(weight_at)
            row_at += DEPTH
            weight_at += DEPTH
        else:
            inside_row = depth[None, :] < length - step * DEPTH
            x = tl.load(row_at, mask=inside_row, other=0.0)
            w = tl.load(weight_at, mask=inside_row, other=0.0)
            row_at += DEPTH
            weight_at += DEPTH
        acc = tl.dot(w, x.T, acc, input_precision="ieee") if SWAPPED else tl.dot(x, w.T, acc, input_precision="ieee")
    row_of, column_of = across(row, column, SWAPPED)
    stored = (row_of < num_rows) & (column_of < num_columns)
    if bias is not None:
        acc += tl.load(bias + column_of, mask=column_of < num_columns, other=0.0).to(tl.float32)
    if addend is not None:
        before = tl.load(addend + row_of.to(tl.int64) * out_stride + column_of, mask=stored, other=0.0)
        acc = tl.fma(acc, scale, before.to(tl.float32))
    tl.store(out + row_of.to(tl.int64) * out_stride + column_of, acc.to(out.dtype.element_ty), mask=stored)


def fixed_order_product(
    rows: Tensor,
    weight: Tensor,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    add_to_out: float | None = None,
    dtype: torch.dtype | None = None,
    ahead: bool | None = None,
) -> Tensor:
    """``rows @ weight.T + bias``, or ``out += add_to_out * (rows @ weight.T)`` in float32 before one rounding.

    Args:
        rows: [M, K], the last dimension contiguous.
        weight: [N, K] contiguous, in the dtype of ``rows``.
        tile: for TMA, K of both and the row stride must be multiples of 16 bytes.
        bias: [N].
        out: [M, N] with contiguous rows; None: a new tensor.
        add_to_out: factor of the product, which is then added to ``out``.
        dtype: of a new ``out``; default that of ``rows``.
        ahead: prefetch the weight while the previous kernel still runs; None: if that helps (``asks_ahead``).

    Returns:
        ``out``.
    """
    (num_rows, length), num_columns = rows.shape, weight.shape[0]
    if out is None:
        out = empty_rows(num_rows, num_columns, like=rows, dtype=dtype)
    x, w = rows, weight
    if tile.tma:
        x, w = descriptor(rows, [tile.rows, tile.depth]), descriptor(weight, [tile.columns, tile.depth])
    grid = (divided_up(num_rows, tile.rows) * divided_up(num_columns, tile.columns),)
    overlap = overlapping(rows.device)
    asks = overlap["OVERLAP"] and (asks_ahead(tile, num_columns, length, weight.itemsize) if ahead is None else ahead)
    product_kernel[grid](
        x, w, weight if asks else None, bias, None if add_to_out is None else out, out,
        1.0 if add_to_out is None else add_to_out, num_rows, num_columns, length, rows.stride(0), out.stride(0),
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=_GROUP, SWAPPED=tile.swapped, TMA=tile.tma,
        EVEN=length % tile.depth == 0, PIECES=_pieces(tile) if asks else 1,
        num_warps=tile.warps, num_stages=tile.stages, **overlap,
    )  # fmt: skip
    return out


_FITS = 24 * 2**20
"""The largest weight that is prefetched, in bytes: half of Hopper's L2 cache."""


def asks_ahead(tile: Tile, columns: int, length: int, itemsize: int) -> bool:
    """Whether a tile prefetches its part of a weight [columns, length] while the previous kernel still runs.

    Tiles for few rows do; with more rows the previous kernel needs the bandwidth.

    Example:
        >>> asks_ahead(Tile(16, 64, 256, 4, 4, tma=True), 896, 4864, 2), asks_ahead(REFERENCE, 896, 4864, 2)
        (True, False)
    """
    if tile.rows > 32 or not tile.tma or itemsize != 2:
        return False
    return columns * length * itemsize <= _FITS and length % (8 * _pieces(tile)) == 0


def _pieces(tile: Tile) -> int:
    """Pieces of a row of the weight, one for each thread to prefetch."""
    return max(1, 32 * tile.warps // tile.columns)


@quick_launch
@triton.jit(do_not_specialize=["num_rows"])
def gated_product_kernel(
    rows,  # [M, K], its TMA descriptor
    weight,  # [2 I, K], the same: the gate's rows before those of up
    ahead,  # the weight again, to be prefetched before the inputs are ready; or None
    out,  # [M, I] contiguous
    num_rows,  # M
    width,  # I
    length,  # K
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SWAPPED: tl.constexpr, GELU: tl.constexpr,
    PIECES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of ``act(rows @ gate.T) * (rows @ up.T)``, rounded as by separate kernels."""
    num_m = tl.cdiv(num_rows, ROWS)
    row_start = tl.program_id(0) % num_m * ROWS
    column_start = tl.program_id(0) // num_m * COLUMNS
    if ahead is not None:
        ask_for_rows(ahead, column_start, 2 * width, length, COLUMNS, PIECES)
        ask_for_rows(ahead, width + column_start, 2 * width, length, COLUMNS, PIECES)
    after_inputs(OVERLAP)
    row = row_start + tl.arange(0, ROWS)
    column = column_start + tl.arange(0, COLUMNS)
    gate = tl.zeros((COLUMNS, ROWS) if SWAPPED else (ROWS, COLUMNS), tl.float32)
    up = tl.zeros((COLUMNS, ROWS) if SWAPPED else (ROWS, COLUMNS), tl.float32)
    for step in range(tl.cdiv(length, DEPTH)):
        x = rows.load([row_start, step * DEPTH])
        g = weight.load([column_start, step * DEPTH])
        u = weight.load([width + column_start, step * DEPTH])
        if SWAPPED:
            gate = tl.dot(g, x.T, gate, input_precision="ieee")
            up = tl.dot(u, x.T, up, input_precision="ieee")
        else:
            gate = tl.dot(x, g.T, gate, input_precision="ieee")
            up = tl.dot(x, u.T, up, input_precision="ieee")
    row_of, column_of = across(row, column, SWAPPED)
    kind = out.dtype.element_ty
    act, _ = activation(gate.to(kind).to(tl.float32), GELU)
    product = act.to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    at = out + row_of.to(tl.int64) * width + column_of
    tl.store(at, product.to(kind), mask=(row_of < num_rows) & (column_of < width))


def gated_product(rows: Tensor, weight: Tensor, tile: Tile, *, gelu: bool, ahead: bool | None = None) -> Tensor:
    """``act(rows @ gate.T) * (rows @ up.T)`` [M, I] in one kernel, bitwise identical to separate product and gate.

    Args:
        rows: [M, K], the last dimension contiguous; row stride and K multiples of 16 bytes.
        weight: [2 I, K] contiguous, in the dtype of ``rows``: gate and up end to end.
        tile: its columns count for gate and up each.
        gelu: the gate's activation, else SiLU.
        ahead: as of ``fixed_order_product``.
    """
    (num_rows, length), width = rows.shape, weight.shape[0] // 2
    out = empty_rows(num_rows, width, like=rows)
    overlap = overlapping(rows.device)
    asks = overlap["OVERLAP"] and (asks_ahead(tile, 2 * width, length, weight.itemsize) if ahead is None else ahead)
    gated_product_kernel[(divided_up(num_rows, tile.rows) * divided_up(width, tile.columns),)](
        descriptor(rows, [tile.rows, tile.depth]), descriptor(weight, [tile.columns, tile.depth]),
        weight if asks else None, out, num_rows, width, length,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, SWAPPED=tile.swapped, GELU=gelu,
        PIECES=_pieces(tile) if asks else 1, num_warps=tile.warps, num_stages=tile.stages, **overlap,
    )  # fmt: skip
    return out


@quick_launch
@triton.jit(do_not_specialize=["num_rows"])
def low_rank_kernel(
    low,  # [M, P * rank] contiguous: of P maps, side by side
    weight,  # [N, rank] contiguous: of the maps, end to end
    out,  # [M, N] a row ``out_stride`` after the other
    scale,
    num_rows,  # M
    num_columns,  # N
    second,  # the column where the second map begins
    third, rank, low_stride, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,  # at least the rank
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of ``out += scale * low @ weight.T``, within one map's columns."""
    after_inputs(OVERLAP)
    num_m = tl.cdiv(num_rows, ROWS)
    row_start = tl.program_id(0) % num_m * ROWS
    column_start = tl.program_id(0) // num_m * COLUMNS
    part = (column_start >= second).to(tl.int32) + (column_start >= third).to(tl.int32)
    row = row_start + tl.arange(0, ROWS)[:, None]
    column = column_start + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    at = out + row.to(tl.int64) * out_stride + column[None, :]
    stored = (row < num_rows) & (column < num_columns)[None, :]
    before = tl.load(at, mask=stored, other=0.0)
    inside = (row < num_rows) & (depth < rank)[None, :]
    x = tl.load(low + row.to(tl.int64) * low_stride + part * rank + depth[None, :], mask=inside, other=0.0)
    inside = (column < num_columns)[:, None] & (depth < rank)[None, :]
    w = tl.load(weight + column[:, None] * rank + depth[None, :], mask=inside, other=0.0)
    acc = tl.dot(x, w.T, input_precision="ieee")
    tl.store(at, tl.fma(acc, scale, before.to(tl.float32)).to(out.dtype.element_ty), mask=stored)


LOW_RANK_COLUMNS = 64
"""Of a tile of LoRA's second product. Most heads are multiples of it wide: queries, keys and values go together."""

MOST_RANK = 64


def whole_tiles(widths: Sequence[int]) -> bool:
    """Whether ``add_low_rank`` can take maps of these widths together: no tile may span two maps.

    Example:
        >>> whole_tiles((576, 192, 192)), whole_tiles((96, 32)), whole_tiles((100,))
        (True, False, True)
    """
    return len(widths) <= 3 and all(width % LOW_RANK_COLUMNS == 0 for width in widths[:-1])


def add_low_rank(low: Tensor, weight: Tensor, out: Tensor, widths: Sequence[int], scale: float) -> None:
    """``out_p += scale * low_p @ weight_p.T`` for maps p with adjacent columns; only the sum is rounded.

    Args:
        low: [M, P * R] with contiguous rows, the maps side by side; R at most 64.
        weight: [N, R] contiguous, in the dtype of ``low``: the maps end to end.
        out: [M, N] with contiguous rows.
        widths: columns of each map; at most three maps, for which ``whole_tiles`` holds.
        scale: of the product.
    """
    (num_rows, _), (num_columns, rank) = low.shape, weight.shape
    rows = 32
    starts = [*accumulate(widths), num_columns, num_columns]
    low_rank_kernel[(divided_up(num_rows, rows) * divided_up(num_columns, LOW_RANK_COLUMNS),)](
        low, weight, out, scale, num_rows, num_columns, starts[0], starts[1], rank, low.stride(0), out.stride(0),
        ROWS=rows, COLUMNS=LOW_RANK_COLUMNS, DEPTH=max(16, power_of_two(rank)), num_warps=4,
        **overlapping(low.device),
    )  # fmt: skip
