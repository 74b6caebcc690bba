"""The products of a mixture of experts, forward and backward: every row has the same bits whatever the other rows are.

A slot is one of the K experts of a token: slot ``t * K + k`` sends token t to its k-th expert. Slots are sorted by
expert, and each program computes a tile of the slots of one expert, whose number decides the tile's rows and nothing
else: every sum runs through its length from start to end in one float32 accumulator (see ``kernels/linear.py``), and
a token's K outputs are added in their order. Sorting and listing the tiles needs no answer from the device, so that a
decoding step can be a CUDA graph.

Weights are [E, N, M] in either order of memory: their strides are arguments. An adapter of an expert adds
``scale * (row @ a.T) @ b.T`` in float32 before the product is rounded.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from logitless.models.kernels.gate import activation
from logitless.models.kernels.rows import divided_up, power_of_two
from logitless.quick_launch import quick_launch


class Act(NamedTuple):
    """The activation between an expert's two products.

    Args:
        gelu: ``gelu(gate) * up``, else ``silu(gate) * up``.
        interleaved: gate and up are the even and odd columns, else the halves.
        limit: gpt-oss: ``min(gate, limit) * sigmoid(alpha * gate) * (clamp(up, limit) + 1)``; 0 for none.
        alpha: of that.
    """

    gelu: bool = False
    interleaved: bool = False
    limit: float = 0.0
    alpha: float = 1.702


class LowRank(NamedTuple):
    """An adapter of every expert: ``scale * (rows @ a.T) @ b.T``.

    Args:
        a: [E, R, M] contiguous.
        b: [E, N, R] contiguous.
        scale: a number.
    """

    a: Tensor
    b: Tensor
    scale: float


class LowRankTerm(NamedTuple):
    """What is added to a product of each slot before it is rounded: ``scale * rows @ b[expert].T``.

    Args:
        rows: [S, R] sorted, contiguous.
        b: [E, N, R]; of any strides in ``grouped_product``, contiguous in ``gated_products``.
        scale: a number.
    """

    rows: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """R; 0 for no term."""
        return 0 if self.rows is None else self.rows.shape[1]


NO_TERM = LowRankTerm()


@dataclass(frozen=True)
class Slots:
    """The slots of a forward pass, sorted by expert, and the tiles of their products.

    Args:
        order: [S] the slot at each place after sorting.
        expert, start, stop: [tiles] int32: the expert of each tile, its first place, and its expert's last; an empty
            tile starts at its stop.
        begin: [E + 1] int32, each expert's first place.
        rows: of a tile.
        per_token: K.
    """

    order: Int[Tensor, "S"]
    expert: Int[Tensor, "tiles"]
    start: Int[Tensor, "tiles"]
    stop: Int[Tensor, "tiles"]
    begin: Int[Tensor, "E1"]
    rows: int
    per_token: int

    @classmethod
    def of(cls, chosen: Int[Tensor, "T K"], num_experts: int, *, rows: int | None = None) -> "Slots":
        """The slots of tokens whose experts are chosen, in tiles of so many rows, or of as many as their number asks.

        Example:
            >>> slots = Slots.of(torch.tensor([[1, 0], [1, 2]]), num_experts=3)
            >>> slots.order.tolist(), slots.begin.tolist()
            ([1, 0, 2, 3], [0, 1, 3, 4])
        """
        flat = chosen.reshape(-1)
        rows = rows_of_tile(flat.numel() / num_experts) if rows is None else rows
        by_expert, order = torch.sort(flat, stable=True)
        numbers = torch.arange(num_experts + 1, device=flat.device, dtype=by_expert.dtype)
        begin = torch.searchsorted(by_expert, numbers)  # [E + 1]
        tiles = divided_up(begin.diff(), rows)
        last = tiles.cumsum(0)
        tile = torch.arange(min(flat.numel(), flat.numel() // rows + num_experts), device=flat.device)
        expert = torch.searchsorted(last, tile, right=True).clamp_max(num_experts - 1)
        stop = begin[expert + 1]
        start = torch.minimum(begin[expert] + (tile - (last - tiles)[expert]) * rows, stop)
        parts = (order.int(), expert.int(), start.int(), stop.int(), begin.int())
        return cls(*parts, rows=rows, per_token=chosen.shape[1])

    @property
    def count(self) -> int:
        """S."""
        return self.order.shape[0]


TILE_ROWS = (16, 32, 64, 128)


def rows_of_tile(mean: float) -> int:
    """Rows of a tile by the mean number of an expert's slots."""
    return next((rows for rows, most in zip(TILE_ROWS, (12, 24, 128), strict=False) if mean <= most), TILE_ROWS[-1])


@triton.jit
def places_of(order, start, stop, ROWS: tl.constexpr, PER_TOKEN: tl.constexpr):
    """Places of a tile's rows, which of them exist, their slots and their tokens."""
    place = start + tl.arange(0, ROWS)
    live = place < stop
    slot = tl.load(order + place, mask=live, other=0).to(tl.int64)
    return place.to(tl.int64), live, slot, slot // PER_TOKEN


@triton.jit
def tile_product(
    acc, a, a_row, live, b, column, num_columns, length, row_stride, column_stride, depth_stride,
    DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """``acc + a[a_row] @ b[column].T``, from the start of the length to its end."""
    depth = tl.arange(0, DEPTH)
    a_at = a + a_row[:, None] * row_stride + depth[None, :]
    b_at = b + depth[:, None] * depth_stride + column[None, :] * column_stride
    inside = (column < num_columns)[None, :]
    for step in range(tl.cdiv(length, DEPTH)):
        if EVEN:
            x = tl.load(a_at, mask=live[:, None], other=0.0)
            w = tl.load(b_at, mask=inside, other=0.0)
        else:
            rest = length - step * DEPTH
            x = tl.load(a_at, mask=live[:, None] & (depth[None, :] < rest), other=0.0)
            w = tl.load(b_at, mask=inside & (depth[:, None] < rest), other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        a_at += DEPTH
        b_at += DEPTH * depth_stride
    return acc


@triton.jit
def low_rank_product(
    acc, low, place, live, b, column, num_columns, rank, column_stride, rank_stride, scale, RANK: tl.constexpr
):
    """``acc + scale * low[place] @ b[column].T``."""
    r = tl.arange(0, RANK)
    x = tl.load(low + place[:, None] * rank + r[None, :], mask=live[:, None] & (r[None, :] < rank), other=0.0)
    inside = (column < num_columns)[None, :] & (r[:, None] < rank)
    w = tl.load(b + column[None, :] * column_stride + r[:, None] * rank_stride, mask=inside, other=0.0)
    return tl.fma(tl.dot(x, w, input_precision="ieee"), scale, acc)


@triton.jit
def gated_pair(g, u, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GELU: tl.constexpr):
    """The activation of gate and up, and its derivatives by each; float32."""
    if LIMIT == 0.0:
        act, slope = activation(g, GELU)
        return act, u, slope, 1.0 + 0.0 * u
    inside = (g <= LIMIT).to(tl.float32)
    g = tl.minimum(g, LIMIT)
    s = 1.0 / (1.0 + tl.exp(-ALPHA * g))
    up_inside = ((u <= LIMIT) & (u >= -LIMIT)).to(tl.float32)
    factor = tl.minimum(tl.maximum(u, -LIMIT), LIMIT) + 1.0
    return g * s, factor, inside * (s + ALPHA * g * s * (1.0 - s)), up_inside


@quick_launch
@triton.jit
def grouped_kernel(
    a,  # rows, ``length`` numbers each
    b,  # [E, N, length]
    bias,  # [E, N] or None
    low,  # [S, R] sorted, or None: rows of an adapter's first product
    low_b,  # [E, N, R] in either order
    out,  # [S, N]
    order, tile_expert, tile_start, tile_stop,
    num_columns,  # N
    length,
    expert_stride, column_stride, depth_stride,  # of b
    rank, low_expert_stride, low_column_stride, low_rank_stride,
    scale,  # of the adapter
    PER_TOKEN: tl.constexpr,
    OF_TOKENS: tl.constexpr,  # a row of ``a`` for each token, else for each place
    TO_SLOTS: tl.constexpr,  # a row of ``out`` for each slot in its own order, else for each place
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's product."""
    tile = tl.program_id(1)
    start, stop = tl.load(tile_start + tile), tl.load(tile_stop + tile)
    if start < stop:
        expert = tl.load(tile_expert + tile).to(tl.int64)
        place, live, slot, token = places_of(order, start, stop, ROWS, PER_TOKEN)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        a_row = token if OF_TOKENS else place
        acc = tile_product(
            tl.zeros((ROWS, COLUMNS), tl.float32), a, a_row, live, b + expert * expert_stride, column, num_columns,
            length, length, column_stride, depth_stride, DEPTH, EVEN,
        )  # fmt: skip
        if low is not None:
            acc = low_rank_product(
                acc, low, place, live, low_b + expert * low_expert_stride, column, num_columns, rank,
                low_column_stride, low_rank_stride, scale, RANK,
            )  # fmt: skip
        if bias is not None:
            acc += tl.load(bias + expert * num_columns + column, mask=column < num_columns, other=0.0)[None, :]
        out_row = slot if TO_SLOTS else place
        stored = live[:, None] & (column < num_columns)[None, :]
        tl.store(out + out_row[:, None] * num_columns + column[None, :], acc.to(out.dtype.element_ty), mask=stored)


@triton.jit
def pair_columns(n, width, INTERLEAVED: tl.constexpr):
    """Columns of gate and up number ``n`` in the product of both."""
    if INTERLEAVED:
        return 2 * n, 2 * n + 1
    return n, n + width


@quick_launch
@triton.jit
def gated_kernel(
    x,  # [T, D]
    weight,  # [E, 2 I, D]
    bias,  # [E, 2 I] or None
    low,  # [S, R] sorted, or None
    low_b,  # [E, 2 I, R]
    both,  # [S, 2 I] gate and up before the activation, sorted; or None
    hidden,  # [S, I] sorted
    order, tile_expert, tile_start, tile_stop,
    width,  # I
    length,  # D
    expert_stride, column_stride, depth_stride, rank, scale,
    PER_TOKEN: tl.constexpr, GELU: tl.constexpr, INTERLEAVED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Gate, up and activation of a tile of one expert's slots."""
    tile = tl.program_id(1)
    start, stop = tl.load(tile_start + tile), tl.load(tile_stop + tile)
    if start < stop:
        expert = tl.load(tile_expert + tile).to(tl.int64)
        place, live, _, token = places_of(order, start, stop, ROWS, PER_TOKEN)
        n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        gate_column, up_column = pair_columns(n, width, INTERLEAVED)
        total = 2 * width
        b = weight + expert * expert_stride
        low_weight = low_b + expert * total * rank if low is not None else None
        if INTERLEAVED:  # one tile of both: every second column would be read two bytes at a time
            pair = tl.program_id(0) * 2 * COLUMNS + tl.arange(0, 2 * COLUMNS)
            pairs = tile_product(
                tl.zeros((ROWS, 2 * COLUMNS), tl.float32), x, token, live, b, pair, total, length, length,
                column_stride, depth_stride, DEPTH, EVEN,
            )  # fmt: skip
            if low is not None:
                pairs = low_rank_product(pairs, low, place, live, low_weight, pair, total, rank, rank, 1, scale, RANK)
            if bias is not None:
                pairs += tl.load(bias + expert * total + pair, mask=pair < total, other=0.0)[None, :]
            g, u = tl.split(tl.reshape(pairs, (ROWS, COLUMNS, 2)))
        else:
            depth = tl.arange(0, DEPTH)
            x_at = x + token[:, None] * length + depth[None, :]
            gate_at = b + depth[:, None] * depth_stride + gate_column[None, :] * column_stride
            up_at = b + depth[:, None] * depth_stride + up_column[None, :] * column_stride
            inside = (n < width)[None, :]
            g = tl.zeros((ROWS, COLUMNS), tl.float32)
            u = tl.zeros((ROWS, COLUMNS), tl.float32)
            for step in range(tl.cdiv(length, DEPTH)):
                if EVEN:
                    row = tl.load(x_at, mask=live[:, None], other=0.0)
                    gate_w = tl.load(gate_at, mask=inside, other=0.0)
                    up_w = tl.load(up_at, mask=inside, other=0.0)
                else:
                    rest = length - step * DEPTH
                    row = tl.load(x_at, mask=live[:, None] & (depth[None, :] < rest), other=0.0)
                    gate_w = tl.load(gate_at, mask=inside & (depth[:, None] < rest), other=0.0)
                    up_w = tl.load(up_at, mask=inside & (depth[:, None] < rest), other=0.0)
                g = tl.dot(row, gate_w, g, input_precision="ieee")
                u = tl.dot(row, up_w, u, input_precision="ieee")
                x_at += DEPTH
                gate_at += DEPTH * depth_stride
                up_at += DEPTH * depth_stride
            if low is not None:
                g = low_rank_product(g, low, place, live, low_weight, gate_column, total, rank, rank, 1, scale, RANK)
                u = low_rank_product(u, low, place, live, low_weight, up_column, total, rank, rank, 1, scale, RANK)
            if bias is not None:
                g += tl.load(bias + expert * total + gate_column, mask=n < width, other=0.0)[None, :]
                u += tl.load(bias + expert * total + up_column, mask=n < width, other=0.0)[None, :]
        kind = hidden.dtype.element_ty
        g, u = g.to(kind), u.to(kind)
        stored = live[:, None] & (n < width)[None, :]
        if both is not None:
            tl.store(both + place[:, None] * total + gate_column[None, :], g, mask=stored)
            tl.store(both + place[:, None] * total + up_column[None, :], u, mask=stored)
        act, factor, _, _ = gated_pair(g.to(tl.float32), u.to(tl.float32), ALPHA, LIMIT, GELU)
        out = act.to(kind).to(tl.float32) * factor
        tl.store(hidden + place[:, None] * width + n[None, :], out.to(kind), mask=stored)


@quick_launch
@triton.jit
def gated_backward_kernel(
    grad,  # [T, D] of the mixture's output
    weights,  # [S] of the slots, in their own order, float32
    down,  # [E, D, I]
    low,  # [S, R] sorted: grad @ b of the down product's adapter; or None
    low_a,  # [E, R, I] of it
    both,  # [S, 2 I] gate and up, sorted
    hidden,  # [S, I] sorted, or None: to be written, for the gradient of ``down``
    grad_both,  # [S, 2 I] sorted
    grad_weights,  # [blocks, S] float32: parts of the gradient of ``weights``, in the slots' order
    order, tile_expert, tile_start, tile_stop,
    width,  # I
    length,  # D
    expert_stride, column_stride, depth_stride,  # of ``down`` by I and by D
    rank, num_slots,
    PER_TOKEN: tl.constexpr, GELU: tl.constexpr, INTERLEAVED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up, and of the slots' weights, from those of the tokens."""
    tile = tl.program_id(1)
    start, stop = tl.load(tile_start + tile), tl.load(tile_stop + tile)
    if start < stop:
        expert = tl.load(tile_expert + tile).to(tl.int64)
        place, live, slot, token = places_of(order, start, stop, ROWS, PER_TOKEN)
        n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        d = tile_product(
            tl.zeros((ROWS, COLUMNS), tl.float32), grad, token, live, down + expert * expert_stride, n, width,
            length, length, column_stride, depth_stride, DEPTH, EVEN,
        )  # fmt: skip
        if low is not None:
            low_weight = low_a + expert * rank * width
            d = low_rank_product(d, low, place, live, low_weight, n, width, rank, 1, width, 1.0, RANK)
        gate_column, up_column = pair_columns(n, width, INTERLEAVED)
        stored = live[:, None] & (n < width)[None, :]
        at = both + place[:, None] * 2 * width
        g = tl.load(at + gate_column[None, :], mask=stored, other=0.0).to(tl.float32)
        u = tl.load(at + up_column[None, :], mask=stored, other=0.0).to(tl.float32)
        act, factor, slope, up_slope = gated_pair(g, u, ALPHA, LIMIT, GELU)
        kind = grad_both.dtype.element_ty
        h = (act.to(kind).to(tl.float32) * factor).to(kind)
        if hidden is not None:
            tl.store(hidden + place[:, None] * width + n[None, :], h, mask=stored)
        part = tl.sum(tl.where(stored, d * h.to(tl.float32), 0.0), 1)
        tl.store(grad_weights + tl.program_id(0).to(tl.int64) * num_slots + slot, part, mask=live)
        d *= tl.load(weights + slot, mask=live, other=0.0)[:, None]
        to = grad_both + place[:, None] * 2 * width
        tl.store(to + gate_column[None, :], (d * factor * slope).to(kind), mask=stored)
        tl.store(to + up_column[None, :], (d * act * up_slope).to(kind), mask=stored)


@quick_launch
@triton.jit
def outer_kernel(
    a,  # rows of ``num_rows`` numbers
    b,  # rows of ``num_columns`` numbers
    weights,  # [S] factors of the rows of ``a`` by slot, float32; or None
    out,  # [E, num_rows, num_columns] by its strides
    order, begin, num_rows, num_columns,
    expert_stride, row_stride, column_stride,  # of ``out``
    scale,
    PER_TOKEN: tl.constexpr, A_OF_TOKENS: tl.constexpr, B_OF_TOKENS: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """``out[e] (+)= scale * sum over e's slots of a[slot] b[slot]``: a tile of one expert's gradient."""
    expert = tl.program_id(1).to(tl.int64)
    start, stop = tl.load(begin + expert), tl.load(begin + expert + 1)
    num_n = tl.cdiv(num_columns, COLUMNS)
    row = tl.program_id(0) // num_n * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % num_n * COLUMNS + tl.arange(0, COLUMNS)
    stored = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    if ADD:
        stored = stored & (start < stop)
    to = out + expert * expert_stride + row[:, None] * row_stride + column[None, :] * column_stride
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(start, stop, DEPTH):
        place, live, slot, token = places_of(order, first, stop, DEPTH, PER_TOKEN)
        a_row = token if A_OF_TOKENS else place
        b_row = token if B_OF_TOKENS else place
        x = tl.load(
            a + a_row[None, :] * num_rows + row[:, None], mask=live[None, :] & (row < num_rows)[:, None], other=0.0
        )
        y = tl.load(
            b + b_row[:, None] * num_columns + column[None, :],
            mask=live[:, None] & (column < num_columns)[None, :], other=0.0,
        )  # fmt: skip
        if weights is not None:
            x = (x * tl.load(weights + slot, mask=live, other=0.0)[None, :]).to(y.dtype)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    acc *= scale
    if ADD:
        acc += tl.load(to, mask=stored, other=0.0)
    tl.store(to, acc.to(out.dtype.element_ty), mask=stored)


@quick_launch
@triton.jit
def combine_kernel(
    parts,  # [T * K, D]
    weights,  # [T * K] float32, or None for 1
    addend,  # [T, D] or None
    out,  # [T, D]
    width,  # D
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's K rows, weighted and added in their order, rounded; then the addend."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    acc = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        part = tl.load(parts + (token * K + k) * width + d, mask=inside, other=0.0).to(tl.float32)
        if weights is not None:
            part *= tl.load(weights + token * K + k)
        acc += part
    if addend is not None:
        acc = acc.to(out.dtype.element_ty).to(tl.float32)
        acc += tl.load(addend + token * width + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + d, acc.to(out.dtype.element_ty), mask=inside)


@quick_launch
@triton.jit
def by_expert_kernel(
    b,  # [N, R * E]
    out,  # [E, N, R]
    num_columns, rank, num_experts,  # N, R, E
    COLUMNS: tl.constexpr, RANK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """``out[e, n, r] = b[n, r * E + e]``, read and written in whole lines of memory."""
    n = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[:, None, None]
    r = tl.arange(0, RANK)[None, :, None]
    e = (tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS))[None, None, :]
    inside = (n < num_columns) & (r < rank) & (e < num_experts)
    part = tl.load(b + (n * rank + r) * num_experts + e, mask=inside, other=0.0)
    tl.store(out + (e * num_columns + n) * rank + r, part, mask=inside)


class _Tile(NamedTuple):
    columns: int
    depth: int
    warps: int
    stages: int


_GATED = {16: _Tile(64, 64, 4, 4), 32: _Tile(64, 64, 4, 4), 64: _Tile(64, 64, 4, 3), 128: _Tile(64, 64, 8, 3)}
_GROUPED = {16: _Tile(128, 64, 4, 4), 32: _Tile(128, 64, 4, 4), 64: _Tile(128, 64, 8, 3), 128: _Tile(128, 64, 8, 3)}
"""By rows; less than 99 KiB of shared memory each."""
_LARGE_GATED = _GATED | dict.fromkeys((16, 32), _Tile(64, 128, 4, 3))
_LARGE_GROUPED = _GROUPED | dict.fromkeys((16, 32), _Tile(128, 128, 4, 3))
"""For GPUs that have 128 KiB."""
_OUTER = _Tile(128, 64, 8, 3)
_OUTER_ROWS = 128
_SMALL = _Tile(32, 32, 4, 2)
"""For float32, and for the interpreter."""


def _tile(tiles: dict[int, _Tile], large: dict[int, _Tile], rows: int, like: Tensor) -> _Tile:
    if not like.is_cuda or like.dtype == torch.float32:
        return _SMALL
    return (large if _has_room(like.device) else tiles)[rows]


def _outer_tile(like: Tensor) -> tuple[int, _Tile]:
    """Rows of a tile, and the rest of it."""
    return (_OUTER_ROWS, _OUTER) if like.is_cuda and like.dtype != torch.float32 else (32, _SMALL)


@cache
def _has_room(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0))  # data centre GPUs


def _launched(tile: _Tile, rows: int, length: int, rank: int) -> dict[str, int | bool]:
    return {
        "ROWS": rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "EVEN": length % tile.depth == 0,
        "RANK": max(16, power_of_two(rank)), "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def _tables(slots: Slots) -> tuple[Tensor, ...]:
    return slots.order, slots.expert, slots.start, slots.stop


def grouped_product(
    rows: Float[Tensor, "A M"], weight: Float[Tensor, "E N M"], slots: Slots, *, of_tokens: bool = False,
    to_slots: bool = False, bias: Float[Tensor, "E N"] | None = None, low: LowRankTerm = NO_TERM,
) -> Float[Tensor, "S N"]:  # fmt: skip
    """``row @ weight[expert].T + bias[expert] + low`` of every slot.

    Args:
        rows: one a place, or one a token with ``of_tokens``; contiguous.
        weight: of any strides.
        slots: sorted.
        to_slots: return rows in the slots' own order, else sorted.
        low: of an adapter.
    """
    _, num_columns, length = weight.shape
    out = torch.empty(slots.count, num_columns, dtype=rows.dtype, device=rows.device)
    tile = _tile(_GROUPED, _LARGE_GROUPED, slots.rows, rows)
    grid = (divided_up(num_columns, tile.columns), slots.expert.shape[0])
    if slots.count:
        grouped_kernel[grid](
            rows, weight, bias, low.rows, low.b, out, *_tables(slots), num_columns, length, *weight.stride(), low.rank,
            *((0, 0, 0) if low.b is None else low.b.stride()), low.scale, PER_TOKEN=slots.per_token,
            OF_TOKENS=of_tokens, TO_SLOTS=to_slots, **_launched(tile, slots.rows, length, low.rank),
        )  # fmt: skip
    return out


def low_rank_term(
    rows: Float[Tensor, "A M"], adapter: LowRank | None, slots: Slots, *, of_tokens: bool = False
) -> LowRankTerm:
    """What an adapter adds to ``grouped_product`` of the same rows."""
    if adapter is None:
        return NO_TERM
    return LowRankTerm(grouped_product(rows, adapter.a, slots, of_tokens=of_tokens), adapter.b, adapter.scale)


def gated_products(
    x: Float[Tensor, "T D"], weight: Float[Tensor, "E 2I D"], slots: Slots, act: Act, *,
    bias: Float[Tensor, "E 2I"] | None = None, low: LowRankTerm = NO_TERM, keeps_both: bool = False,
) -> tuple[Float[Tensor, "S I"], Float[Tensor, "S 2I"] | None]:  # fmt: skip
    """Gate, up and activation of every slot, sorted.

    Returns:
        The activation's output; the products before it, if they are to be kept.
    """
    _, total, length = weight.shape
    width = total // 2
    hidden = torch.empty(slots.count, width, dtype=x.dtype, device=x.device)
    both = torch.empty(slots.count, total, dtype=x.dtype, device=x.device) if keeps_both else None
    tile = _tile(_GATED, _LARGE_GATED, slots.rows, x)
    if slots.count:
        gated_kernel[(divided_up(width, tile.columns), slots.expert.shape[0])](
            x, weight, bias, low.rows, low.b, both, hidden, *_tables(slots), width, length, *weight.stride(), low.rank,
            low.scale, PER_TOKEN=slots.per_token, **_of_act(act), **_launched(tile, slots.rows, length, low.rank),
        )  # fmt: skip
    return hidden, both


def gated_products_backward(
    grad: Float[Tensor, "T D"], weights: Float[Tensor, "S"], down: Float[Tensor, "E D I"], both: Float[Tensor, "S 2I"],
    slots: Slots, act: Act, *, low: LowRankTerm = NO_TERM, keeps_hidden: bool = False,
) -> tuple[Float[Tensor, "S 2I"], Float[Tensor, "S"], Float[Tensor, "S I"] | None]:  # fmt: skip
    """Gradients of gate and up (sorted) and of the slots' weights (in their order); the activation's output again.

    Args:
        grad: of the mixture's output.
        weights: of the slots.
        down: weight of the second product.
        both: gate and up.
        low: of the second product's adapter: rows ``scale * grad @ b``, and its a [E, R, I]; of scale 1.
        keeps_hidden: return the activation's output, sorted.
    """
    _, length, width = down.shape
    tile = _tile(_GROUPED, _LARGE_GROUPED, slots.rows, grad)
    blocks = divided_up(width, tile.columns)
    grad_both = torch.empty_like(both)
    grad_weights = torch.empty(blocks, slots.count, dtype=torch.float32, device=grad.device)
    hidden = torch.empty(slots.count, width, dtype=grad.dtype, device=grad.device) if keeps_hidden else None
    expert_stride, depth_stride, column_stride = down.stride()
    if slots.count:
        gated_backward_kernel[(blocks, slots.expert.shape[0])](
            grad, weights, down, low.rows, low.b, both, hidden, grad_both, grad_weights, *_tables(slots), width, length,
            expert_stride, column_stride, depth_stride, low.rank, slots.count,
            PER_TOKEN=slots.per_token, **_of_act(act), **_launched(tile, slots.rows, length, low.rank),
        )  # fmt: skip
    return grad_both, grad_weights.sum(0), hidden


def outer_products(
    a: Float[Tensor, "A N"], b: Float[Tensor, "B M"], slots: Slots, out: Float[Tensor, "E N M"], *,
    a_of_tokens: bool = False, b_of_tokens: bool = False, weights: Float[Tensor, "S"] | None = None,
    scale: float = 1.0, adds: bool = False,
) -> None:  # fmt: skip
    """``out[e] = scale * sum over the slots of e of weights * outer(a, b)``; an expert without slots gets zeros.

    Args:
        a, b: one row a place, or one a token; contiguous.
        slots: sorted.
        out: written to, of any strides.
        weights: factors by slot.
        adds: add to ``out``; an expert without slots costs nothing.
    """
    num_experts, num_rows, num_columns = out.shape
    rows, tile = _outer_tile(a)
    grid = (divided_up(num_rows, rows) * divided_up(num_columns, tile.columns), num_experts)
    outer_kernel[grid](
        a, b, weights, out, slots.order, slots.begin, num_rows, num_columns, *out.stride(), scale,
        PER_TOKEN=slots.per_token, A_OF_TOKENS=a_of_tokens, B_OF_TOKENS=b_of_tokens, ADD=adds,
        ROWS=rows, COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def combined(
    parts: Float[Tensor, "S D"], per_token: int, weights: Float[Tensor, "S"] | None = None,
    addend: Float[Tensor, "T D"] | None = None,
) -> Float[Tensor, "T D"]:  # fmt: skip
    """``sum_k weights * parts`` of each token in float32, in the order of its slots, rounded; plus the addend."""
    num_slots, width = parts.shape
    num_tokens = num_slots // per_token
    out = torch.empty(num_tokens, width, dtype=parts.dtype, device=parts.device)
    block = min(1024, power_of_two(width))
    if num_tokens:
        combine_kernel[(num_tokens, divided_up(width, block))](
            parts, weights, addend, out, width, K=per_token, BLOCK=block, num_warps=4
        )
    return out


def by_expert(b: Float[Tensor, "N RE"], num_experts: int) -> Float[Tensor, "E N R"]:
    """PEFT's second factor for all experts, whose columns are rank by expert, as a contiguous factor of each expert."""
    num_columns, rank = b.shape[0], b.shape[1] // num_experts
    out = torch.empty(num_experts, num_columns, rank, dtype=b.dtype, device=b.device)
    if out.numel():
        grid = (divided_up(num_columns, 8), divided_up(num_experts, 32))
        by_expert_kernel[grid](
            b.contiguous(), out, num_columns, rank, num_experts, COLUMNS=8, RANK=power_of_two(rank), EXPERTS=32,
            num_warps=4,
        )  # fmt: skip
    return out


def _of_act(act: Act) -> dict[str, bool | float]:
    return {"GELU": act.gelu, "INTERLEAVED": act.interleaved, "LIMIT": act.limit, "ALPHA": act.alpha}
