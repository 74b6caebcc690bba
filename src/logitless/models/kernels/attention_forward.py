"""Kernel of attention's forward pass, over packed rows with shared prompts or over pages of a cache.

Positions are those in a token's own sequence. Keys are read in blocks of BLOCK positions, inside splits of SPLIT
positions; each split has its own running softmax, and splits are merged in order:

    z = gain * (q . k)         in bits; with a softcap gain * tanh(inner * (q . k))
    m = max z,  s = sum 2^(z - m),  o = sum 2^(z - m) v
    merged: m = max(m1, m2),  s = fma(s1, 2^(m1 - m), s2 * 2^(m2 - m)),  o likewise

Why it is row-invariant: blocks that a row does not attend to leave its m, s and o bitwise unchanged (a factor 2^0 and a
sum of zeros); a tensor core sums over a block in the same order in every tile; and each warp has whole rows, so that a
row's sum over a block has one order too. The last is a property of the launch, 16 rows a warp: with tiles of 16 rows on
2 or 4 warps, 4% of log-sum-exps differ. Products followed by a sum are explicit ``fma``, because the compiler would
contract them in one kernel and not in another.

A tile is BM rows: BM // R tokens times the R query heads that share a key head; row i is token i // R, head i % R.
"""

import triton
import triton.language as tl

from logitless.quick_launch import quick_launch

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEVER = tl.constexpr(-float("inf"))


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def products(queries, keys, inner, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """[queries, keys]: q . k, or tanh(inner * (q . k)) under a softcap."""
    z = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    if SOFTCAP:
        z = tanh(z * inner)
    return z


@triton.jit
def first_seen(query_position, window, WINDOWED: tl.constexpr):
    """Position of the first key that a query attends to. WINDOWED is 1 for a window, 2 for chunks of its length."""
    if WINDOWED == 2:
        return tl.maximum(query_position, 0) // window * window
    return tl.maximum(query_position - window + 1, 0)


@triton.jit
def seen(query_position, key_position, window, WINDOWED: tl.constexpr):
    """[queries, keys]: whether a query attends to a key: at or before it, and within the window."""
    ok = key_position[None, :] <= query_position[:, None]
    if WINDOWED == 1:
        ok = ok & (key_position[None, :] > query_position[:, None] - window)
    if WINDOWED == 2:
        ok = ok & (key_position[None, :] >= first_seen(query_position, window, WINDOWED)[:, None])
    return ok


@triton.jit
def add_block(
    queries, keys, values, m, s, o, query_position, key_position, window, inner, gain,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the running softmax (m, s, o) of its split."""
    z = products(queries, keys, inner, SOFTCAP, PRECISION)
    if MASKED:
        z = tl.where(seen(query_position, key_position, window, WINDOWED), z, NEVER)
    new_m = tl.maximum(m, tl.max(z, 1) * gain)
    anchor = new_m
    if MASKED:
        anchor = tl.where(new_m == NEVER, 0.0, new_m)
    p = tl.exp2(tl.fma(z, gain, -anchor[:, None]))
    kept = tl.exp2(m - anchor)
    s = tl.fma(s, kept, tl.sum(p, 1))
    o = tl.dot(p.to(values.dtype), values, o * kept[:, None], input_precision=PRECISION)
    return new_m, s, o


@triton.jit
def merge(m, s, o, m2, s2, o2):
    """Merge a split's running softmax (m2, s2, o2) into that of the splits before it; an empty one changes nothing."""
    new_m = tl.maximum(m, m2)
    anchor = tl.where(new_m == NEVER, 0.0, new_m)
    a = tl.exp2(m - anchor)
    b = tl.exp2(m2 - anchor)
    return new_m, tl.fma(s, a, s2 * b), tl.fma(o, a[:, None], o2 * b[:, None])


@triton.jit
def empty(BM: tl.constexpr, WIDTH: tl.constexpr):
    """The running softmax of no keys."""
    return tl.full((BM,), NEVER, tl.float32), tl.zeros((BM,), tl.float32), tl.zeros((BM, WIDTH), tl.float32)


@triton.jit
def block_row(start, pages, prefix_length, prefix_shift, own_shift, PAGED: tl.constexpr, BLOCK: tl.constexpr):
    """Row of the first key of the block at position ``start``, for a block in consecutive rows."""
    if PAGED:
        return tl.load(pages + start // BLOCK) * BLOCK
    return start + tl.where(start < prefix_length, prefix_shift, own_shift)


@triton.jit
def key_rows(
    start, pages, branches, prefix_length, trunk_length, prefix_shift, own_shift, PAGED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Position and row of each key of the block at ``start``, for any block.

    branches: rows of the positions from ``trunk_length`` to ``prefix_length``; None if the trunk is the whole prefix.
    """
    position = start + tl.arange(0, BLOCK)
    if PAGED:
        return position, tl.load(pages + start // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    rows = position + tl.where(position < prefix_length, prefix_shift, own_shift)
    if branches is not None:
        in_branch = (position >= trunk_length) & (position < prefix_length)
        rows = tl.where(in_branch, tl.load(branches + position - trunk_length, mask=in_branch, other=0), rows)
    return position, rows


@triton.jit
def load_rows(x, row, row_ok, head, stride, column, E: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, WIDTH]: x[row, head, :], zero in rows that are not ok and in columns that pad E to WIDTH."""
    place = x + row.to(tl.int64)[:, None] * stride + (head * E)[:, None] + column[None, :]
    ok = row_ok[:, None]
    if E < WIDTH:
        ok = ok & (column[None, :] < E)
    return tl.load(place, mask=ok, other=0.0)


@triton.jit
def store_rows(x, row, row_ok, head, H: tl.constexpr, column, value, E: tl.constexpr, WIDTH: tl.constexpr):
    """x[row, head, :] = value for contiguous x [rows, H, E]."""
    place = x + (row.to(tl.int64) * H + head)[:, None] * E + column[None, :]
    ok = row_ok[:, None]
    if E < WIDTH:
        ok = ok & (column[None, :] < E)
    tl.store(place, value.to(x.dtype.element_ty), mask=ok)


@triton.jit
def load_whole_block(
    key, value, key_blocks, value_blocks, row, head, stride, column,
    BLOCK: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Keys and values [BLOCK, WIDTH] of a key head in BLOCK consecutive rows from ``row`` on."""
    if TMA:
        keys = tl.reshape(key_blocks.load([row, head, 0]), (BLOCK, WIDTH))
        values = tl.reshape(value_blocks.load([row, head, 0]), (BLOCK, WIDTH))
    else:
        # a 64-bit base, 32-bit offsets
        offset = tl.arange(0, BLOCK)[:, None] * stride + column[None, :]
        base = row.to(tl.int64) * stride + head * E
        if E < WIDTH:
            inside = (column < E)[None, :] & (offset >= 0)
            keys = tl.load(key + base + offset, mask=inside, other=0.0)
            values = tl.load(value + base + offset, mask=inside, other=0.0)
        else:
            keys = tl.load(key + base + offset)
            values = tl.load(value + base + offset)
    return keys, values


@triton.jit
def query_tile(tiles, K: tl.constexpr, R: tl.constexpr, BM: tl.constexpr):
    """A program's line of ``tiles``, its key head, and token and head of each of its rows."""
    program = tl.program_id(0)
    line = tiles + (program // K) * 8
    key_head = program % K
    i = tl.arange(0, BM)
    return line, key_head, i // R, key_head * R + i % R


@triton.jit
def blocks_of_tile(first, last, window, WINDOWED: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks of queries at the positions ``first`` to ``last``: where they begin, and up to where all attend to all."""
    lowest = first * 0
    whole = (first + 1) // BLOCK * BLOCK
    if WINDOWED:
        lowest = first_seen(first, window, WINDOWED) // BLOCK * BLOCK
    if WINDOWED == 2:  # unless they are in one chunk, which begins with a block
        whole = tl.where(first_seen(last, window, WINDOWED) == lowest, whole, 0)
    return lowest, whole


@triton.jit
def run_of_blocks(run, lowest, whole, end, straddled, gathered, own, WINDOWED: tl.constexpr):
    """Range ``run`` of a tile's blocks: [start, masked) are loaded whole and unmasked, [masked, stop) gathered.

    The first range ends with the block that contains the end of the prefix, if one does; the second has the rest. Of
    the prefix, [gathered, own) is gathered.
    """
    first = (run == 0) & straddled
    start = tl.where(run == 0, lowest, tl.maximum(lowest, own))
    stop = tl.where(first, tl.minimum(own, end), end)
    masked = tl.where(first, tl.minimum(whole, gathered), whole)
    if WINDOWED == 1:
        masked = start
    return start, tl.minimum(tl.maximum(masked, start), tl.maximum(stop, start)), stop


@quick_launch
@triton.jit(do_not_specialize=["window", "max_pages"])
def attention_forward(
    query,  # [T, H, E], rows ``query_stride`` apart
    key,  # [T, K, E], or a cache's [pages * BLOCK, K, E]; rows ``key_stride`` apart
    value,  # as ``key``
    key_blocks,  # TMA descriptor of ``key``, blocks [BLOCK, 1, WIDTH]; None: loads through pointers
    value_blocks,  # likewise of ``value``
    output,  # [T, H, E]
    log_sum_exp,  # [T, H] float32, in nats
    tiles,  # [tiles, 8] int32: prefix row (paged: line of the page table), prefix length, own row, own length, token,
    #         length of the trunk, first of ``branch_rows``
    branch_rows,  # [b] int32: rows of prefixes after their trunks; None: a prefix is its trunk
    page_table,  # [sequences, max_pages] int32: pages of each sequence in order; None: not paged
    max_pages, query_stride, key_stride,
    window,  # positions that a query attends to, itself included; or of a chunk
    inner,  # scale / softcap
    gain,  # scale (softcap) in bits
    K: tl.constexpr,  # key heads
    R: tl.constexpr,  # query heads a key head
    E: tl.constexpr,
    WIDTH: tl.constexpr,  # E padded to a power of two
    BM: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, PAGED: tl.constexpr, WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of queries."""
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
    pages = page_table
    if PAGED:
        pages = page_table + prefix_row * max_pages
        straddled = first < 0
    own_shift = own_row - prefix_length

    column = tl.arange(0, WIDTH)
    key_head_of_key = key_head + tl.zeros((BLOCK,), tl.int32)
    queries = load_rows(query, row, row_ok, head, query_stride, column, E, WIDTH)
    m, s, o = empty(BM, WIDTH)
    split_m, split_s, split_o = empty(BM, WIDTH)
    # one loop over the blocks of all splits, so that loads are pipelined across splits
    for run in range(1 + straddled.to(tl.int32)):
        start, masked, stop = run_of_blocks(run, lowest, whole, end, straddled, gathered, own, WINDOWED)
        for at in range(start, masked, BLOCK):
            if at % SPLIT == 0:
                m, s, o = merge(m, s, o, split_m, split_s, split_o)
                split_m = tl.full((BM,), NEVER, tl.float32)  # its factor 2^-inf = 0 clears the sums, too
            first_row = block_row(at, pages, prefix_length, prefix_row, own_shift, PAGED, BLOCK)
            keys, values = load_whole_block(
                key, value, key_blocks, value_blocks, first_row, key_head, key_stride, column, BLOCK, E, WIDTH, TMA
            )
            split_m, split_s, split_o = add_block(
                queries, keys, values, split_m, split_s, split_o, position, position, window, inner, gain,
                False, WINDOWED, SOFTCAP, PRECISION,
            )  # fmt: skip
        for at in range(masked, stop, BLOCK):
            if at % SPLIT == 0:
                m, s, o = merge(m, s, o, split_m, split_s, split_o)
                split_m = tl.full((BM,), NEVER, tl.float32)
            key_position, rows = key_rows(
                at, pages, branches, prefix_length, trunk_length, prefix_row, own_shift, PAGED, BLOCK
            )
            keys = load_rows(key, rows, key_position < end, key_head_of_key, key_stride, column, E, WIDTH)
            values = load_rows(value, rows, key_position < end, key_head_of_key, key_stride, column, E, WIDTH)
            split_m, split_s, split_o = add_block(
                queries, keys, values, split_m, split_s, split_o, position, key_position, window, inner, gain,
                True, WINDOWED, SOFTCAP, PRECISION,
            )  # fmt: skip
    m, s, o = merge(m, s, o, split_m, split_s, split_o)
    store_rows(output, row, row_ok, head, K * R, column, o / s[:, None], E, WIDTH)
    place = log_sum_exp + row.to(tl.int64) * (K * R) + head
    tl.store(place, (m + tl.log2(s)) * LN2, mask=row_ok)
