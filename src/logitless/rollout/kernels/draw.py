"""Tokens drawn from rows of logits, where nothing that decides is a sum whose order could change.

A token is drawn by its Gumbel: ``argmax_v z_v / T + g_v`` has the distribution ``softmax(z / T)``, and a maximum does
not depend on the order in which it is looked for. ``g_v = -log(-log(1 - u_v))`` with u of 32 bits by Philox, whose key
is the row's and whose counter is (column, position): the noise of a token is a function of these alone.

Filters are one threshold a row. It is found by bisection over the bits of the logits, with counts, or with
probabilities in fixed point, as what is added up: sums of integers have no order either.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

QUARTER = 256
"""Columns whose noise comes from one output of Philox, which has four."""

TILE = 4 * QUARTER

_NAN = tl.constexpr(0x7FFFFFFF)
_LOWEST = tl.constexpr(-0x7F800001)  # what ordered(-inf) is
_FIXED = tl.constexpr(1 << 40)  # the largest probability in fixed point: 2^18 columns of it fit into int64


@triton.jit
def ordered(x):
    """int32 that are ordered as the float32 are; its own inverse, but for the type."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def gumbel(bits):
    """-log(-log(1 - u)), u = (bits + 1/2) / 2^32; small u, which win, keep all their digits."""
    u = (bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))
    whole = -tl.log(tl.maximum(1.0 - u, 2.9802322e-08))
    return -tl.log(tl.where(u < 0.0009765625, series, whole))


@triton.jit
def _best_of(row, column, columns, temperature, lowest, bits, NOISE: tl.constexpr, FILTER: tl.constexpr):
    """The highest (score, lowest column) of some columns in one int64; a NaN is higher than anything."""
    inside = column < columns
    z = tl.load(row + column, mask=inside, other=float("-inf")).to(tl.float32) / temperature
    score = z
    if FILTER:
        score = tl.where(z < lowest, float("-inf"), score)
    if NOISE:
        score = score + gumbel(bits)
    rank = tl.where(z != z, _NAN, ordered(score)).to(tl.int64)
    return tl.max((rank << 32) | (0xFFFFFFFF - column.to(tl.int64)), 0)


@triton.jit
def draw_kernel(
    logits,  # [R, V]
    lowest,  # [R] float32, of the logits over temperature that may be drawn; or None
    key,  # [R] int64
    position,  # [R] int32
    best,  # [R, tiles] int64
    columns,  # V
    stride,
    temperature,
    NOISE: tl.constexpr,
    FILTER: tl.constexpr,
    QUARTER: tl.constexpr,
):
    """One tile of one row."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, QUARTER)
    none = tl.zeros([QUARTER], tl.int32)
    a, b, c, d = none, none, none, none
    if NOISE:
        a, b, c, d = tl.philox(tl.load(key + row), tile * QUARTER + lane, none + tl.load(position + row), none, none)
    least = 0.0
    if FILTER:
        least = tl.load(lowest + row)
    start, first = logits + row * stride, tile * 4 * QUARTER + lane
    x = _best_of(start, first, columns, temperature, least, a, NOISE, FILTER)
    x = tl.maximum(x, _best_of(start, first + QUARTER, columns, temperature, least, b, NOISE, FILTER))
    x = tl.maximum(x, _best_of(start, first + 2 * QUARTER, columns, temperature, least, c, NOISE, FILTER))
    x = tl.maximum(x, _best_of(start, first + 3 * QUARTER, columns, temperature, least, d, NOISE, FILTER))
    tl.store(best + row * tl.num_programs(1) + tile, x)


@triton.jit
def _scaled(row, start, columns, temperature, BLOCK: tl.constexpr):
    """Logits over temperature of a block of columns, -inf outside."""
    column = start + tl.arange(0, BLOCK)
    return tl.load(row + column, mask=column < columns, other=float("-inf")).to(tl.float32) / temperature


@triton.jit
def _weight(row, columns, temperature, top, least, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Of the columns at or above ``least``: how many, or their probabilities in fixed point, the largest being 1."""
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
    """The highest threshold whose columns weigh at least ``needed``, as ``ordered`` counts; ``low`` where none does."""
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
    columns,
    stride,
    temperature,
    top_k,
    top_p,
    log_min_p,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: the lowest logit over temperature that is kept, and the log of the sum of exponentials of what is."""
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


def draw_rows(
    logits: Tensor, key: Tensor, position: Tensor, *, temperature: float, noise: bool, lowest: Tensor | None
) -> Tensor:
    """[R] int64: rank of the highest score above 32 bits that count down from the lowest column that has it."""
    rows, columns = logits.shape
    tiles = triton.cdiv(columns, TILE)
    best = logits.new_empty(rows, tiles, dtype=torch.int64)
    draw_kernel[(rows, tiles)](
        logits, lowest, key, position, best, columns, logits.stride(0), float(temperature),
        NOISE=noise, FILTER=lowest is not None, QUARTER=QUARTER, num_warps=4,
    )  # fmt: skip
    return best.amax(1)


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
