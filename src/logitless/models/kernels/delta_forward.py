"""Kernels of the gated delta rule in chunks: training, prefill and decoding have bitwise identical outputs.

For each value head, with keys and queries of length 1, G the sum of the log-decays since the chunk's start, S the state
[K, V] there, and rows i, j of the chunk:

    A_ij = beta_i exp(G_i - G_j) k_i . k_j   (j < i),     P_ij = exp(G_i - G_j) q_i . k_j   (j <= i)
    T = (I + A)^-1,   M = P T                                                    ``solve_kernel``
    R_i = beta_i (v_i - exp(G_i) k_i S)
    out_i = scale (exp(G_i) q_i S + sum_j M_ij R_j)                              ``scan_kernel``
    S <- exp(G_C) S + sum_j exp(G_C - G_j) k_j (T R)_j                           at the end of the chunk

Row i of T, M and R depends on rows up to i only. So a decoding step (``step_kernel``) needs the state at the chunk's
start and rows k, G, T and R of the chunk so far, computes row i of each by the same sums in the same order, and writes
one row; ``advance_kernel`` moves the state on when a chunk ends. Chunks start at multiples of C of a sequence's
positions. For equal bits:

- products are ``tl.dot`` with the whole depth in one call: a row of a product depends on that row of the left operand
  only, and products with rows or columns that are masked add zeros;
- T is found row by row inside blocks of 16 rows (each finished row rounded, then subtracted from later rows by one
  fused multiply-add an element), and before that by one product with the finished blocks;
- sums over rows or columns are used only to pick an element, where all other terms are 0;
- a product that is added is an explicit ``fma``, so that no compiler chooses.

G counts in powers of two. The state is float32; products take its rounding to bfloat16 (half away from zero, so that
the other 16 bits restore it): a step reads only that half of the state.
"""

import triton
import triton.language as tl

from logitless.models.kernels.overlap import after_inputs
from logitless.quick_launch import quick_launch

BLOCK = tl.constexpr(16)
COLUMNS = tl.constexpr(9)
"""Of the table of segments: first token, first position, end, first chunk; then, -1 for none, rows of the state before
the segment, of that state's gradient, and of the state at the start of its unfinished chunk; then the first of the
gradients of segments that begin with the latter, and their number."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def high_half(state, WIDE: tl.constexpr):
    """A float32 state as an operand: in bfloat16, half away from zero; or itself if WIDE."""
    if WIDE:
        high = state
    else:
        # The sum may turn a NaN into a number; 0x7FFF is a NaN with whatever other half.
        bits = tl.where(state == state, state.to(tl.int32, bitcast=True) + 0x8000, 0x7FFF0000)
        high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high


@triton.jit
def low_half(state):
    """What ``high_half`` leaves out, as 16 bits."""
    return (state.to(tl.int32, bitcast=True) & 0xFFFF).to(tl.int16)


@triton.jit
def from_halves(high, low):
    """The float32 state of ``high_half`` and ``low_half``."""
    low = low.to(tl.int32)
    top = high.to(tl.int16, bitcast=True).to(tl.int32) - (low < 0).to(tl.int32)
    return ((top << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def rows_at(segments, segment, chunk, row, C: tl.constexpr):
    """Tokens of a chunk's rows (0 for none) and which rows exist; a segment is a sequence or its continuation."""
    at = segments + segment * COLUMNS
    first_token = tl.load(at).to(tl.int64)
    start = tl.load(at + 1)  # its first position
    stop = tl.load(at + 2)
    first_chunk = tl.load(at + 3)
    position = (start // C + chunk - first_chunk) * C + row
    live = (position >= start) & (position < stop)
    return tl.where(live, first_token + position - start, 0), live


@triton.jit
def chunk_rows(segments, segment, chunk, C: tl.constexpr):
    """``rows_at`` of all rows."""
    return rows_at(segments, segment, chunk, tl.arange(0, C), C)


@triton.jit
def block_rows(segments, segment, chunk, block, C: tl.constexpr):
    """``rows_at`` of 16 rows."""
    return rows_at(segments, segment, chunk, block + tl.arange(0, BLOCK), C)


@quick_launch
@triton.jit(do_not_specialize=["num_rows"])
def unit_kernel(
    query,  # [T, H, K], rows ``query_stride`` apart
    key,  # [T, H, K], rows ``key_stride`` apart
    unit_query,  # [T, H, K] contiguous
    unit_key,  # [places, H, K] contiguous
    place,  # [T] int32: where a token's key goes; -1: nowhere; None: place t
    num_rows,  # T * H
    query_stride, key_stride,
    H: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Queries or keys of length 1: ``x * rsqrt(sum(x^2) + 1e-6)``."""
    after_inputs(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    token = row.to(tl.int64) // H
    head = row % H
    column = tl.arange(0, K)[None, :]
    if tl.program_id(1) == 0:
        x_at = query + (token * query_stride + head * K)[:, None] + column
        out_at = unit_query + (token * H + head)[:, None] * K + column
        stored = inside
    else:
        x_at = key + (token * key_stride + head * K)[:, None] + column
        to = token
        stored = inside
        if place is not None:
            to = tl.load(place + token, mask=inside, other=-1).to(tl.int64)
            stored = inside & (to >= 0)
        out_at = unit_key + (to * H + head)[:, None] * K + column
    x = tl.load(x_at, mask=inside[:, None], other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) + 1e-6)
    tl.store(out_at, (x * inverse[:, None]).to(unit_query.dtype.element_ty), mask=stored[:, None])


@quick_launch
@triton.jit
def decay_kernel(
    log_decay,  # [T, HV] float32, in nats
    total,  # [chunks, HV, C] float32, written: G, in powers of two
    segments,
    segment_of,  # [chunks] int32
    HV: tl.constexpr,
    HEADS: tl.constexpr,  # HV padded to a power of two
    C: tl.constexpr,
):
    """Sums of the log-decays since a chunk's start, one term after the other."""
    chunk = tl.program_id(0)
    head = tl.arange(0, HEADS)
    at = segments + tl.load(segment_of + chunk) * COLUMNS
    first_token = tl.load(at).to(tl.int64)
    start = tl.load(at + 1)
    stop = tl.load(at + 2)
    position = (start // C + chunk - tl.load(at + 3)) * C
    summed = tl.zeros((HEADS,), tl.float32)
    for block in range(0, C, 16):
        for i in tl.static_range(16):  # unrolled, so that their loads overlap
            now = position + block + i
            inside = (now >= start) & (now < stop) & (head < HV)
            g = tl.load(log_decay + (first_token + now - start) * HV + head, mask=inside, other=0.0)
            summed = tl.fma(g, LOG2E, summed)
            tl.store(total + (chunk.to(tl.int64) * HV + head) * C + block + i, summed, mask=head < HV)


@triton.jit
def decay_between(total_i, total_j, mask):
    """``2^(G_i - G_j)`` where the mask is true, else 0; without overflow elsewhere."""
    return tl.where(mask, tl.exp2(tl.where(mask, total_i - total_j, 0.0)), 0.0)


@quick_launch
@triton.jit
def inverse_kernel(
    unit_key,  # [T, H, K]
    beta,  # [T, HV]
    total,  # [chunks, HV, C]
    segments, segment_of,
    inverse,  # [chunks, HV, C, BLOCK] float32 written: (I + A)^-1 of each block of 16 rows and columns
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,  # of products of float32
):  # fmt: skip
    """The inverse of one block on the diagonal, row by row."""
    chunk = tl.program_id(0) // (C // BLOCK)
    block = tl.program_id(0) % (C // BLOCK) * BLOCK
    head = tl.program_id(1)
    r = tl.arange(0, BLOCK)
    token, live = block_rows(segments, tl.load(segment_of + chunk), chunk, block, C)
    place = chunk.to(tl.int64) * HV + head
    depth = tl.arange(0, K)
    keys = tl.load(
        unit_key + (token * H + head // (HV // H))[:, None] * K + depth[None, :], mask=live[:, None], other=0.0
    )
    beta_i = tl.load(beta + token * HV + head, mask=live, other=0.0).to(tl.float32)
    total_i = tl.load(total + place * C + block + r)
    lower = r[None, :] < r[:, None]
    decay = decay_between(total_i[:, None], total_i[None, :], lower)
    a = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * decay * beta_i[:, None]
    x = tl.where(r[None, :] == r[:, None], 1.0, 0.0)
    for j in tl.static_range(BLOCK - 1):
        factor = tl.sum(tl.where((r == j)[None, :], a, 0.0), 1)
        finished = tl.sum(tl.where((r == j)[:, None], x, 0.0), 0)
        x = tl.fma(-factor[:, None], finished[None, :], x)
    tl.store(inverse + (place * C + block + r)[:, None] * BLOCK + r[None, :], x)


@triton.jit
def left_of_block(inverse, a, solved, column, block, PRECISION: tl.constexpr):
    """Rows of T left of a block on the diagonal: ``-inverse (A T)``, by the finished rows of T above it."""
    above = tl.dot(tl.where((column < block)[None, :], -a, 0.0), solved, input_precision=PRECISION)
    return tl.dot(inverse, above, input_precision=PRECISION)


@quick_launch
@triton.jit
def solve_kernel(
    unit_query,  # [T, H, K]
    unit_key,  # [T, H, K]
    beta,  # [T, HV]
    total,  # [chunks, HV, C]
    segments, segment_of,
    inverse,  # [chunks, HV, C, BLOCK] float32
    solve,  # [chunks, HV, C, C] written: T
    mix,  # [chunks, HV, C, C] written: M
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T and M of one chunk and value head, by blocks of 16 rows."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    segment = tl.load(segment_of + chunk)
    token, live = chunk_rows(segments, segment, chunk, C)
    place = chunk.to(tl.int64) * HV + head
    kind = solve.dtype.element_ty
    column = tl.arange(0, C)
    depth = tl.arange(0, K)
    r = tl.arange(0, BLOCK)
    of_key = head // (HV // H)
    keys = tl.load(unit_key + (token * H + of_key)[:, None] * K + depth[None, :], mask=live[:, None], other=0.0)
    total_j = tl.load(total + place * C + column)
    solved_at = solve + (place * C + column)[:, None] * C + column[None, :]
    solved = tl.zeros((C, C), tl.float32)
    for b in tl.static_range(C // BLOCK):
        block = b * BLOCK
        i = block + r
        token_i, live_i = block_rows(segments, segment, chunk, block, C)
        at_i = (token_i * H + of_key)[:, None] * K + depth[None, :]
        query_i = tl.load(unit_query + at_i, mask=live_i[:, None], other=0.0)
        total_i = tl.load(total + place * C + i)
        decay = decay_between(total_i[:, None], total_j[None, :], column[None, :] <= i[:, None])
        to = (place * C + i)[:, None] * C
        own = tl.load(inverse + (place * C + i)[:, None] * BLOCK + r[None, :])
        if b > 0:
            key_i = tl.load(unit_key + at_i, mask=live_i[:, None], other=0.0)
            beta_i = tl.load(beta + token_i * HV + head, mask=live_i, other=0.0).to(tl.float32)
            a = tl.dot(key_i, tl.trans(keys), input_precision=PRECISION) * decay * beta_i[:, None]
            left = left_of_block(own, a, solved, column, block, PRECISION)
            tl.store(solve + to + column[None, :], left.to(kind), mask=column[None, :] < block)
        tl.store(solve + to + column[None, :], tl.zeros((BLOCK, C), kind), mask=column[None, :] >= block + BLOCK)
        tl.store(solve + to + block + r[None, :], own.to(kind))
        tl.debug_barrier()  # the program's other threads read these rows
        solved = tl.load(solved_at, mask=(column < block + BLOCK)[:, None], other=0.0).to(tl.float32)
        p = tl.dot(query_i, tl.trans(keys), input_precision=PRECISION) * decay
        m = tl.dot(p, solved, input_precision=PRECISION)
        tl.store(mix + to + column[None, :], m.to(kind))


@triton.jit
def new_rows(beta, decay, of_state, value, kind: tl.constexpr):
    """R: what the chunk's starting state does not predict of the values."""
    return (beta * tl.fma(-decay, of_state, value.to(tl.float32))).to(kind)


@triton.jit
def outputs(queries, operand, mixed, rows, decay, scale, PRECISION: tl.constexpr):
    """Outputs of a chunk, float32."""
    inside = tl.dot(mixed, rows, input_precision=PRECISION)
    before = tl.dot(queries, operand, input_precision=PRECISION)
    return scale * tl.fma(decay[:, None], before, inside)


@triton.jit
def advanced(state, keys, solved, rows, total, last, PRECISION: tl.constexpr):
    """The state after a chunk, and ``T R`` in float32.

    Args:
        state: [K, V] float32.
        keys: [C, K].
        solved: T [C, C].
        rows: R [C, V].
        total: G [C].
        last: G of the last row.
    """
    delta = tl.dot(solved, rows, input_precision=PRECISION)
    kept = (delta * tl.exp2(last - total)[:, None]).to(rows.dtype)
    return tl.dot(tl.trans(keys), kept, state * tl.exp2(last), input_precision=PRECISION), delta


@quick_launch
@triton.jit
def scan_kernel(
    unit_query,  # [T, H, K]
    unit_key,  # [T, H, K]
    value,  # [T, HV, V], rows ``value_stride`` apart
    beta,  # [T, HV]
    total,  # [chunks, HV, C]
    segments,  # [S, COLUMNS] int32
    order,  # [n] int32: segments that do not begin with each other's states, longest first
    solve,  # [chunks, HV, C, C]
    mix,  # [chunks, HV, C, C]
    out,  # [T, HV, V], or None
    states,  # [chunks, HV, K, V] each chunk's starting state as an operand, or None
    deltas,  # [T, HV, V] T R, or None
    high,  # [rows, HV, K, V] states before segments, and at the start of their unfinished chunk; None: none is used
    low,  # the same, their low halves; None in float32
    rest,  # [rows, HV, C, V] R of the unfinished chunk, or None
    value_stride, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks of a segment, for one value head and some columns of its values."""
    head = tl.program_id(0) // (V // BV)
    segment = tl.load(order + tl.program_id(1))
    at = segments + segment * COLUMNS
    start = tl.load(at + 1)
    stop = tl.load(at + 2)
    first = tl.load(at + 3)
    after_row = tl.load(at + 6)
    kind = unit_key.dtype.element_ty
    r = tl.arange(0, C)
    depth = tl.arange(0, K)
    column = (tl.program_id(0) % (V // BV)) * BV + tl.arange(0, BV)
    state = tl.zeros((K, BV), tl.float32)
    if high is not None:
        before = tl.load(at + 4)
        if before >= 0:
            source = ((before.to(tl.int64) * HV + head) * K + depth)[:, None] * V + column[None, :]
            state = tl.load(high + source)
            if not WIDE:
                state = from_halves(state, tl.load(low + source))
    for n in range(tl.cdiv(stop, C) - start // C):
        chunk = first + n
        token, live = chunk_rows(segments, segment, chunk, C)
        ok = live[:, None]
        place = chunk.to(tl.int64) * HV + head
        at_key = (token * H + head // (HV // H))[:, None] * K + depth[None, :]
        at_value = token[:, None] * value_stride + head * V + column[None, :]
        at_out = (token * HV + head)[:, None] * V + column[None, :]
        keys = tl.load(unit_key + at_key, mask=ok, other=0.0)
        values = tl.load(value + at_value, mask=ok, other=0.0)
        beta_i = tl.load(beta + token * HV + head, mask=live, other=0.0).to(tl.float32)
        total_i = tl.load(total + place * C + r)
        last = tl.load(total + place * C + C - 1)
        solved = tl.load(solve + (place * C + r)[:, None] * C + r[None, :])
        decay = tl.exp2(total_i)
        operand = high_half(state, WIDE)
        if states is not None:
            tl.store(states + (place * K + depth)[:, None] * V + column[None, :], operand)
        of_state = tl.dot(keys, operand, input_precision=PRECISION)
        rows = new_rows(beta_i[:, None], decay[:, None], of_state, values, kind)
        if out is not None:
            queries = tl.load(unit_query + at_key, mask=ok, other=0.0)
            mixed = tl.load(mix + (place * C + r)[:, None] * C + r[None, :])
            result = outputs(queries, operand, mixed, rows, decay, scale, PRECISION)
            tl.store(out + at_out, result.to(kind), mask=ok)
        whole = (start // C + chunk - first + 1) * C <= stop
        if rest is not None:
            to = (after_row.to(tl.int64) * HV + head) * C + r
            tl.store(rest + to[:, None] * V + column[None, :], rows, mask=ok & (not whole) & (after_row >= 0))
        after, delta = advanced(state, keys, solved, rows, total_i, last, PRECISION)
        if deltas is not None:
            tl.store(deltas + at_out, delta.to(deltas.dtype.element_ty), mask=ok)
        state = tl.where(whole, after, state)
    if high is not None:  # noqa: SIM102 decided in compilation, unlike the next
        if after_row >= 0:
            to = (after_row.to(tl.int64) * HV + head) * K + depth
            tl.store(high + to[:, None] * V + column[None, :], high_half(state, WIDE))
            if not WIDE:
                tl.store(low + to[:, None] * V + column[None, :], low_half(state))


@triton.jit
def row_of(tile, index):
    """One row of a tile, as a vector: all other terms of the sum are 0."""
    r = tl.arange(0, tile.shape[0])
    return tl.sum(tl.where((r == index)[:, None], tile, 0.0), 0)


@quick_launch
@triton.jit
def step_kernel(
    unit_query,  # [R, H, K]
    value,  # [R, HV, V], rows ``value_stride`` apart
    log_decay,  # [R, HV] float32
    beta,  # [R, HV]
    slot,  # [R] int32; -1: no token
    index,  # [R] int32: the token's row in its chunk
    keys,  # [slots * C, H, K] of the chunk; this token's key is there
    total,  # [slots, HV, C] G; a row of it and of the next four is added
    betas,  # [slots, HV, C] float32
    inverse,  # [slots, HV, C, BLOCK] float32
    solve,  # [slots, HV, C, C] T
    rest,  # [slots, HV, C, V] R
    high,  # [slots, HV, K, V] state at the chunk's start
    out,  # [R, HV, V]
    value_stride, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token of one sequence, for one value head, as a row of the tiles of its block of 16 rows."""
    after_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.load(slot + row).to(tl.int64)
    if at < 0:  # numbers all the same: a mixture's router reads this row too
        tl.store(out + (row * HV + head) * V + tl.arange(0, V), tl.zeros((V,), out.dtype.element_ty))
    if at >= 0:
        i = tl.load(index + row)
        kind = out.dtype.element_ty
        of_key = head // (HV // H)
        r = tl.arange(0, BLOCK)
        column = tl.arange(0, C)
        depth = tl.arange(0, K)
        place = at * HV + head
        block = i // BLOCK * BLOCK
        own = i - block
        j = block + r  # rows of the block
        # What is read.
        key_at = keys + ((at * C + column) * H + of_key)[:, None] * K + depth[None, :]
        chunk_keys = tl.load(key_at, mask=(column <= i)[:, None], other=0.0)
        block_at = keys + ((at * C + j) * H + of_key)[:, None] * K + depth[None, :]
        block_keys = tl.load(block_at, mask=(j <= i)[:, None], other=0.0)
        query_at = unit_query + (row * H + of_key) * K + depth[None, :] + tl.zeros((BLOCK, 1), tl.int32)
        query = tl.load(query_at)
        solved_at = solve + (place * C + column)[:, None] * C + column[None, :]
        solved = tl.load(solved_at, mask=(column < i)[:, None], other=0.0)
        before = tl.load(total + place * C + i - 1, mask=i > 0, other=0.0)
        total_i = tl.fma(tl.load(log_decay + row * HV + head), LOG2E, before)
        total_j = tl.where(column == i, total_i, tl.load(total + place * C + column, mask=column < i, other=0.0))
        total_r = tl.where(j == i, total_i, tl.load(total + place * C + j, mask=j < i, other=0.0))
        beta_i = tl.load(beta + row * HV + head).to(tl.float32)
        beta_r = tl.where(j == i, beta_i, tl.load(betas + place * C + j, mask=j < i, other=0.0))
        tl.store(total + place * C + i, total_i)
        tl.store(betas + place * C + i, beta_i)
        pair = tl.where((r == own)[:, None], block_keys, query)  # key and query
        other = tl.where(own == 0, 1, 0)
        # The row of the block's inverse: ``inverse_kernel``'s, for one row.
        known = (column[None, :] <= j[:, None]) & (j <= i)[:, None]  # later rows have no G, and must be 0
        decay = decay_between(total_r[:, None], total_j[None, :], known)
        a = tl.dot(block_keys, tl.trans(chunk_keys), input_precision=PRECISION) * decay * beta_r[:, None]
        a_i = row_of(a, own)
        x = tl.where(r == own, 1.0, 0.0)
        for step in tl.static_range(BLOCK - 1):
            factor = tl.sum(tl.where((column == block + step) & (column < i), a_i, 0.0), 0)
            at_step = inverse + (place * C + block + step) * BLOCK
            finished = tl.load(at_step + r, mask=(r <= step) & (step < own), other=0.0)
            x = tl.fma(-factor, finished, x)
        tl.store(inverse + (place * C + i) * BLOCK + r, x)
        # The row of T and of M.
        x_rows = x[None, :] + tl.zeros((BLOCK, BLOCK), tl.float32)
        left = row_of(left_of_block(x_rows, a, solved.to(tl.float32), column, block, PRECISION), 0)
        spread = tl.where(column[None, :] == j[:, None], x[:, None], 0.0)  # x at the block's columns
        solved_i = tl.where(column < block, left, tl.sum(spread, 0)).to(kind)
        tl.store(solve + (place * C + i) * C + column, solved_i)
        solved = tl.where((column == i)[:, None], solved_i[None, :], solved).to(tl.float32)
        decay_i = decay_between(total_i, total_j, column <= i)
        p = tl.dot(query, tl.trans(chunk_keys), input_precision=PRECISION) * decay_i[None, :]
        m = tl.dot(p, solved, input_precision=PRECISION).to(kind)
        # The row of R and the output.
        decay_i = tl.exp2(total_i)
        for start in tl.static_range(0, V, BV):
            v = start + tl.arange(0, BV)
            operand = tl.load(high + (place * K + depth)[:, None] * V + v[None, :])
            rest_at = rest + (place * C + column)[:, None] * V + v[None, :]
            rows = tl.load(rest_at, mask=(column < i)[:, None], other=0.0)
            of_state = tl.dot(pair, operand, input_precision=PRECISION)
            values = tl.load(value + row * value_stride + head * V + v)
            new = new_rows(beta_i, decay_i, row_of(of_state, own), values, kind)
            tl.store(rest + (place * C + i) * V + v, new)
            rows = tl.where((column == i)[:, None], new[None, :], rows)
            inside = row_of(tl.dot(m, rows, input_precision=PRECISION), 0)
            result = scale * tl.fma(decay_i, row_of(of_state, other), inside)
            tl.store(out + (row * HV + head) * V + v, result.to(kind))


@quick_launch
@triton.jit
def advance_kernel(
    slot,  # [R] int32
    index,  # [R] int32
    keys,  # [slots * C, H, K]
    total,  # [slots, HV, C]
    solve,  # [slots, HV, C, C]
    rest,  # [slots, HV, C, V]
    high,  # [slots, HV, K, V] read and written
    low,  # likewise; None in float32
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    HEADS: tl.constexpr,  # a program takes
    WIDE: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The states of a sequence whose chunk is full."""
    after_inputs(OVERLAP)
    row = tl.program_id(0)
    at = tl.load(slot + row).to(tl.int64)
    if (at >= 0) & (tl.load(index + row) == C - 1):
        r = tl.arange(0, C)
        depth = tl.arange(0, K)
        for task in range(HEADS * (V // BV)):
            head = tl.program_id(1) * HEADS + task // (V // BV)
            v = task % (V // BV) * BV + tl.arange(0, BV)
            place = at * HV + head
            chunk_keys = tl.load(keys + ((at * C + r) * H + head // (HV // H))[:, None] * K + depth[None, :])
            totals = tl.load(total + place * C + r)
            last = tl.load(total + place * C + C - 1)
            solved = tl.load(solve + (place * C + r)[:, None] * C + r[None, :])
            rows = tl.load(rest + (place * C + r)[:, None] * V + v[None, :])
            to = (place * K + depth)[:, None] * V + v[None, :]
            state = tl.load(high + to)
            if not WIDE:
                state = from_halves(state, tl.load(low + to))
            state, _ = advanced(state, chunk_keys, solved, rows, totals, last, PRECISION)
            tl.store(high + to, high_half(state, WIDE))
            if not WIDE:
                tl.store(low + to, low_half(state))
