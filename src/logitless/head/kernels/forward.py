"""Kernels of the head's forward: one product of size N x V x D whose epilogue keeps exponentials anchored per row.

Values of rows are in bits (base 2), so that one multiply-add turns a product into the argument of ``exp2``:

    z = multiplier_n * product        (with a softcap: multiplier_n * tanh(inner * product))
    E_v = 2^(z_v - anchor_n),   S = sum_{v != y} E_v,   T = sum_{v != y} E_v (z_v - anchor_n)

``multiplier`` is scale / temperature * log2(e) (softcap / temperature * log2(e) with a softcap). Row sums are written
per tile and added up afterwards, without atomics: bitwise repeatable, and independent of the other rows.

Tiles are loaded by TMA descriptors (Hopper and later) or with masks (any GPU; needed for lists of rows). No maximum is
tracked: rows whose sums leave the range are flagged by ``partial_sums`` and recomputed with their maximum as the
anchor.
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)
# a row whose normaliser leaves 1 / WIDEST .. WIDEST is recomputed with its maximum as the anchor
WIDEST = tl.constexpr(2.0**60)
NEVER = tl.constexpr(-1e4)  # bits below the anchor at which a column is left out: 2^-1e4 is 0, and so is 0 * -1e4


@triton.jit
def tile_place(tile, num_m, num_n, GROUP: tl.constexpr):
    """Row and column of a tile, in the order of groups of GROUP rows of tiles, column by column in a group."""
    width = GROUP * num_n
    first = (tile // width) * GROUP
    size = tl.minimum(num_m - first, GROUP)
    inside = tile % width
    return first + inside % size, inside // size


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def log1p(x):
    """log(1 + x) to the last bit or two, by dividing out the rounding of 1 + x."""
    u = 1.0 + x
    lost = tl.where(u == 1.0, 1.0, u - 1.0)
    return tl.where((u == 1.0) | (u == float("inf")), x, tl.log(u) * (x / lost))


@triton.jit
def halves(tile, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of a tile's columns, each of which needs less shared memory."""
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def row_sums(tile, BM: tl.constexpr, BN: tl.constexpr, HALVED: tl.constexpr):
    """Sums over the columns of a tile; if HALVED, of each half and then of both."""
    if HALVED:
        left, right = halves(tile, BM, BN)
        total = tl.sum(left, 1) + tl.sum(right, 1)
    else:
        total = tl.sum(tile, 1)
    return total


@triton.jit
def add_product(x, w, acc, row, row_ok, cols, V, D, BK: tl.constexpr, PRECISION: tl.constexpr):
    """acc + x @ w.T of some rows and columns, by masked loads."""
    inner = tl.arange(0, BK)
    x_row = x + row.to(tl.int64)[:, None] * D
    w_row = w + cols.to(tl.int64)[:, None] * D
    for k in range(tl.cdiv(D, BK)):
        d = k * BK + inner
        a = tl.load(x_row + d[None, :], mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
        b = tl.load(w_row + d[None, :], mask=(cols < V)[:, None] & (d < D)[None, :], other=0.0)
        acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def row_by_column(
    x,  # [N, D], or its TMA descriptor
    w,  # [V, D], or its TMA descriptor
    x_low,  # [N, R] to stand beside x, without TMA; or None
    w_low,  # [V, R], as x_low
    bias,  # [V] float32, or None
    row,  # [BM] rows of x, for loads without TMA
    row_ok,  # [BM] whether there is such a row
    m, n, V, D, R,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x @ w.T + bias of one tile, in float32; ``m`` and ``n`` are its first row and column."""
    acc = tl.zeros((BM, BN), tl.float32)
    cols = n + tl.arange(0, BN)
    if TMA:
        for k in range(tl.cdiv(D, BK)):
            acc = tl.dot(x.load([m, k * BK]), w.load([n, k * BK]).T, acc, input_precision=PRECISION)
    else:
        acc = add_product(x, w, acc, row, row_ok, cols, V, D, BK, PRECISION)
        if x_low is not None:
            acc = add_product(x_low, w_low, acc, row, row_ok, cols, V, R, BK, PRECISION)
    if bias is not None:
        acc += tl.load(bias + cols, mask=cols < V, other=0.0)[None, :]
    return acc


@triton.jit(do_not_specialize=["N"])
def low_rows(
    x,  # [N, D]
    a,  # [R, D]: lora_a
    out,  # out [N, C]: the product rounded and, with TWICE, what that lost beside it
    scale,  # number
    N, R, D, C, TWICE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """scale * x @ a.T; row-invariant, unlike a library's product."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    product = add_product(x, a, tl.zeros((BM, BN), tl.float32), row, row < N, cols, R, D, BK, PRECISION) * scale
    place = out + row.to(tl.int64)[:, None] * C + cols[None, :]
    inside = (row < N)[:, None] & (cols < R)[None, :]
    high = product.to(out.dtype.element_ty)
    tl.store(place, high, mask=inside)
    if TWICE:
        tl.store(place + R, (product - high.to(tl.float32)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def target_logits(
    x,  # [N, D]
    w,  # [V, D]
    x_low,  # [N, R], or None
    w_low,  # [V, R], as x_low
    bias,  # [V] float32, or None
    target,  # [N] int64, counted from the first of these columns
    multiplier,  # [N] float32
    inner,  # number
    target_logit,  # out [N] float32, bits
    target_slope,  # out [N] float32, with a softcap
    V, D, R, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z_y in bits and, with a softcap, its slope 1 - tanh^2; nothing where the target is not in range(V)."""
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(target + row)
    owned = (y >= 0) & (y < V)
    column = tl.where(owned, y, 0).to(tl.int64)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        h = tl.load(x + row * D + d, mask=d < D, other=0.0).to(tl.float32)
        acc += h * tl.load(w + column * D + d, mask=d < D, other=0.0).to(tl.float32)
    if x_low is not None:
        for start in range(0, R, BLOCK):
            d = start + tl.arange(0, BLOCK)
            h = tl.load(x_low + row * R + d, mask=d < R, other=0.0).to(tl.float32)
            acc += h * tl.load(w_low + column * R + d, mask=d < R, other=0.0).to(tl.float32)
    z = tl.sum(acc, 0)
    if bias is not None:
        z += tl.load(bias + column)
    if SOFTCAP:
        z = tanh(z * inner)
        tl.store(target_slope + row, 1.0 - z * z, mask=owned)
    tl.store(target_logit + row, z * tl.load(multiplier + row), mask=owned)


@triton.jit(do_not_specialize=["N", "kept_rows"], do_not_specialize_on_alignment=["count"])
def anchored_exp_product(
    x,  # [N, D], or its TMA descriptor
    w,  # [V, D], or its TMA descriptor
    x_low,  # [N, R] to stand beside x, without TMA; or None
    w_low,  # [V, R], as x_low
    bias,  # [V] float32, or None
    kept,  # out [kept_rows, V] of row stride kept_stride, or its TMA descriptor, or None
    row_list,  # [N] int32, of which the first ``count`` are rows to compute; None for all rows in order
    count,  # [1] int32 on the device; None for N
    multiplier,  # [N] float32
    inner, gain,  # numbers
    anchor,  # [N] float32, bits
    target,  # [N] int64, counted from the first of these columns
    part_s,  # out [tiles of columns, N] float32
    part_t,  # out, as part_s
    N, V, D, R, kept_rows, kept_stride,
    SOFTCAP: tl.constexpr, MAXIMUM: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """S and T of every tile's columns and, where ``kept`` is given, E (times the softcap's slope) in its dtype.

    With ``row_list`` only its first ``count`` rows enter, and the sums are those of list positions. With MAXIMUM,
    ``part_s`` gets the largest z of the tile instead and nothing else is written.
    """
    num_rows = N if count is None else tl.load(count).to(tl.int32)
    num_m = tl.cdiv(num_rows, BM)
    num_n = tl.cdiv(V, BN)
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=TMA):
        m, n = tile_place(tile, num_m, num_n, GROUP)
        slot = m * BM + tl.arange(0, BM)
        row_ok = slot < num_rows
        row = slot if row_list is None else tl.load(row_list + slot, mask=row_ok, other=0)
        cols = n * BN + tl.arange(0, BN)
        z = row_by_column(x, w, x_low, w_low, bias, row, row_ok, m * BM, n * BN, V, D, R, BM, BN, BK, TMA, PRECISION)
        if SOFTCAP:
            capped = tanh(z * (inner * gain))
            slope = 1.0 - capped * capped
            z = capped
        scale = tl.load(multiplier + row, mask=row_ok, other=0.0)
        if not SOFTCAP:
            scale *= gain
        part = n.to(tl.int64) * N + slot
        if MAXIMUM:
            z = tl.where((cols < V)[None, :], z * scale[:, None], -float("inf"))
            tl.store(part_s + part, tl.max(z, 1), mask=row_ok)
        else:
            d = z * scale[:, None] - tl.load(anchor + row, mask=row_ok, other=0.0)[:, None]
            if bias is not None:  # a column masked by a bias of -inf: its 0 * -inf is 0
                d = tl.where(d < NEVER, NEVER, d)
            inside = tl.arange(0, BN)
            own = (tl.load(target + row, mask=row_ok, other=-1) - n * BN).to(tl.int32)
            d = tl.where(inside[None, :] == own[:, None], NEVER, d)
            if not EVEN:
                d = tl.where((cols < V)[None, :], d, NEVER)
            e = tl.exp2(d)
            tl.store(part_s + part, row_sums(e, BM, BN, TMA), mask=row_ok)
            tl.store(part_t + part, row_sums(e * d, BM, BN, TMA), mask=row_ok)
            if kept is not None:
                if SOFTCAP:
                    e *= slope
                if TMA and SPLIT:
                    left, right = halves(e.to(kept.dtype), BM, BN)
                    kept.store([m * BM, n * BN], left)
                    kept.store([m * BM, n * BN + BN // 2], right)
                elif TMA:
                    kept.store([m * BM, n * BN], e.to(kept.dtype))
                else:
                    place = kept + row.to(tl.int64)[:, None] * kept_stride + cols[None, :]
                    stored = (row_ok & (row < kept_rows))[:, None] & (cols < V)[None, :]
                    tl.store(place, e.to(kept.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["count"])
def partial_sums(
    part_s, part_t,  # [parts, N] float32
    row_list,  # [N] int32, or None for all rows in order
    count,  # [1] int32 on the device, or None for N
    target_logit,  # [N] float32, bits; read where ``flagged`` is given
    anchor,  # [N] float32, bits
    base_anchor, base_s, base_t,  # [N] float32, or None
    out_s, out_t,  # out [N] float32
    flagged,  # out [N] bool, or None
    N, parts,
    MAXIMUM: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Sum (or maximum) of the tiles' values of each row, in tile order; flags rows that need another anchor.

    ``base_*`` are the sums over earlier columns, with their own anchor.
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_rows = N if count is None else tl.load(count).to(tl.int32)
    ok = slot < num_rows
    row = slot if row_list is None else tl.load(row_list + slot, mask=ok, other=0)
    s = tl.full((BLOCK,), -float("inf") if MAXIMUM else 0.0, tl.float32)
    t = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, PARTS):
        p = start + tl.arange(0, PARTS)
        place = p.to(tl.int64)[:, None] * N + slot[None, :]
        mask = (p < parts)[:, None] & ok[None, :]
        if MAXIMUM:
            s = tl.maximum(s, tl.max(tl.load(part_s + place, mask=mask, other=-float("inf")), 0))
        else:
            s += tl.sum(tl.load(part_s + place, mask=mask, other=0.0), 0)
            t += tl.sum(tl.load(part_t + place, mask=mask, other=0.0), 0)
    if base_s is not None:
        before = tl.load(base_s + row, mask=ok, other=0.0)
        shift = tl.load(base_anchor + row, mask=ok, other=0.0) - tl.load(anchor + row, mask=ok, other=0.0)
        scale = tl.exp2(shift)
        s += before * scale
        t += (tl.load(base_t + row, mask=ok, other=0.0) + before * shift) * scale
    if MAXIMUM:
        tl.store(out_s + row, tl.where(s < LOWEST, LOWEST, s), mask=ok)
    else:
        tl.store(out_s + row, s, mask=ok)
        tl.store(out_t + row, t, mask=ok)
    if flagged is not None:
        above = tl.load(target_logit + row, mask=ok, other=0.0) - tl.load(anchor + row, mask=ok, other=0.0)
        normaliser = s + tl.exp2(above)
        tl.store(flagged + row, (normaliser > WIDEST) | (normaliser < 1.0 / WIDEST), mask=ok)


@triton.jit(do_not_specialize=["N"])
def rescale_rows(
    kept,  # in and out [N, V] of row stride ``stride``
    old, new,  # [N] float32, bits
    V, stride, N, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Change the anchors of kept exponentials from ``old`` to ``new``, in rows where the two differ."""
    for row in range(tl.program_id(0), N, PROGRAMS):
        before = tl.load(old + row)
        after = tl.load(new + row)
        if before != after:
            place = kept + tl.cast(row, tl.int64) * stride
            scale = tl.exp2(before - after)
            for start in range(0, V, BLOCK):
                v = start + tl.arange(0, BLOCK)
                e = tl.load(place + v, mask=v < V, other=0.0).to(tl.float32)
                tl.store(place + v, (e * scale).to(kept.dtype.element_ty), mask=v < V)


@triton.jit(do_not_specialize=["N", "kept_rows"])
def row_scores(
    s, t,  # [N] float32, over all columns but the target's
    anchor, target_logit,  # [N] float32, bits
    target_slope,  # [N] float32, read with a softcap
    target,  # [N] int64 column in ``kept``
    kept,  # in and out [kept_rows, V] of row stride kept_stride, or None
    logp, entropy,  # out [N] float32, nats
    normaliser,  # out [N] float32
    rounding,  # out [N] float32, where ``kept`` is given
    N, V, kept_rows, kept_stride, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """logp, entropy and Z = S + E_y of each row from its sums, and the target's entry -S of the kept exponentials.

    ``rounding`` is the exact entry over the stored one: folded into a row's factor it makes the target's term exact.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = row < N
    others = tl.load(s + row, mask=ok, other=1.0)
    above = tl.load(target_logit + row, mask=ok, other=0.0) - tl.load(anchor + row, mask=ok, other=0.0)
    own = tl.exp2(above)
    z = others + own
    log_z = tl.where(above == 0.0, log1p(others), tl.log(z))
    near = log1p(others * tl.exp2(-above))
    tl.store(logp + row, tl.where(above > -100.0, -near, above * LN2 - log_z), mask=ok)
    weighted = tl.load(t + row, mask=ok, other=0.0) + tl.where(own == 0.0, 0.0, own * above)
    tl.store(entropy + row, log_z - weighted / z * LN2, mask=ok)
    tl.store(normaliser + row, z, mask=ok)
    if kept is not None:
        entry = -others
        if SOFTCAP:
            entry *= tl.load(target_slope + row, mask=ok, other=1.0)
        stored = entry.to(kept.dtype.element_ty)
        exact = stored.to(tl.float32)
        y = tl.load(target + row, mask=ok, other=0)
        owned = ok & (row < kept_rows) & (y >= 0) & (y < V)
        tl.store(rounding + row, tl.where((exact == 0.0) | ~owned, 1.0, entry / exact), mask=ok)
        tl.store(kept + row.to(tl.int64) * kept_stride + y, stored, mask=owned)
