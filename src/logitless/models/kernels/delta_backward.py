"""Backward kernels of the gated delta rule in chunks; symbols as in ``delta_forward.py``. Deterministic, no atomics.

With D = T R, E_ij = exp(G_i - G_j), X = K S, dO scaled by ``scale``, and dS' the gradient of the state after the chunk:

    dR = M^T dO + T^T (exp(G_C - G) K dS')
    dS = exp(G_C) dS' - K^T (beta exp(G) dR) + (exp(G) Q)^T dO                   ``reverse_kernel``, last chunk first
    W = (dO D^T) E  (j <= i),   Z = -(dR D^T) E  (j < i)
    dQ = exp(G) dO S^T + W K
    dK = [beta Z K - beta exp(G) dR S^T] + [exp(G_C - G) D dS'^T + W^T Q + (beta Z)^T K]  = left + right
    dV = beta dR,   dbeta = sum_v dR V + K . (Z K - exp(G) dR S^T)
    dG = Q . dQ + K . (left - right);   dG_C += sum exp(G_C - G) K . (D dS'^T) + exp(G_C) sum S dS'
                                                                                 ``gradient_kernel``, a chunk a program
The states and D are recomputed by ``scan_kernel``.
"""

import triton
import triton.language as tl

from logitless.models.kernels.delta_forward import COLUMNS, chunk_rows, decay_between
from logitless.quick_launch import quick_launch


@quick_launch
@triton.jit
def reverse_kernel(
    unit_query,  # [T, H, K]
    unit_key,  # [T, H, K]
    grad_out,  # [T, HV, V]
    beta,  # [T, HV]
    total,  # [chunks, HV, C]
    segments, order,
    solve,  # [chunks, HV, C, C]
    mix,  # [chunks, HV, C, C]
    grad_states,  # [chunks, HV, K, V] written: gradient of the state after each chunk
    grad_rows,  # [T, HV, V] written: dR
    grad_before,  # [rows, HV, K, V] float32 written: gradients of states before segments; None: none is used
    scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks of a segment, last first, for one value head and some columns of its values."""
    head = tl.program_id(0) // (V // BV)
    segment = tl.load(order + tl.program_id(1))
    at = segments + segment * COLUMNS
    first = tl.load(at + 3)
    count = tl.cdiv(tl.load(at + 2), C) - tl.load(at + 1) // C
    kind = unit_key.dtype.element_ty
    r = tl.arange(0, C)
    depth = tl.arange(0, K)
    column = (tl.program_id(0) % (V // BV)) * BV + tl.arange(0, BV)
    grad = tl.zeros((K, BV), tl.float32)
    if grad_before is not None:
        state = depth[:, None] * V + column[None, :]
        following = tl.load(at + 7)
        for n in range(tl.load(at + 8)):  # in their order
            grad += tl.load(grad_before + ((following + n).to(tl.int64) * HV + head) * K * V + state)
    for n in range(count):
        chunk = first + count - 1 - n
        token, live = chunk_rows(segments, segment, chunk, C)
        ok = live[:, None]
        place = chunk.to(tl.int64) * HV + head
        at_key = (token * H + head // (HV // H))[:, None] * K + depth[None, :]
        at_out = (token * HV + head)[:, None] * V + column[None, :]
        keys = tl.load(unit_key + at_key, mask=ok, other=0.0)
        queries = tl.load(unit_query + at_key, mask=ok, other=0.0)
        upstream = tl.load(grad_out + at_out, mask=ok, other=0.0)
        beta_i = tl.load(beta + token * HV + head, mask=live, other=0.0).to(tl.float32)
        total_i = tl.load(total + place * C + r)
        last = tl.load(total + place * C + C - 1)
        solved = tl.load(solve + (place * C + r)[:, None] * C + r[None, :])
        mixed = tl.load(mix + (place * C + r)[:, None] * C + r[None, :])
        decay = tl.exp2(total_i)
        operand = grad.to(kind)
        tl.store(grad_states + (place * K + depth)[:, None] * V + column[None, :], operand)
        of_state = tl.dot(keys, operand, input_precision=PRECISION) * tl.exp2(last - total_i)[:, None]
        rows = tl.dot(tl.trans(mixed), upstream, input_precision=PRECISION) * scale
        rows = tl.dot(tl.trans(solved), of_state.to(kind), rows, input_precision=PRECISION)
        tl.store(grad_rows + at_out, rows.to(kind), mask=ok)
        grad = grad * tl.exp2(last)
        of_rows = (rows * (-beta_i * decay)[:, None]).to(kind)
        grad = tl.dot(tl.trans(keys), of_rows, grad, input_precision=PRECISION)
        of_out = (upstream.to(tl.float32) * (scale * decay)[:, None]).to(kind)
        grad = tl.dot(tl.trans(queries), of_out, grad, input_precision=PRECISION)
    if grad_before is not None:
        own = tl.load(at + 5)
        if own >= 0:
            tl.store(grad_before + (own.to(tl.int64) * HV + head) * K * V + state, grad)


@quick_launch
@triton.jit(do_not_specialize=["num_chunks"])
def gradient_kernel(
    unit_query,  # [T, H, K]
    unit_key,  # [T, H, K]
    value,  # [T, HV, V], rows ``value_stride`` apart
    beta,  # [T, HV]
    total,  # [chunks, HV, C]
    segments, segment_of,
    states,  # [chunks, HV, K, V]
    grad_states,  # [chunks, HV, K, V]
    deltas,  # [T, HV, V]: D
    grad_out,  # [T, HV, V]
    grad_rows,  # [T, HV, V]
    grad_query,  # [T, HV, K] written, of the unit query; for each value head
    grad_key,  # [T, HV, K] likewise
    grad_value,  # [T, HV, V] written
    grad_total,  # [K / BK, chunks, HV, C] float32 written: parts of dG
    grad_beta,  # [K / BK, chunks, HV, C] float32 written
    value_stride, scale, num_chunks,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk and value head, and some columns of keys and queries."""
    tile = tl.program_id(0) % (K // BK)
    head = tl.program_id(0) // (K // BK)
    chunk = tl.program_id(1)
    segment = tl.load(segment_of + chunk)
    token, live = chunk_rows(segments, segment, chunk, C)
    ok = live[:, None]
    place = chunk.to(tl.int64) * HV + head
    kind = unit_key.dtype.element_ty
    r = tl.arange(0, C)
    depth = tile * BK + tl.arange(0, BK)
    beta_i = tl.load(beta + token * HV + head, mask=live, other=0.0).to(tl.float32)
    total_i = tl.load(total + place * C + r)
    last = tl.load(total + place * C + C - 1)
    w = tl.zeros((C, C), tl.float32)
    z = tl.zeros((C, C), tl.float32)
    w_across = tl.zeros((C, C), tl.float32)  # w and z transposed, by products of their own:
    z_across = tl.zeros((C, C), tl.float32)  # Triton 3.4 to 3.7.0 gives wrong products of transposed sums on Hopper
    out_state = tl.zeros((C, BK), tl.float32)
    rows_state = tl.zeros((C, BK), tl.float32)
    delta_grad = tl.zeros((C, BK), tl.float32)
    of_states = tl.zeros((BK,), tl.float32)
    to_beta = tl.zeros((C,), tl.float32)
    for start in range(0, V, BV):
        v = start + tl.arange(0, BV)
        at_out = (token * HV + head)[:, None] * V + v[None, :]
        at_state = (place * K + depth)[:, None] * V + v[None, :]
        upstream = tl.load(grad_out + at_out, mask=ok, other=0.0)
        rows = tl.load(grad_rows + at_out, mask=ok, other=0.0)
        delta = tl.load(deltas + at_out, mask=ok, other=0.0)
        state = tl.load(states + at_state)
        grad_state = tl.load(grad_states + at_state)
        w = tl.dot(upstream, tl.trans(delta), w, input_precision=PRECISION)
        z = tl.dot(rows, tl.trans(delta), z, input_precision=PRECISION)
        w_across = tl.dot(delta, tl.trans(upstream), w_across, input_precision=PRECISION)
        z_across = tl.dot(delta, tl.trans(rows), z_across, input_precision=PRECISION)
        out_state = tl.dot(upstream, tl.trans(state), out_state, input_precision=PRECISION)
        rows_state = tl.dot(rows, tl.trans(state), rows_state, input_precision=PRECISION)
        delta_grad = tl.dot(delta, tl.trans(grad_state), delta_grad, input_precision=PRECISION)
        of_states += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 1)
        if tile == 0:
            at_value = token[:, None] * value_stride + head * V + v[None, :]
            values = tl.load(value + at_value, mask=ok, other=0.0).to(tl.float32)
            wide = rows.to(tl.float32)
            to_beta += tl.sum(wide * values, 1)
            tl.store(grad_value + at_out, (wide * beta_i[:, None]).to(kind), mask=ok)
    at_key = (token * H + head // (HV // H))[:, None] * K + depth[None, :]
    keys = tl.load(unit_key + at_key, mask=ok, other=0.0)
    queries = tl.load(unit_query + at_key, mask=ok, other=0.0)
    between = decay_between(total_i[:, None], total_i[None, :], r[None, :] <= r[:, None])
    w = (w * between * scale).to(kind)
    z = tl.where(r[None, :] < r[:, None], -z * between, 0.0)
    across = decay_between(total_i[None, :], total_i[:, None], r[:, None] <= r[None, :])
    w_across = (w_across * across * scale).to(kind)
    z_across = (tl.where(r[:, None] < r[None, :], -z_across * across, 0.0) * beta_i[None, :]).to(kind)
    decay = tl.exp2(total_i)[:, None]
    to_query = tl.dot(w, keys, out_state * (decay * scale), input_precision=PRECISION)
    of_solve = tl.dot(z.to(kind), keys, rows_state * -decay, input_precision=PRECISION)
    left = of_solve * beta_i[:, None]
    of_end = delta_grad * tl.exp2(last - total_i)[:, None]
    right = tl.dot(w_across, queries, of_end, input_precision=PRECISION)
    right = tl.dot(z_across, keys, right, input_precision=PRECISION)
    wide_keys = keys.to(tl.float32)
    to_total = tl.sum(queries.to(tl.float32) * to_query + wide_keys * (left - right), 1)
    at_end = tl.sum(tl.sum(tl.where(ok, wide_keys * of_end, 0.0), 1), 0) + tl.exp2(last) * tl.sum(of_states, 0)
    to_total += tl.where(r == C - 1, at_end, 0.0)
    to_beta += tl.sum(wide_keys * of_solve, 1)
    to = (token * HV + head)[:, None] * K + depth[None, :]
    tl.store(grad_query + to, to_query.to(grad_query.dtype.element_ty), mask=ok)
    tl.store(grad_key + to, (left + right).to(grad_key.dtype.element_ty), mask=ok)
    part = ((tile.to(tl.int64) * num_chunks + chunk) * HV + head) * C + r
    tl.store(grad_total + part, to_total)
    tl.store(grad_beta + part, to_beta)


@quick_launch
@triton.jit(do_not_specialize=["part_stride"])
def decay_backward_kernel(
    grad_total,  # [parts, chunks, HV, C] float32
    grad_beta_parts,  # [parts, chunks, HV, C] float32
    grad_decay,  # [T, HV] float32 written, of the log-decay
    grad_beta,  # [T, HV] written
    segments, segment_of, part_stride,
    PARTS: tl.constexpr, HV: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sums over a chunk from its end, and over parts."""
    chunk = tl.program_id(0)
    head = tl.arange(0, HEADS)
    at = segments + tl.load(segment_of + chunk) * COLUMNS
    first_token = tl.load(at).to(tl.int64)
    start = tl.load(at + 1)
    stop = tl.load(at + 2)
    position = (start // C + chunk - tl.load(at + 3)) * C
    ok = head < HV
    summed = tl.zeros((HEADS,), tl.float32)
    for block in range(0, C, 16):
        for n in tl.static_range(16):
            i = C - 1 - block - n
            now = position + i
            inside = (now >= start) & (now < stop) & ok
            to_beta = tl.zeros((HEADS,), tl.float32)
            for part in tl.static_range(PARTS):
                place = part * part_stride + (chunk.to(tl.int64) * HV + head) * C + i
                summed += tl.load(grad_total + place, mask=ok, other=0.0)
                to_beta += tl.load(grad_beta_parts + place, mask=ok, other=0.0)
            to = (first_token + now - start) * HV + head
            tl.store(grad_decay + to, summed, mask=inside)
            tl.store(grad_beta + to, to_beta.to(grad_beta.dtype.element_ty), mask=inside)


@quick_launch
@triton.jit(do_not_specialize=["num_rows"])
def unit_backward_kernel(
    query,  # [T, H, K], rows ``query_stride`` apart
    key,  # [T, H, K], rows ``key_stride`` apart
    grad_unit_query,  # [T, HV, K]
    grad_unit_key,  # [T, HV, K]
    grad_query,  # [T, H, K] written
    grad_key,  # [T, H, K] written
    num_rows,  # T * H
    query_stride, key_stride,
    H: tl.constexpr,
    GROUP: tl.constexpr,  # HV / H
    K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of queries or keys before ``unit_kernel``, summed over the value heads of each."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < num_rows)[:, None]
    row = row.to(tl.int64)
    column = tl.arange(0, K)[None, :]
    within = (row % H * K)[:, None] + column
    if tl.program_id(1) == 0:
        x_at = query + (row // H * query_stride)[:, None] + within
        grad_at = grad_unit_query
        out_at = grad_query
    else:
        x_at = key + (row // H * key_stride)[:, None] + within
        grad_at = grad_unit_key
        out_at = grad_key
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.zeros((ROWS, K), tl.float32)
    for n in tl.static_range(GROUP):
        at = (row * GROUP + n)[:, None] * K + column
        grad += tl.load(grad_at + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
    unit = x * inverse
    along = tl.sum(grad * unit, 1)[:, None]
    tl.store(
        out_at + row[:, None] * K + column, (inverse * (grad - unit * along)).to(query.dtype.element_ty), mask=inside
    )
