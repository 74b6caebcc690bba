"""Token sampling from rows of logits, without floating-point sums, whose order could change the result.

A token is sampled with Gumbel noise: ``argmax_v z_v / T + g_v`` has the distribution ``softmax(z / T)``, and a maximum
does not depend on the order of comparison. ``g_v = -log(-log(1 - u_v))`` with u of 32 bits by Philox, whose key is the
row's and whose counter is (column, position).

Filters are one threshold a row. It is found by bisection over the bits of the logits. What is summed is integers
(counts, or probabilities in fixed point), so that the order does not matter either.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

QUARTER = 256
"""Columns whose noise comes from one output of Philox, which has four."""

TILE = 4 * QUARTER

PROGRAMS = 1056
"""Programs that fill a large GPU."""

LN2 = tl.constexpr(0.6931471805599453)
_NOTHING = tl.constexpr(-(1 << 63))  # where there was no column
_HIGHEST = tl.constexpr(0x7F800000)  # what ordered(inf) is
_NAN = tl.constexpr(0x7FFFFFFF)
_LOWEST = tl.constexpr(-0x7F800001)  # what ordered(-inf) is
_FIXED = tl.constexpr(1 << 40)  # the largest probability in fixed point: 2^18 columns of it fit into int64


@triton.jit
def ordered(x):
    """int32 in the same order as the float32; its own inverse, except for the type."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _log(x, FAST: tl.constexpr):
    """The logarithm. FAST: the hardware's, with an error below 2^-22: absolute near 1, relative elsewhere."""
    return (libdevice.fast_log2f(x) if FAST else tl.log2(x)) * LN2


@triton.jit
def gumbel(bits, FAST: tl.constexpr):
    """-log(-log(1 - u)), u = (bits + 1/2) / 2^32; by a series for small u, where 1 - u would lose digits."""
    u = (bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * 0.2))))
    whole = -_log(tl.maximum(1.0 - u, 2.9802322e-08), FAST)
    return -_log(tl.where(u < 0.0625, series, whole), FAST)


@triton.jit
def _better(
    best, at, row, column, columns, temperature, lowest, bits,
    SCALED: tl.constexpr, NOISE: tl.constexpr, FILTER: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The higher of two scores and its column, elementwise; NaN counts as highest."""
    inside = column < columns
    z = tl.load(row + column, mask=inside, other=float("-inf")).to(tl.float32)
    if SCALED:
        z = z / temperature
    score = z
    if NOISE:
        score = z + gumbel(bits, FAST)
    if FILTER:
        score = tl.where(z < lowest, float("-inf"), score)
    higher = ((score > best) | (z != z) | (at < 0)) & inside & (best == best)
    return tl.where(higher, score, best), tl.where(higher, column, at)


@triton.jit(do_not_specialize=["tiles"])
def sample_kernel(
    logits,  # [R, V]
    lowest,  # [R] float32, of the logits over temperature that may be sampled; or None
    key,  # [R] int64
    position,  # [R] int32
    best,  # [R, parts] int64
    columns,  # V
    stride, tiles, temperature,
    SCALED: tl.constexpr, NOISE: tl.constexpr, FILTER: tl.constexpr, FAST: tl.constexpr, QUARTER: tl.constexpr,
):  # fmt: skip
    """The best column of some tiles of one row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    where = tl.load(position + row)
    lane = tl.arange(0, QUARTER)
    none = tl.zeros([QUARTER], tl.int32)
    high = tl.full([QUARTER], float("-inf"), tl.float32)
    at = none - 1
    if where >= 0:
        least = 0.0
        if FILTER:
            least = tl.load(lowest + row)
        start = logits + row * stride
        seed = tl.load(key + row)
        first_tile = part * tiles
        for tile in range(first_tile, tl.minimum(first_tile + tiles, tl.cdiv(columns, 4 * QUARTER))):
            a, b, c, d = none, none, none, none
            if NOISE:
                a, b, c, d = tl.philox(seed, tile * QUARTER + lane, none + where, none, none)
            column = tile * 4 * QUARTER + lane
            high, at = _better(high, at, start, column, columns, temperature, least, a, SCALED, NOISE, FILTER, FAST)
            column += QUARTER
            high, at = _better(high, at, start, column, columns, temperature, least, b, SCALED, NOISE, FILTER, FAST)
            column += QUARTER
            high, at = _better(high, at, start, column, columns, temperature, least, c, SCALED, NOISE, FILTER, FAST)
            column += QUARTER
            high, at = _better(high, at, start, column, columns, temperature, least, d, SCALED, NOISE, FILTER, FAST)
    rank = tl.where(high != high, _NAN, ordered(high)).to(tl.int64)
    x = tl.where(at < 0, _NOTHING, (rank << 32) | (0xFFFFFFFF - at.to(tl.int64)))
    tl.store(best + row * tl.num_programs(1) + part, tl.max(x, 0))


@triton.jit(do_not_specialize=["parts"])
def finish_kernel(
    best,  # [R, parts] int64
    logits,  # [R, V], read where there is a ``log_normaliser``
    log_normaliser,  # [R] float32 or None
    token,  # [R] int64, written, as all below
    logp,  # [R] float32 or None
    finite,  # [R] bool
    parts, stride, temperature,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its token, whether the logits were finite, and the token's log-prob."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.max(tl.load(best + row * parts + i, mask=i < parts, other=_NOTHING), 0)
    sampled = tl.where(x == _NOTHING, 0, 0xFFFFFFFF - (x & 0xFFFFFFFF))
    rank = x >> 32
    sound = (rank < _HIGHEST) & (rank > -_HIGHEST - 1)
    tl.store(token + row, sampled)
    tl.store(finite + row, sound)
    if logp is not None:
        if log_normaliser is not None:
            z = tl.load(logits + row * stride + sampled).to(tl.float32) / temperature
            tl.store(logp + row, z - tl.load(log_normaliser + row))
        else:
            tl.store(logp + row, tl.where(sound, 0.0, float("nan")))


@triton.jit
def _scaled(row, start, columns, temperature, BLOCK: tl.constexpr):
    """Logits over temperature of a block of columns, -inf outside."""
    column = start + tl.arange(0, BLOCK)
    return tl.load(row + column, mask=column < columns, other=float("-inf")).to(tl.float32) / temperature


@triton.jit
def _weight(row, columns, temperature, top, least, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Number of columns at or above ``least``, or their sum of probabilities in fixed point, the largest being 1."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, columns, BLOCK):
        z = _scaled(row, start, columns, temperature, BLOCK)
        kept = ordered(z).to(tl.int64) >= least
        if COUNT:
            total += tl.where(kept & (z > float("-inf")), 1, 0).to(tl.int64)
        else:
            total += tl.where(kept, tl.exp(z - top) * _FIXED, 0.0).to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def _highest(row, columns, temperature, top, low, needed, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The highest threshold, in ``ordered`` form, whose columns weigh at least ``needed``; ``low`` if none does."""
    high = tl.maximum(ordered(top).to(tl.int64), low)
    for _ in range(33):
        middle = low + (high - low + 1) // 2
        enough = _weight(row, columns, temperature, top, middle, COUNT, BLOCK) >= needed
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, tl.maximum(middle - 1, low))
    return low


@triton.jit
def filter_kernel(
    logits,  # [R, V]
    lowest,  # [R] float32
    log_normaliser,  # [R] float32
    columns, stride, temperature, top_k, top_p, log_min_p,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the lowest logit over temperature that is kept, and the log-sum-exp of those kept."""
    place = tl.program_id(0).to(tl.int64)
    row = logits + place * stride
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, columns, BLOCK):
        highest = tl.maximum(highest, _scaled(row, start, columns, temperature, BLOCK))
    top = tl.max(highest, 0)
    least = tl.full([], _LOWEST, tl.int64)
    if TOP_K:
        least = _highest(row, columns, temperature, top, least, top_k, True, BLOCK)
    if TOP_P:
        whole = _weight(row, columns, temperature, top, least, False, BLOCK)
        least = _highest(
            row, columns, temperature, top, least, (whole.to(tl.float64) * top_p).to(tl.int64), False, BLOCK
        )
    if MIN_P:
        least = tl.maximum(least, ordered(top + log_min_p).to(tl.int64))
    bits = least.to(tl.int32)
    tl.store(lowest + place, (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))
    kept = _weight(row, columns, temperature, top, least, False, BLOCK).to(tl.float32) * (1.0 / _FIXED)
    tl.store(log_normaliser + place, top + tl.log(kept))


def sample_rows(
    logits: Tensor, key: Tensor, position: Tensor, *, temperature: float, noise: bool, lowest: Tensor | None,
    log_normaliser: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(token [R] int64, logp [R], finite [R] bool); a row at position -1 samples token 0.

    Args:
        log_normaliser: [R] of the filtered distribution; without it and with noise there is no logp.
    """
    rows, columns = logits.shape
    tiles = triton.cdiv(columns, TILE)
    each = 1  # tiles of a program; more only while there are enough programs to fill any GPU
    while each < 16 and rows * tiles >= 2 * each * PROGRAMS:
        each *= 2
    parts = triton.cdiv(tiles, each)
    best = logits.new_empty(rows, parts, dtype=torch.int64)
    token, finite = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.bool)
    logp = logits.new_empty(rows, dtype=torch.float32) if log_normaliser is not None or not noise else None
    sample_kernel[(rows, parts)](
        logits, lowest, key, position, best, columns, logits.stride(0), each, float(temperature),
        SCALED=temperature != 1, NOISE=noise, FILTER=lowest is not None, FAST=logits.is_cuda, QUARTER=QUARTER,
        num_warps=4,
    )  # fmt: skip
    finish_kernel[(rows,)](
        best, logits, log_normaliser, token, logp, finite, parts, logits.stride(0), float(temperature),
        BLOCK=triton.next_power_of_2(tiles), num_warps=1,
    )  # fmt: skip
    return token, logp, finite


def filter_rows(
    logits: Tensor, *, temperature: float, top_k: int | None, top_p: float, log_min_p: float | None
) -> tuple[Tensor, Tensor]:
    """(lowest [R], log normaliser [R]), float32."""
    rows, columns = logits.shape
    lowest, log_normaliser = logits.new_empty(2, rows, dtype=torch.float32)
    filter_kernel[(rows,)](
        logits, lowest, log_normaliser, columns, logits.stride(0), float(temperature),
        0 if top_k is None else min(top_k, columns), float(top_p), 0.0 if log_min_p is None else float(log_min_p),
        TOP_K=top_k is not None, TOP_P=top_p < 1, MIN_P=log_min_p is not None,
        BLOCK=min(8192, triton.next_power_of_2(columns)), num_warps=8,
    )  # fmt: skip
    return lowest, log_normaliser
