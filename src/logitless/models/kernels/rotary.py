"""Norms of query and key heads, rotary positions, and writing keys and values for attention, in one kernel.

    out[t, h] = x cos(p_t) + half_turned(x) sin(p_t),   x = norm(heads[t, h]) or heads[t, h]
    half_turned(x) = (-x[R/2:], x[:R/2])                of the first R of E numbers; the others pass

rounded as by transformers' separate operations. With ``interleaved`` pairs (Llama 4) ``half_turned(x)`` is
``(-x[1], x[0], -x[3], x[2], ...)``, and the sum is rounded once. Queries may also be multiplied by a number of their
position. The tables of cosines and sines include any scaling of positions. A program takes some heads of one token. The
order of a norm's sum depends on the model's shape only, so that training and decoding, which both run this kernel, are
bitwise identical.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.models.kernels.norm import norm, norm_backward, sum_parts
from logitless.models.kernels.overlap import after_inputs, overlapping
from logitless.models.kernels.rows import divided_up, power_of_two
from logitless.quick_launch import quick_launch

MANY = 256
"""From this many tokens on a program takes several; else starting programs takes most of the time."""

TOKENS = 2


class HeadNorms(NamedTuple):
    """Norms of queries and keys.

    Args:
        query, key: weights: [E] of a norm of each head, or [H * E] and [K * E] of a norm over all heads of a token.
        eps: inside the root.
        gemma: whether they are Gemma's.
    """

    query: Tensor
    key: Tensor
    eps: float
    gemma: bool = False

    def over_all(self, heads: "Heads") -> bool:
        """Whether a norm is over all heads of a token."""
        return self.query.numel() > heads.width


class PositionTable(NamedTuple):
    """What depends on a token's position, and the norms of heads without weights.

    Args:
        cos, sin: [P, R]; None if nothing is rotated.
        factor: [P] float32, of queries; None for none.
        norms: of queries and keys, with weights of 1; None for the layer's own, if it has some.
    """

    cos: Tensor | None
    sin: Tensor | None
    factor: Tensor | None = None
    norms: HeadNorms | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Those of the table that there are."""
        found = self.cos, self.sin, self.factor, None if self.norms is None else self.norms.query
        return [each for each in found if each is not None]


@triton.jit
def partner(d, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The index that is rotated together with d, and its sign; indices from ROTARY on have none."""
    if INTERLEAVED:
        return tl.where(d < ROTARY, d ^ 1, d), tl.where(d % 2 == 0, -1.0, 1.0)
    half: tl.constexpr = ROTARY // 2
    place = tl.where(d < half, d + half, tl.where(d < ROTARY, d - half, d))
    return place, tl.where(d < half, -1.0, 1.0)


@triton.jit
def turned_heads(
    source,  # of the first head
    target,
    norm_weight,  # [E] or None
    cos, sin, factor,  # as of ``rotary_kernel``
    position,  # of this token
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,  # E
    ROTARY: tl.constexpr,  # R
    BLOCK: tl.constexpr, GEMMA: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token, side by side."""
    head = tl.arange(0, HEADS)[:, None] * WIDTH
    d = tl.arange(0, BLOCK)[None, :]
    inside = d < WIDTH
    turns = d < ROTARY
    other, sign = partner(d, ROTARY, INTERLEAVED)
    stored = tl.load(source + head + d, mask=inside, other=0.0)
    x = stored.to(tl.float32)
    y = tl.load(source + head + other, mask=inside, other=0.0).to(tl.float32)
    if norm_weight is not None:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        w_x = tl.load(norm_weight + d, mask=inside, other=0.0).to(tl.float32)
        w_y = tl.load(norm_weight + other, mask=inside, other=0.0).to(tl.float32)
        if GEMMA:
            x = (x * inverse) * (1.0 + w_x)
            y = (y * inverse) * (1.0 + w_y)
        else:
            x = (x * inverse).to(stored.dtype).to(tl.float32) * w_x
            y = (y * inverse).to(stored.dtype).to(tl.float32) * w_y
        x = x.to(stored.dtype).to(tl.float32)
        y = y.to(stored.dtype).to(tl.float32)
    out = x
    if ROTARY > 0:
        c = tl.load(cos + position * ROTARY + d, mask=turns, other=0.0).to(tl.float32)
        s = tl.load(sin + position * ROTARY + d, mask=turns, other=0.0).to(tl.float32)
        if INTERLEAVED:
            turned = tl.fma(x, c, sign * y * s)
        else:
            straight = (x * c).to(stored.dtype).to(tl.float32)
            turned = straight + (sign * y * s).to(stored.dtype).to(tl.float32)
        out = tl.where(turns, turned, x)
    if factor is not None:
        out = out * tl.load(factor + position)
    tl.store(target + head + d, out.to(stored.dtype), mask=inside)


@quick_launch
@triton.jit
def rotary_kernel(
    query,  # [T, H * E] a row ``query_stride`` after the other
    key,  # [T, K * E] a row ``key_stride`` after the other
    value,  # [T, K * E] a row ``value_stride`` after the other
    query_out,  # [T, H, E] contiguous
    key_out,  # [S, K, E] contiguous
    value_out,  # [S, K, E] contiguous, or None: values stay where they are
    position,  # [T]
    slot,  # [T] row of key_out and value_out for each token, -1: nowhere; None: its own number
    cos,  # [P, R] by position; None if R is 0
    sin,  # [P, R]
    factor,  # [P] float32 of queries, or None
    query_norm,  # [E] or None
    key_norm,  # [E] or None
    eps, query_stride, key_stride, value_stride,
    QUERY_HEADS: tl.constexpr,  # H
    KEY_HEADS: tl.constexpr,  # K
    HEADS: tl.constexpr,  # heads a program takes; divides both
    WIDTH: tl.constexpr,  # E
    ROTARY: tl.constexpr,  # R
    BLOCK: tl.constexpr,  # power of two, at least E
    GEMMA: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,  # a program takes; divides T
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some heads of some tokens: of the query, the key or the value."""
    after_inputs(OVERLAP)
    for token in tl.static_range(TOKENS):
        rotate_row(
            query, key, value, query_out, key_out, value_out, position, slot, cos, sin, factor, query_norm, key_norm,
            eps, query_stride, key_stride, value_stride, tl.program_id(0).to(tl.int64) * TOKENS + token, QUERY_HEADS,
            KEY_HEADS, HEADS, WIDTH, ROTARY, BLOCK, GEMMA, INTERLEAVED,
        )  # fmt: skip


@triton.jit
def rotate_row(
    query, key, value, query_out, key_out, value_out, position, slot, cos, sin, factor, query_norm, key_norm, eps,
    query_stride, key_stride, value_stride, row, QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr, GEMMA: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Some heads of one token; arguments as of ``rotary_kernel``."""
    block = tl.program_id(1)
    p = tl.load(position + row).to(tl.int64)
    place = row if slot is None else tl.load(slot + row).to(tl.int64)
    num_query: tl.constexpr = QUERY_HEADS // HEADS
    num_key: tl.constexpr = KEY_HEADS // HEADS
    if block < num_query:
        at = block * HEADS * WIDTH
        turned_heads(
            query + row * query_stride + at, query_out + row * QUERY_HEADS * WIDTH + at, query_norm,
            cos, sin, factor, p, eps, HEADS, WIDTH, ROTARY, BLOCK, GEMMA, INTERLEAVED,
        )  # fmt: skip
    elif place < 0:
        pass
    elif block < num_query + num_key:
        at = (block - num_query) * HEADS * WIDTH
        turned_heads(
            key + row * key_stride + at, key_out + place * KEY_HEADS * WIDTH + at, key_norm,
            cos, sin, None, p, eps, HEADS, WIDTH, ROTARY, BLOCK, GEMMA, INTERLEAVED,
        )  # fmt: skip
    elif value_out is not None:
        at = (block - num_query - num_key) * HEADS * WIDTH
        head = tl.arange(0, HEADS)[:, None] * WIDTH
        d = tl.arange(0, BLOCK)[None, :]
        v = tl.load(value + row * value_stride + at + head + d, mask=d < WIDTH, other=0.0)
        tl.store(value_out + place * KEY_HEADS * WIDTH + at + head + d, v, mask=d < WIDTH)


@triton.jit
def turned_back(
    heads,  # of the first head, as it was
    grad,  # of the first head, turned
    grad_heads,
    norm_weight,  # [E] or None
    cos, sin, factor, position, eps,  # as of ``turned_heads``
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr, GEMMA: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Gradient of HEADS heads of one token; returns the norm weight's gradient [BLOCK]."""
    head = tl.arange(0, HEADS)[:, None] * WIDTH
    d = tl.arange(0, BLOCK)[None, :]
    inside = d < WIDTH
    turns = d < ROTARY
    other, sign = partner(d, ROTARY, INTERLEAVED)
    g = tl.load(grad + head + d, mask=inside, other=0.0).to(tl.float32)
    if ROTARY > 0:
        across = tl.load(grad + head + other, mask=inside, other=0.0).to(tl.float32)
        straight = g * tl.load(cos + position * ROTARY + d, mask=turns, other=0.0).to(tl.float32)
        crossed = across * tl.load(sin + position * ROTARY + other, mask=turns, other=0.0).to(tl.float32)
        g = tl.where(turns, straight - sign * crossed, g)
    if factor is not None:
        g = g * tl.load(factor + position)
    summed = tl.zeros((BLOCK,), tl.float32)
    if norm_weight is not None:
        x = tl.load(heads + head + d, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(norm_weight + d, mask=inside, other=0.0).to(tl.float32)
        if GEMMA:
            w = 1.0 + w
        inverse = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        unit = x * inverse
        summed = tl.sum(g * unit, 0)
        g = g * w
        g = inverse * (g - unit * (tl.sum(g * unit, 1) / WIDTH)[:, None])
    tl.store(grad_heads + head + d, g.to(grad_heads.dtype.element_ty), mask=inside)
    return summed


@quick_launch
@triton.jit(do_not_specialize=["num_rows", "rows_per_program"])
def rotary_backward_kernel(
    query,  # [T, H * E] as the forward read it, a row ``query_stride`` after the other; only norms read it
    key,  # [T, K * E] likewise
    grad_query_out,  # [T, H, E] contiguous
    grad_key_out,  # [T, K, E] contiguous
    grad_value_out,  # [T, K, E] contiguous
    grad,  # [T, (H + 2 K) * E] of query, key and value, side by side
    position,  # [T]
    cos,  # [P, R] by position; None if R is 0
    sin,  # [P, R]
    factor,  # [P] float32 of queries, or None
    query_norm,  # [E] or None
    key_norm,  # [E] or None
    query_parts,  # [programs, H / HEADS, E] float32, or None
    key_parts,  # [programs, K / HEADS, E] float32, or None
    eps, query_stride, key_stride,
    num_rows,  # T
    rows_per_program,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK: tl.constexpr, GEMMA: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Some heads of consecutive tokens."""
    block = tl.program_id(1)
    num_query: tl.constexpr = QUERY_HEADS // HEADS
    num_key: tl.constexpr = KEY_HEADS // HEADS
    total: tl.constexpr = (QUERY_HEADS + 2 * KEY_HEADS) * WIDTH
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    count = tl.minimum(rows_per_program, num_rows - first)
    at = block * HEADS * WIDTH
    inside = tl.arange(0, BLOCK) < WIDTH
    if block < num_query:
        summed = tl.zeros((BLOCK,), tl.float32)
        for i in range(count):
            row = first + i
            p = tl.load(position + row).to(tl.int64)
            summed += turned_back(
                query + row * query_stride + at, grad_query_out + row * QUERY_HEADS * WIDTH + at,
                grad + row * total + at, query_norm, cos, sin, factor, p, eps, HEADS, WIDTH, ROTARY, BLOCK, GEMMA,
                INTERLEAVED,
            )  # fmt: skip
        if query_parts is not None:
            part = (tl.program_id(0) * num_query + block) * WIDTH + tl.arange(0, BLOCK)
            tl.store(query_parts + part, summed, mask=inside)
    elif block < num_query + num_key:
        of_key = at - QUERY_HEADS * WIDTH
        summed = tl.zeros((BLOCK,), tl.float32)
        for i in range(count):
            row = first + i
            p = tl.load(position + row).to(tl.int64)
            summed += turned_back(
                key + row * key_stride + of_key, grad_key_out + row * KEY_HEADS * WIDTH + of_key,
                grad + row * total + at, key_norm, cos, sin, None, p, eps, HEADS, WIDTH, ROTARY, BLOCK, GEMMA,
                INTERLEAVED,
            )  # fmt: skip
        if key_parts is not None:
            part = (tl.program_id(0) * num_key + block - num_query) * WIDTH + tl.arange(0, BLOCK)
            tl.store(key_parts + part, summed, mask=inside)
    else:
        of_value = at - (QUERY_HEADS + KEY_HEADS) * WIDTH
        head = tl.arange(0, HEADS)[:, None] * WIDTH
        d = tl.arange(0, BLOCK)[None, :]
        for i in range(count):
            row = first + i
            v = tl.load(grad_value_out + row * KEY_HEADS * WIDTH + of_value + head + d, mask=d < WIDTH, other=0.0)
            tl.store(grad + row * total + at + head + d, v, mask=d < WIDTH)


@dataclass(frozen=True)
class Heads:
    """Counts and widths: H query heads, K key heads, E numbers each, of which the first R are rotated.

    ``interleaved``: neighbours are rotated together, else halves.
    """

    query: int
    key: int
    width: int
    rotary: int
    interleaved: bool = False

    @property
    def together(self) -> int:
        """Heads a program takes: a power of two that divides both counts, 8 at most."""
        return math.gcd(8, math.gcd(self.query, self.key))

    @property
    def block(self) -> int:
        """Numbers a program holds of a head."""
        return power_of_two(self.width)

    @property
    def warps(self) -> int:
        """Of a program. Depends on the shape only: the order of a norm's sum depends on it."""
        return 4 if self.together * self.block >= 512 else 1


def rotate(
    query: Tensor, key: Tensor, value: Tensor, heads: Heads, position: Tensor, cos: Tensor | None, sin: Tensor | None,
    norms: HeadNorms | None, *, factor: Tensor | None = None, key_out: Tensor | None = None,
    value_out: Tensor | None = None, slot: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normed and rotated queries and keys, and values, as heads.

    Args:
        query, key, value: [T, H * E] and [T, K * E] with contiguous rows; may be columns of one tensor.
        heads: counts and widths.
        position: [T] in the sequence.
        cos, sin: [P, R] contiguous, in the dtype of the query, or float32 if ``interleaved``; None if R is 0.
        norms: of query and key heads.
        factor: [P] float32, of queries.
        key_out, value_out: [S, K, E] to write to, such as a cache; None: new tensors.
        slot: [T] each token's row in ``key_out`` and ``value_out``; -1: not written.

    Returns:
        [T, H, E] and two of [T, K, E] (or those given).
    """
    if norms is not None and norms.over_all(heads):
        query, key = (cast(Tensor, norm(x, w, norms.eps)[1]) for x, w in ((query, norms.query), (key, norms.key)))
        norms = None
    rows = query.shape[0]
    query_out = query.new_empty(rows, heads.query, heads.width)
    key_out = key.new_empty(rows, heads.key, heads.width) if key_out is None else key_out
    value_out = value.new_empty(rows, heads.key, heads.width) if value_out is None else value_out
    blocks = (heads.query + 2 * heads.key) // heads.together
    tokens = next(count for count in (TOKENS, 1) if rows % count == 0) if rows >= MANY else 1
    query_norm, key_norm, eps, gemma = norms or (None, None, 0.0, False)
    rotary_kernel[(rows // tokens, blocks)](
        query, key, value, query_out, key_out, value_out, position, slot, cos, sin, factor, query_norm, key_norm,
        eps, query.stride(0), key.stride(0), value.stride(0),
        QUERY_HEADS=heads.query, KEY_HEADS=heads.key, HEADS=heads.together, WIDTH=heads.width, ROTARY=heads.rotary,
        BLOCK=heads.block, GEMMA=gemma, INTERLEAVED=heads.interleaved, TOKENS=tokens, num_warps=heads.warps,
        **overlapping(query.device),
    )  # fmt: skip
    return query_out, key_out, value_out


def rotate_backward(
    query: Tensor, key: Tensor, heads: Heads, position: Tensor, cos: Tensor | None, sin: Tensor | None,
    norms: HeadNorms | None, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, *,
    norm_dtypes: tuple[torch.dtype, torch.dtype] | None, factor: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradient of query, key and value side by side, [T, (H + 2 K) * E], and of the two norms' weights.

    Args:
        norm_dtypes: of the gradients of the norms' weights, query's and key's; None if they are not needed.
    """
    if norms is not None and norms.over_all(heads):
        return _normed_backward(
            query, key, heads, position, cos, sin, norms, grad_query, grad_key, grad_value, norm_dtypes, factor
        )
    rows = query.shape[0]
    grad = query.new_empty(rows, (heads.query + 2 * heads.key) * heads.width)
    blocks = (heads.query + 2 * heads.key) // heads.together
    per_program = divided_up(rows, 2048 if query.is_cuda else 2)
    programs = divided_up(rows, per_program)
    query_parts = key_parts = None
    query_norm, key_norm, eps, gemma = norms or (None, None, 0.0, False)
    if norms is not None and norm_dtypes is not None:
        query_parts = grad.new_empty(programs, heads.query // heads.together, heads.width, dtype=torch.float32)
        key_parts = grad.new_empty(programs, heads.key // heads.together, heads.width, dtype=torch.float32)
    rotary_backward_kernel[(programs, blocks)](
        query, key, grad_query, grad_key, grad_value, grad, position, cos, sin, factor, query_norm, key_norm,
        query_parts, key_parts, eps, query.stride(0), key.stride(0), rows, per_program,
        QUERY_HEADS=heads.query, KEY_HEADS=heads.key, HEADS=heads.together, WIDTH=heads.width, ROTARY=heads.rotary,
        BLOCK=heads.block, GEMMA=gemma, INTERLEAVED=heads.interleaved, num_warps=heads.warps,
    )  # fmt: skip
    if norm_dtypes is None or query_parts is None or key_parts is None:
        return grad, None, None
    return (
        grad,
        sum_parts(query_parts.flatten(0, 1), norm_dtypes[0]),
        sum_parts(key_parts.flatten(0, 1), norm_dtypes[1]),
    )


def _normed_backward(
    query: Tensor, key: Tensor, heads: Heads, position: Tensor, cos: Tensor | None, sin: Tensor | None,
    norms: HeadNorms, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor,
    dtypes: tuple[torch.dtype, torch.dtype] | None, factor: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """``rotate_backward`` for norms over all heads of a token."""
    grad, _, _ = rotate_backward(
        query, key, heads, position, cos, sin, None, grad_query, grad_key, grad_value, norm_dtypes=None,
        factor=factor,
    )  # fmt: skip
    of_query, of_key, _ = grad.split((query.shape[1], key.shape[1], key.shape[1]), 1)  # type: ignore[no-untyped-call]
    of_weights = [
        norm_backward(rows, weight, norms.eps, part, None, gemma=False, weight_dtype=dtype, in_place=True)[1]
        for rows, weight, part, dtype in zip(
            (query, key), (norms.query, norms.key), (of_query, of_key), dtypes or (None, None), strict=True
        )
    ]
    return grad, of_weights[0], of_weights[1]
