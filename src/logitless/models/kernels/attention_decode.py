"""Kernels of attention for decoding: one query a row, keys in pages; a program a split, then a merge of the splits.

Blocks, splits and merges are those of ``attention_forward``, and results are bitwise the same. Pages that rows of a
group share are read once for all of them: ``decode_shared`` stores the running softmax after the shared blocks, in
float32, and ``decode_own`` continues from it, which changes nothing. Grids depend on capacities only, and everything
else is read on the GPU, so that launches can be captured in a graph.

Tiles have 16 rows on one warp or 64 on four: then a row's sums have the same order as in the forward pass.
"""

import triton
import triton.language as tl

from logitless.models.kernels.attention_forward import LN2, add_block, empty, first_seen, load_rows, merge
from logitless.models.kernels.overlap import after_inputs
from logitless.quick_launch import quick_launch


@triton.jit
def load_state(state_m, state_s, state_o, place, ok, column, WIDTH: tl.constexpr):
    """The stored running softmax of a split, by row."""
    m = tl.load(state_m + place, mask=ok, other=0.0)
    s = tl.load(state_s + place, mask=ok, other=1.0)
    o = tl.load(state_o + place[:, None] * WIDTH + column[None, :], mask=ok[:, None], other=0.0)
    return m, s, o


@triton.jit
def store_state(state_m, state_s, state_o, place, ok, column, m, s, o, WIDTH: tl.constexpr):
    """Counterpart of ``load_state``."""
    tl.store(state_m + place, m, mask=ok)
    tl.store(state_s + place, s, mask=ok)
    tl.store(state_o + place[:, None] * WIDTH + column[None, :], o, mask=ok[:, None])


@triton.jit
def load_page(
    key, value, page, length, key_head, stride, column, BLOCK: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr
):
    """Keys and values [BLOCK, WIDTH] of the first ``length`` positions of a page, zero after them."""
    i = tl.arange(0, BLOCK)
    base = page.to(tl.int64) * BLOCK * stride + key_head * E
    place = i[:, None] * stride + column[None, :]
    ok = (i < length)[:, None]
    if E < WIDTH:
        ok = ok & (column[None, :] < E)
    return tl.load(key + base + place, mask=ok, other=0.0), tl.load(value + base + place, mask=ok, other=0.0)


@triton.jit
def split_pages(page_table, row, split, max_pages, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """All pages of a row's split, loaded at once to wait for memory only once."""
    slot = split * (SPLIT // BLOCK) + tl.arange(0, SPLIT // BLOCK)
    return tl.load(page_table + row.to(tl.int64) * max_pages + slot, mask=slot < max_pages, other=0)


@triton.jit
def page_at(pages, at, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """The page of the block at position ``at``, out of the pages of its split."""
    inside = tl.arange(0, SPLIT // BLOCK) == at % SPLIT // BLOCK
    return tl.sum(tl.where(inside, pages, 0), 0)


@triton.jit
def first_block(position, split, window, BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr):
    """Position of the first block of a split that a query at ``position`` attends to."""
    start = split * SPLIT
    if WINDOWED:
        start = tl.maximum(start, first_seen(position, window, WINDOWED) // BLOCK * BLOCK)
    return start


@quick_launch
@triton.jit(do_not_specialize=["splits", "max_pages", "group_size", "window"])
def decode_shared(
    query,  # [rows, H, E], rows ``query_stride`` apart
    key,  # [pages * BLOCK, K, E], rows ``key_stride`` apart
    value,  # as ``key``
    page_table,  # [rows, max_pages] int32
    position,  # [rows] int32, of the query; -1: no query
    members,  # [groups, group_size] int32: rows of a group; -1: none
    shared_pages,  # [groups] int32: leading pages that all rows of a group share
    state_m,  # [rows, splits, H] float32, written
    state_s,  # likewise
    state_o,  # [rows, splits, H, WIDTH] float32, written
    splits, max_pages, group_size, query_stride, key_stride, window, inner, gain,
    K: tl.constexpr, R: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The shared blocks of one split, for a tile of a group's rows times query heads."""
    after_inputs(OVERLAP)
    tile_count = tl.cdiv(group_size * R, BM)
    group = tl.program_id(0) // tile_count
    tile = tl.program_id(0) % tile_count
    key_head = tl.program_id(1)
    split = tl.program_id(2)
    stop = tl.minimum(tl.load(shared_pages + group) * BLOCK, (split + 1) * SPLIT)
    if split * SPLIT < stop:
        i = tile * BM + tl.arange(0, BM)
        member = i // R
        head = key_head * R + i % R
        row = tl.load(members + group * group_size + member, mask=member < group_size, other=-1)
        row_ok = row >= 0
        row = tl.maximum(row, 0)
        query_position = tl.load(position + row, mask=row_ok, other=-1)
        row_ok = row_ok & (query_position >= 0)
        present = tl.max(row_ok.to(tl.int32), 0)
        if present > 0:
            leader = tl.max(tl.where(row_ok, row, 0), 0)  # any of them: they share the pages
            column = tl.arange(0, WIDTH)
            queries = load_rows(query, row, row_ok, head, query_stride, column, E, WIDTH)
            m, s, o = empty(BM, WIDTH)
            pages = split_pages(page_table, leader, split, max_pages, BLOCK, SPLIT)
            for at in range(split * SPLIT, stop, BLOCK):
                page = page_at(pages, at, BLOCK, SPLIT)
                keys, values = load_page(key, value, page, BLOCK, key_head, key_stride, column, BLOCK, E, WIDTH)
                m, s, o = add_block(
                    queries, keys, values, m, s, o, query_position, at + tl.arange(0, BLOCK), window, inner, gain,
                    True, WINDOWED, SOFTCAP, PRECISION,
                )  # fmt: skip
            place = (row.to(tl.int64) * splits + split) * (K * R) + head
            store_state(state_m, state_s, state_o, place, row_ok, column, m, s, o, WIDTH)


@quick_launch
@triton.jit(do_not_specialize=["splits", "max_pages", "window"])
def decode_own(
    query,  # [rows, H, E], rows ``query_stride`` apart
    key,  # [pages * BLOCK, K, E], rows ``key_stride`` apart
    value,  # as ``key``
    page_table,  # [rows, max_pages] int32
    position,  # [rows] int32, of the query; -1: no query
    row_shared_pages,  # [rows] int32: leading pages that ``decode_shared`` has read; None: none
    state_m,  # [rows, splits, H] float32, read and written; unused when DIRECT
    state_s,  # likewise
    state_o,  # [rows, splits, H, WIDTH] float32
    output,  # [rows, H, E], written when DIRECT
    log_sum_exp,  # [rows, H] float32, in nats, written when DIRECT
    splits, max_pages, query_stride, key_stride, window, inner, gain,
    K: tl.constexpr, R: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, DIRECT: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One split of one row, from its first block that is not shared; with a single split, the result."""
    after_inputs(OVERLAP)
    row = tl.program_id(0)
    key_head = tl.program_id(1)
    split = tl.program_id(2)
    query_position = tl.load(position + row)
    end = tl.minimum((split + 1) * SPLIT, query_position + 1)
    i = tl.arange(0, BM)
    head = key_head * R + i % R
    head_ok = i < R
    column = tl.arange(0, WIDTH)
    start = first_block(query_position, split, window, BLOCK, SPLIT, WINDOWED)
    place = (row.to(tl.int64) * splits + split) * (K * R) + head
    shared = start * 0
    if row_shared_pages is not None:
        shared = tl.load(row_shared_pages + row) * BLOCK
    own = split * SPLIT < end
    if not DIRECT:
        own = own & ((split + 1) * SPLIT > shared)  # else ``decode_shared`` has stored its result
    if own:
        m, s, o = empty(BM, WIDTH)
        if row_shared_pages is not None:
            if split * SPLIT < shared:
                m, s, o = load_state(state_m, state_s, state_o, place, head_ok, column, WIDTH)
            start = tl.maximum(start, shared)
        if start < end:
            queries = load_rows(query, row + tl.zeros((BM,), tl.int32), head_ok, head, query_stride, column, E, WIDTH)
            positions = query_position + tl.zeros((BM,), tl.int32)
            pages = split_pages(page_table, row, split, max_pages, BLOCK, SPLIT)
            for at in range(start, end, BLOCK):
                page = page_at(pages, at, BLOCK, SPLIT)
                keys, values = load_page(key, value, page, end - at, key_head, key_stride, column, BLOCK, E, WIDTH)
                m, s, o = add_block(
                    queries, keys, values, m, s, o, positions, at + tl.arange(0, BLOCK), window, inner, gain,
                    True, WINDOWED, SOFTCAP, PRECISION,
                )  # fmt: skip
        if DIRECT:
            m0, s0, o0 = empty(BM, WIDTH)
            m, s, o = merge(m0, s0, o0, m, s, o)
            store_result(output, log_sum_exp, row, head, head_ok, column, m, s, o, K * R, E, WIDTH)
        else:
            store_state(state_m, state_s, state_o, place, head_ok, column, m, s, o, WIDTH)
    elif DIRECT:
        m, s, o = empty(BM, WIDTH)
        store_result(output, log_sum_exp, row, head, head_ok, column, m, s, o, K * R, E, WIDTH)


@triton.jit
def store_result(
    output, log_sum_exp, row, head, head_ok, column, m, s, o, H: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr
):
    """Store output and log-sum-exp of a row's heads; 0 and -inf for a row without a query."""
    place = row.to(tl.int64) * H + head
    ok = head_ok[:, None]
    if E < WIDTH:
        ok = ok & (column[None, :] < E)
    o = tl.where((s == 0.0)[:, None], 0.0, o / s[:, None])
    tl.store(output + place[:, None] * E + column[None, :], o.to(output.dtype.element_ty), mask=ok)
    tl.store(log_sum_exp + place, (m + tl.log2(s)) * LN2, mask=head_ok)


@quick_launch
@triton.jit(do_not_specialize=["splits"])
def merge_splits(
    state_m,  # [rows, splits, H] float32
    state_s,  # likewise
    state_o,  # [rows, splits, H, WIDTH] float32
    position,  # [rows] int32
    output,  # [rows, H, E], written
    log_sum_exp,  # [rows, H] float32, in nats, written
    splits, window,
    H: tl.constexpr, R: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr,
    HEADS: tl.constexpr,  # R padded to a power of two
    SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,  # splits loaded together
    WINDOWED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Merge a row's splits in order, for the query heads of one key head."""
    after_inputs(OVERLAP)
    row = tl.program_id(0)
    of_key = tl.arange(0, HEADS)
    head = tl.program_id(1) * R + of_key
    head_ok = of_key < R
    column = tl.arange(0, WIDTH)
    m, s, o = empty(HEADS, WIDTH)
    query_position = tl.load(position + row)
    first = query_position * 0
    if WINDOWED:
        first = first_seen(query_position, window, WINDOWED) // SPLIT
    end = (query_position + SPLIT) // SPLIT
    for start in range(first, end, AT_ONCE):
        for i in tl.static_range(AT_ONCE):  # unrolled, so that their loads overlap
            inside = start + i < end
            place = (row.to(tl.int64) * splits + start + i) * H + head
            m2, s2, o2 = load_state(state_m, state_s, state_o, place, head_ok & inside, column, WIDTH)
            merged_m, merged_s, merged_o = merge(m, s, o, m2, s2, o2)
            m = tl.where(inside, merged_m, m)
            s = tl.where(inside, merged_s, s)
            o = tl.where(inside, merged_o, o)
    store_result(output, log_sum_exp, row, head, head_ok, column, m, s, o, H, E, WIDTH)
