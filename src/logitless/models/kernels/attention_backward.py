"""Kernels of attention's backward pass: deterministic, without atomics, sums in float32.

With p = 2^(z - lse) recomputed from the forward pass's log-sum-exp, d = sum_e output * grad_output and
g = p * (grad_output . v - d) (times the softcap's slope):

    grad_query = scale * sum_keys g k,   grad_key = scale * sum_queries g q,   grad_value = sum_queries p grad_output

For each tile of queries ``query_gradient`` goes through keys, and for each tile of keys ``key_gradient`` goes through
queries: seven products instead of the minimum of five, so that no two programs add to the same sum. A prompt's keys
have the queries of all its completions: a tile of keys with many queries is divided into parts, as the layout
determines, and ``sum_key_parts`` adds their sums in order. Gradients depend on the layout only, not on timing.
"""

import triton
import triton.language as tl

from logitless.models.kernels.attention_forward import (
    LOG2E,
    block_row,
    blocks_of_tile,
    first_seen,
    key_rows,
    load_rows,
    load_whole_block,
    products,
    query_tile,
    run_of_blocks,
    seen,
    store_rows,
)
from logitless.quick_launch import quick_launch


@triton.jit
def add_query_gradient(
    queries, grad_outputs, keys, values, normaliser, d, gradient, query_position, key_position, window, inner, gain,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``gradient`` plus g k over one block of keys."""
    z = products(queries, keys, inner, SOFTCAP, PRECISION)
    p = tl.exp2(tl.fma(z, gain, -normaliser[:, None]))
    if MASKED:
        p = tl.where(seen(query_position, key_position, window, WINDOWED), p, 0.0)
    g = p * (tl.dot(grad_outputs, tl.trans(values), input_precision=PRECISION) - d[:, None])
    if SOFTCAP:
        g = g * (1.0 - z * z)
    return tl.dot(g.to(keys.dtype), keys, gradient, input_precision=PRECISION)


@quick_launch
@triton.jit(do_not_specialize=["T", "window"])
def query_gradient(
    query,  # [T, H, E], rows ``query_stride`` apart
    key,  # [T, K, E], rows ``key_stride`` apart
    value,  # as ``key``
    key_blocks,  # TMA descriptor of ``key``, blocks [BLOCK, 1, WIDTH]; None: loads through pointers
    value_blocks,  # likewise of ``value``
    output,  # [T, H, E]
    grad_output,  # [T, H, E]
    log_sum_exp,  # [T, H] float32, in nats
    grad_log_sum_exp,  # [T, H] float32; None: nothing depends on it
    row_normaliser,  # [K, T, R] float32, written: the log-sum-exp in bits, a tile's rows side by side
    row_d,  # [K, T, R] float32, written: d
    grad_query,  # [T, H, E], written
    tiles,  # [tiles, 8] int32, and what follows: as of ``attention_forward``
    branch_rows, T, query_stride, key_stride, window, inner, gain, scale,
    K: tl.constexpr, R: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of queries, and the values of its rows that ``key_gradient`` reads."""
    line, key_head, token, head = query_tile(tiles, K, R, BM)
    prefix_row = tl.load(line)
    prefix_length = tl.load(line + 1)
    own_row = tl.load(line + 2)
    own_length = tl.load(line + 3)
    first = tl.load(line + 4)
    tokens: tl.constexpr = BM // R

    row = own_row + first + token
    row_ok = (token < tokens) & (first + token < own_length)
    position = prefix_length + first + token
    end = prefix_length + tl.minimum(first + tokens, own_length)
    lowest, whole = blocks_of_tile(prefix_length + first, end - 1, window, WINDOWED, BLOCK)
    trunk_length = prefix_length
    branches = branch_rows
    if branch_rows is not None:
        trunk_length = tl.load(line + 5)
        branches = branch_rows + tl.load(line + 6)
    gathered = trunk_length // BLOCK * BLOCK  # from the block that contains the end of the trunk on
    own = tl.cdiv(prefix_length, BLOCK) * BLOCK
    straddled = own > gathered
    own_shift = own_row - prefix_length

    column = tl.arange(0, WIDTH)
    key_head_of_key = key_head + tl.zeros((BLOCK,), tl.int32)
    grad_outputs = load_rows(grad_output, row, row_ok, head, K * R * E, column, E, WIDTH)
    outputs = load_rows(output, row, row_ok, head, K * R * E, column, E, WIDTH)
    d = tl.sum(grad_outputs.to(tl.float32) * outputs.to(tl.float32), 1)
    place = row.to(tl.int64) * (K * R) + head
    if grad_log_sum_exp is not None:
        d -= tl.load(grad_log_sum_exp + place, mask=row_ok, other=0.0)
    normaliser = tl.load(log_sum_exp + place, mask=row_ok, other=float("inf")) * LOG2E  # infinite: no weight
    of_tile = (key_head * T + own_row + first) * R + tl.arange(0, BM)
    tl.store(row_d + of_tile, d, mask=row_ok)
    tl.store(row_normaliser + of_tile, normaliser, mask=row_ok)
    queries = load_rows(query, row, row_ok, head, query_stride, column, E, WIDTH)
    gradient = tl.zeros((BM, WIDTH), tl.float32)
    for run in range(1 + straddled.to(tl.int32)):
        start, masked, stop = run_of_blocks(run, lowest, whole, end, straddled, gathered, own, WINDOWED)
        for at in range(start, masked, BLOCK):
            first_row = block_row(at, tiles, prefix_length, prefix_row, own_shift, False, BLOCK)
            keys, values = load_whole_block(
                key, value, key_blocks, value_blocks, first_row, key_head, key_stride, column, BLOCK, E, WIDTH, TMA
            )
            gradient = add_query_gradient(
                queries, grad_outputs, keys, values, normaliser, d, gradient, position, position, window, inner, gain,
                False, WINDOWED, SOFTCAP, PRECISION,
            )  # fmt: skip
        for at in range(masked, stop, BLOCK):
            key_position, rows = key_rows(
                at, tiles, branches, prefix_length, trunk_length, prefix_row, own_shift, False, BLOCK
            )
            keys = load_rows(key, rows, key_position < end, key_head_of_key, key_stride, column, E, WIDTH)
            values = load_rows(value, rows, key_position < end, key_head_of_key, key_stride, column, E, WIDTH)
            gradient = add_query_gradient(
                queries, grad_outputs, keys, values, normaliser, d, gradient, position, key_position, window, inner,
                gain, True, WINDOWED, SOFTCAP, PRECISION,
            )  # fmt: skip
    store_rows(grad_query, row, row_ok, head, K * R, column, gradient * scale, E, WIDTH)


@triton.jit
def add_key_gradient(
    query, grad_output, query_blocks, grad_output_blocks, row_normaliser, row_d, normaliser_blocks, d_blocks, position,
    keys, values, grad_keys, grad_values, query_offset, grad_output_offset, inside, token, key_row, key_position,
    first, last, query_stride, key_head, tile_row, window, inner, gain,
    H: tl.constexpr, R: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, MASKED: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, TMA_ROWS: tl.constexpr, TMA_TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values, plus the part of queries in rows ``first`` to ``first + BM // R``.

    Matrices are transposed: [keys, queries]. Rows from ``last`` on belong to other sequences: an infinite normaliser
    makes their weights 0.
    """
    tokens: tl.constexpr = BM // R
    first = first + last * 0
    row = first + token
    row_ok = (token < tokens) & (row < last)
    i = tl.arange(0, BM)
    ok = i < tl.minimum(last - first, tokens) * R
    if TMA_ROWS:
        queries = tl.reshape(query_blocks.load([first, key_head * R, 0]), (BM, WIDTH))
        grad_outputs = tl.reshape(grad_output_blocks.load([first, key_head * R, 0]), (BM, WIDTH))
    else:
        mask = row_ok[:, None] & inside
        queries = tl.load(query + first.to(tl.int64) * query_stride + query_offset, mask=mask, other=0.0)
        grad_outputs = tl.load(grad_output + first.to(tl.int64) * (H * E) + grad_output_offset, mask=mask, other=0.0)
    of_tile = (tile_row + first) * R
    if TMA_TERMS:  # loads through pointers would be dozens of 4-byte copies a thread
        normaliser = tl.where(ok, normaliser_blocks.load([of_tile]), float("inf"))
        d = tl.where(ok, d_blocks.load([of_tile]), 0.0)
    else:
        normaliser = tl.load(row_normaliser + of_tile + i, mask=ok, other=float("inf"))
        d = tl.load(row_d + of_tile + i, mask=ok, other=0.0)
    z = products(keys, queries, inner, SOFTCAP, PRECISION)
    p = tl.exp2(tl.fma(z, gain, -normaliser[None, :]))
    if MASKED:
        visible = key_row[:, None] <= row[None, :]
        if WINDOWED:
            query_position = tl.load(position + row, mask=row_ok, other=0)
            if WINDOWED == 1:
                visible = visible & (key_position[:, None] > query_position[None, :] - window)
            else:
                visible = visible & (key_position[:, None] >= first_seen(query_position, window, WINDOWED)[None, :])
        p = tl.where(visible, p, 0.0)
    grad_values = tl.dot(p.to(grad_outputs.dtype), grad_outputs, grad_values, input_precision=PRECISION)
    g = p * (tl.dot(values, tl.trans(grad_outputs), input_precision=PRECISION) - d[None, :])
    if SOFTCAP:
        g = g * (1.0 - z * z)
    return tl.dot(g.to(queries.dtype), queries, grad_keys, input_precision=PRECISION), grad_values


@quick_launch
@triton.jit(do_not_specialize=["T", "window"])
def key_gradient(
    query,  # [T, H, E], rows ``query_stride`` apart
    key,  # [T, K, E], rows ``key_stride`` apart
    value,  # as ``key``
    grad_output,  # [T, H, E]
    query_blocks,  # TMA descriptor of ``query``, blocks [BM // R, R, WIDTH]; None: loads through pointers
    grad_output_blocks,  # likewise of ``grad_output``
    row_normaliser,  # [K, T, R] float32, of ``query_gradient``
    row_d,  # [K, T, R] float32, of ``query_gradient``
    normaliser_blocks,  # TMA descriptor of ``row_normaliser`` as a vector, blocks [BM]; None: loads through pointers
    d_blocks,  # likewise of ``row_d``
    grad_key,  # [T, K, E], written
    grad_value,  # [T, K, E], written
    parts,  # [parts, K, 2, BK, WIDTH] float32, written: gradients of tiles that are cut
    tiles,  # [tiles, 8] int32: first and last row of keys, first and last row of queries, part (-1: not cut)
    position,  # [T] int32, of each row in its sequence; only read with a window
    T, query_stride, key_stride, window, inner, gain, scale,
    K: tl.constexpr, R: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, TMA_ROWS: tl.constexpr, TMA_TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values from a range of rows of queries.

    All rows that attend to a key come after it, up to the end of its sequence or, for a shared prefix, of the last
    sequence that continues it. So they are one range of rows, and the mask is ``key row <= query row``.
    """
    program = tl.program_id(0)
    line = tiles + (program // K) * 8
    key_head = program % K
    first_key = tl.load(line)
    last_key = tl.load(line + 1)
    first_query = tl.load(line + 2)
    last_query = tl.load(line + 3)
    part = tl.load(line + 4)
    tokens: tl.constexpr = BM // R
    H: tl.constexpr = K * R

    column = tl.arange(0, WIDTH)
    key_row = first_key + tl.arange(0, BK)
    key_ok = key_row < last_key
    key_head_of_key = key_head + tl.zeros((BK,), tl.int32)
    keys = load_rows(key, key_row, key_ok, key_head_of_key, key_stride, column, E, WIDTH)
    values = load_rows(value, key_row, key_ok, key_head_of_key, key_stride, column, E, WIDTH)
    key_position = key_row
    if WINDOWED:
        key_position = tl.load(position + key_row, mask=key_ok, other=0)
    i = tl.arange(0, BM)
    token = i // R
    head = key_head * R + i % R
    query_offset = token[:, None] * query_stride + head[:, None] * E + column[None, :]
    grad_output_offset = token[:, None] * (H * E) + head[:, None] * E + column[None, :]
    inside = column[None, :] < E
    grad_keys = tl.zeros((BK, WIDTH), tl.float32)
    grad_values = tl.zeros((BK, WIDTH), tl.float32)
    # only queries in the rows of these keys need the mask
    seen_by_all = first_query + tl.cdiv(tl.maximum(tl.minimum(last_key, last_query) - first_query, 0), tokens) * tokens
    if WINDOWED:
        seen_by_all = first_query + tl.cdiv(last_query - first_query, tokens) * tokens
    for first in range(first_query, seen_by_all, tokens):
        grad_keys, grad_values = add_key_gradient(
            query, grad_output, query_blocks, grad_output_blocks, row_normaliser, row_d, normaliser_blocks, d_blocks,
            position, keys, values, grad_keys, grad_values, query_offset, grad_output_offset, inside, token, key_row,
            key_position, first, last_query, query_stride, key_head, key_head * T, window, inner, gain,
            H, R, E, WIDTH, BM, True, WINDOWED, SOFTCAP, TMA_ROWS, TMA_TERMS, PRECISION,
        )  # fmt: skip
    for first in range(seen_by_all, last_query, tokens):
        grad_keys, grad_values = add_key_gradient(
            query, grad_output, query_blocks, grad_output_blocks, row_normaliser, row_d, normaliser_blocks, d_blocks,
            position, keys, values, grad_keys, grad_values, query_offset, grad_output_offset, inside, token, key_row,
            key_position, first, last_query, query_stride, key_head, key_head * T, window, inner, gain,
            H, R, E, WIDTH, BM, False, WINDOWED, SOFTCAP, TMA_ROWS, TMA_TERMS, PRECISION,
        )  # fmt: skip
    if part < 0:
        store_rows(grad_key, key_row, key_ok, key_head_of_key, K, column, grad_keys * scale, E, WIDTH)
        store_rows(grad_value, key_row, key_ok, key_head_of_key, K, column, grad_values, E, WIDTH)
    else:
        place = (part.to(tl.int64) * K + key_head) * (2 * BK * WIDTH)
        offset = tl.arange(0, BK)[:, None] * WIDTH + column[None, :]
        tl.store(parts + place + offset, grad_keys)
        tl.store(parts + place + BK * WIDTH + offset, grad_values)


@quick_launch
@triton.jit
def sum_key_parts(
    parts,  # [parts, K, 2, BK, WIDTH] float32, of ``key_gradient``
    grad_key,  # [T, K, E], written
    grad_value,  # [T, K, E], written
    tiles,  # [cut tiles, 8] int32: first and last row of keys, first part, number of parts
    scale,
    K: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of ROWS rows of a divided tile of keys: the sum of its parts, in order."""
    line = tiles + (tl.program_id(0) // K) * 8
    key_head = tl.program_id(0) % K
    first_key = tl.load(line)
    last_key = tl.load(line + 1)
    first_part = tl.load(line + 2)
    num_parts = tl.load(line + 3)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    grad_keys = tl.zeros((ROWS, WIDTH), tl.float32)
    grad_values = tl.zeros((ROWS, WIDTH), tl.float32)
    for part in range(num_parts):
        place = ((first_part + part).to(tl.int64) * K + key_head) * (2 * BK * WIDTH)
        offset = row[:, None] * WIDTH + column[None, :]
        grad_keys += tl.load(parts + place + offset)
        grad_values += tl.load(parts + place + BK * WIDTH + offset)
    key_row = first_key + row
    key_head_of_key = key_head + tl.zeros((ROWS,), tl.int32)
    key_ok = key_row < last_key
    store_rows(grad_key, key_row, key_ok, key_head_of_key, K, column, grad_keys * scale, E, WIDTH)
    store_rows(grad_value, key_row, key_ok, key_head_of_key, K, column, grad_values, E, WIDTH)
