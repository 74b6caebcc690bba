"""LoRA with an adapter of its own for each row, for decoding steps whose launches do not depend on who is in them.

    out[m] += scale[i] * (x[m] @ a[i].T) @ b[i].T    with i = index[m]

A tile of rows goes through the adapters between the smallest and the largest index of its rows, and keeps of each
product the rows that are its own; rows sorted by adapter mostly need one. Sums run through their length from start to
end in one float32 accumulator and are rounded where ``kernels/linear.py`` rounds them, so a row has the bits of that
file's products with its adapter alone. Factors of a smaller rank are filled up with zeros: a sum that starts at +0 is
never -0, and adding 0 * 0 leaves every other number as it is. A row whose adapter has scale 0 is not touched.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from logitless.models.kernels.linear import INTERPRETED, LOW_RANK_COLUMNS, Tile
from logitless.models.kernels.overlap import after_inputs, overlapping
from logitless.models.kernels.rows import divided_up, empty_rows, power_of_two
from logitless.quick_launch import quick_launch


@triton.jit
def adapters_of(index, row, num_rows):
    """The rows' adapters, and the smallest and largest of them."""
    mine = tl.load(index + row, mask=row < num_rows, other=-1)
    return mine, tl.min(tl.where(mine < 0, 2147483647, mine), 0), tl.max(mine, 0)


@quick_launch
@triton.jit(do_not_specialize=["num_rows"])
def low_rank_kernel_of_rows(
    x,  # [M, K] a row ``row_stride`` after the other
    a,  # [S, C, K]
    scale,  # [S] float32; 0: nothing to do
    index,  # [M] int32
    low,  # [M, C], written
    num_rows,  # M
    num_columns,  # C
    length,  # K
    row_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr,  # whether DEPTH divides K
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of ``x @ a[index].T``."""
    after_inputs(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    mine, lowest, highest = adapters_of(index, row, num_rows)
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    for each in range(lowest, highest + 1):
        own = mine == each
        if (tl.max(own.to(tl.int32), 0) > 0) & (tl.load(scale + each) != 0.0):
            row_at = x + (row % num_rows)[:, None].to(tl.int64) * row_stride + depth[None, :]
            weight = a + (tl.full((), 0, tl.int64) + each) * num_columns * length
            weight_at = weight + (column % num_columns)[:, None].to(tl.int64) * length + depth[None, :]
            acc = tl.zeros((ROWS, COLUMNS), tl.float32)
            for step in range(tl.cdiv(length, DEPTH)):
                if EVEN:
                    rows = tl.load(row_at)
                    w = tl.load(weight_at)
                else:
                    inside = depth[None, :] < length - step * DEPTH
                    rows = tl.load(row_at, mask=inside, other=0.0)
                    w = tl.load(weight_at, mask=inside, other=0.0)
                acc = tl.dot(rows, w.T, acc, input_precision="ieee")
                row_at += DEPTH
                weight_at += DEPTH
            out = tl.where(own[:, None], acc, out)
    stored = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    at = low + row[:, None].to(tl.int64) * num_columns + column[None, :]
    tl.store(at, out.to(low.dtype.element_ty), mask=stored)


@quick_launch
@triton.jit(do_not_specialize=["num_rows"])
def add_low_rank_kernel_of_rows(
    low,  # [M, P * rank] contiguous: of P maps, side by side
    b,  # [S, N, rank]: of the maps, end to end
    scale,  # [S] float32
    index,  # [M] int32
    out,  # [M, N] a row ``out_stride`` after the other, changed
    num_rows,  # M
    num_columns,  # columns of ``out``
    total,  # N
    skipped,  # columns of b before those of ``out``
    second,  # the column where the second map begins
    third, rank, low_stride, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of ``out += scale[index] * low @ b[index].T``, within one map's columns."""
    after_inputs(OVERLAP)
    num_m = tl.cdiv(num_rows, ROWS)
    row = tl.program_id(0) % num_m * ROWS + tl.arange(0, ROWS)
    column_start = tl.program_id(0) // num_m * COLUMNS
    part = (column_start >= second).to(tl.int32) + (column_start >= third).to(tl.int32)
    column = column_start + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    mine, lowest, highest = adapters_of(index, row, num_rows)
    at = out + row[:, None].to(tl.int64) * out_stride + column[None, :]
    changed = tl.load(scale + mine, mask=row < num_rows, other=0.0) != 0.0  # no other row is read: logits are large
    inside_out = changed[:, None] & (column < num_columns)[None, :]
    before = tl.load(at, mask=inside_out, other=0.0).to(tl.float32)
    value = before
    for each in range(lowest, highest + 1):
        own = mine == each
        factor = tl.load(scale + each)
        if (tl.max(own.to(tl.int32), 0) > 0) & (factor != 0.0):
            weight = b + ((tl.full((), 0, tl.int64) + each) * total + skipped + column[:, None]) * rank
            acc = tl.zeros((ROWS, COLUMNS), tl.float32)
            for start in range(0, rank, DEPTH):
                r = start + depth
                x = tl.load(
                    low + row[:, None].to(tl.int64) * low_stride + part * rank + r[None, :],
                    mask=(row < num_rows)[:, None] & (r < rank)[None, :], other=0.0,
                )  # fmt: skip
                w = tl.load(weight + r[None, :], mask=(column < num_columns)[:, None] & (r < rank)[None, :], other=0.0)
                acc = tl.dot(x, w.T, acc, input_precision="ieee")
            value = tl.where(own[:, None], tl.fma(acc, factor, before), value)
    tl.store(at, value.to(out.dtype.element_ty), mask=inside_out)


def add_rows_own(
    x: Float[Tensor, "M K"], a: Float[Tensor, "S C K"], b: Float[Tensor, "S N R"], scale: Float[Tensor, "S"],
    index: Int[Tensor, "M"], outs: Sequence[Tensor], widths: Sequence[int], *, tile: Tile | None = None,
) -> None:  # fmt: skip
    """``out_p += scale[index] * (x @ a_p[index].T) @ b_p[index].T`` for P maps; only the sum is rounded.

    Equals: ``linear.add_low_rank`` with each row's adapter, bit for bit.

    Args:
        x: contiguous rows.
        a: C = P * R, the maps end to end; contiguous, in the dtype of ``x``.
        b: N is the sum of the maps' columns; likewise.
        scale: float32; 0: the adapter leaves these maps alone.
        index: int32, the adapter of each row.
        outs: [M, N_p] of each map; or one [M, N] of at most three, for which ``whole_tiles`` holds.
        widths: N_p of each map.
        tile: of the first product; None: by the number of rows.
    """
    (num_rows, length), (_, columns, _), (_, total, rank) = x.shape, a.shape, b.shape
    low, overlap = empty_rows(num_rows, columns, like=x), overlapping(x.device)
    tile = tile or _tile(num_rows, columns, x)
    low_rank_kernel_of_rows[(divided_up(num_rows, tile.rows), divided_up(columns, tile.columns))](
        x, a, scale, index, low, num_rows, columns, length, x.stride(0),
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, EVEN=length % tile.depth == 0,
        num_warps=tile.warps, num_stages=tile.stages, **overlap,
    )  # fmt: skip
    rows, skipped = 16 if num_rows <= 16 else 32, 0
    ends = [*accumulate(widths), total, total] if len(outs) == 1 else [total, total]
    for number, out in enumerate(outs):
        add_low_rank_kernel_of_rows[(divided_up(num_rows, rows) * divided_up(out.shape[1], LOW_RANK_COLUMNS),)](
            low[:, number * rank :], b, scale, index, out, num_rows, out.shape[1], total, skipped, ends[0], ends[1],
            rank, columns, out.stride(0),
            ROWS=rows, COLUMNS=LOW_RANK_COLUMNS, DEPTH=min(64, max(16, power_of_two(rank))), num_warps=4, **overlap,
        )  # fmt: skip
        skipped += out.shape[1]


TILES = {64: Tile(16, 64, 128, 4, 4), 1 << 30: Tile(64, 64, 128, 4, 3)}
"""Of the first product, by the largest number of rows they are for; below 99 KiB of shared memory."""


def _tile(num_rows: int, columns: int, x: Tensor) -> Tile:
    if not x.is_cuda:
        return INTERPRETED
    if x.dtype == torch.float32:
        return Tile(32, 32, 32, 4, 2)
    tile = next(tile for most, tile in TILES.items() if num_rows <= most)
    return replace(tile, columns=min(tile.columns, max(16, power_of_two(columns))))
