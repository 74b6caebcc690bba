"""Kernels of the gradient pass: two products on the rows with a gradient ("nonzero"), and what prepares their operands.

Nonzero rows are moved to the front: slot j holds row ``source[j]``, for ``count`` slots. A nonzero row below ``count``
stays where it is, and other rows there are overwritten by nonzero rows from ``count`` or beyond, so that no row is read
and written in the same launch. ``count`` stays on the device.
"""

import triton
import triton.language as tl

from logitless.head.kernels.forward import LN2, halves, row_by_column, tanh, tile_place


@triton.jit(do_not_specialize_on_alignment=["count"])
def move_rows(
    kept,  # in and out [N, V] of row stride ``stride``
    source,  # [N] int32
    count,  # [1] int32
    V, stride, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Row ``source[j]`` of ``kept`` to row j for all j < count."""
    for slot in range(tl.program_id(0), tl.load(count).to(tl.int32), PROGRAMS):
        origin = tl.load(source + slot)
        if origin != slot:
            to = kept + tl.cast(slot, tl.int64) * stride
            of = kept + origin.to(tl.int64) * stride
            for start in range(0, V, BLOCK):
                v = start + tl.arange(0, BLOCK)
                tl.store(to + v, tl.load(of + v, mask=v < V), mask=v < V)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["count"])
def clear_rows(
    kept,  # out [N, V] of row stride ``stride``
    count,  # [1] int32
    V, stride, N, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zeros in the rows from ``count`` up to the next multiple of ALIGN (a whole ALIGN when count is 0).

    A separate launch, because ``move_rows`` may read these rows.
    """
    nonzero = tl.load(count).to(tl.int32)
    row = nonzero + tl.program_id(0)
    end = tl.minimum(tl.cdiv(tl.maximum(nonzero, 1), ALIGN) * ALIGN, N)
    if row < end:
        v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        zero = tl.zeros((BLOCK,), kept.dtype.element_ty)
        tl.store(kept + row.to(tl.int64) * stride + v, zero, mask=v < V)


@triton.jit(do_not_specialize_on_alignment=["count"])
def gather_rows(
    x,  # [N, D]
    row_of_slot,  # [slots] int32
    factor,  # [slots] float32, or None for 1
    count,  # [1] int32
    out,  # out [slots, D]
    D, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[j] = factor[j] * x[row_of_slot[j]] for j < count, 0 after it."""
    slot = tl.program_id(0).to(tl.int64)
    nonzero = slot < tl.load(count)
    row = tl.load(row_of_slot + slot).to(tl.int64)
    scale = 1.0
    if factor is not None:
        scale = tl.load(factor + slot)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * D + d, mask=(d < D) & nonzero, other=0.0).to(tl.float32)
        value = tl.where(nonzero, value * scale, 0.0)
        tl.store(out + slot * D + d, value.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["N"])
def add_entropy_gradient(
    kept,  # in and out [N, V] of row stride ``stride``
    nonzero,  # [N] bool
    target,  # [N] int64 column in ``kept``
    entry,  # [N] float32
    shift,  # [N] float32, bits
    grad_logp, grad_entropy,  # [N] float32: g and h
    entropy,  # [N] float32, nats: H
    V, stride, N,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """E_v becomes E_v (g + h (log p_v + H)), the target's entry ``entry``; log p_v is read off E_v itself."""
    for row in range(tl.program_id(0), N, PROGRAMS):
        if tl.load(nonzero + row) != 0:
            place = kept + tl.cast(row, tl.int64) * stride
            g = tl.load(grad_logp + row)
            h = tl.load(grad_entropy + row)
            offset = tl.load(shift + row) * LN2 + tl.load(entropy + row)
            y = tl.load(target + row)
            own = tl.load(entry + row)
            for start in range(0, V, BLOCK):
                v = start + tl.arange(0, BLOCK)
                e = tl.load(place + v, mask=v < V, other=0.0).to(tl.float32)
                log_p = tl.log(tl.where(e == 0.0, 1.0, e)) + offset
                value = tl.where(v == y, own, tl.where(e == 0.0, 0.0, e * (g + h * log_p)))
                tl.store(place + v, value.to(kept.dtype.element_ty), mask=v < V)


@triton.jit(do_not_specialize=["N", "first"], do_not_specialize_on_alignment=["count"])
def logit_gradient_product(
    x,  # [slots, D], or its TMA descriptor
    w,  # [V, D], or its TMA descriptor
    bias,  # [V] float32, or None
    out,  # out [N, out_stride], or its TMA descriptor; N slots
    count,  # [1] int32
    multiplier,  # [N] float32
    inner, gain,  # numbers
    log_normaliser,  # [N] float32, bits
    target,  # [N] int64, counted from the first column of w
    grad_logp,  # [N] float32: g
    grad_target,  # [N] float32
    grad_entropy,  # [N] float32: h, or None
    entropy,  # [N] float32, nats: H
    first, V, D, N, out_stride,
    SOFTCAP: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Recomputed gradient of the loss in the products, for the block of columns that starts at ``first``.

    -p_v (g + h (log p_v + H)) times the softcap's slope, and ``grad_target`` times it in the target's column.
    """
    num_rows = tl.load(count).to(tl.int32)
    num_m = tl.cdiv(tl.maximum(num_rows, 1), BM)
    num_n = tl.cdiv(tl.minimum(out_stride, V - first), BN)
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=TMA):
        m, n = tile_place(tile, num_m, num_n, GROUP)
        row = m * BM + tl.arange(0, BM)
        row_ok = row < num_rows
        cols = first + n * BN + tl.arange(0, BN)
        z = row_by_column(
            x, w, None, None, bias, row, row_ok, m * BM, first + n * BN, V, D, 0, BM, BN, BK, TMA, PRECISION
        )
        slope = 1.0
        if SOFTCAP:
            capped = tanh(z * (inner * gain))
            slope = 1.0 - capped * capped
            z = capped
        scale = tl.load(multiplier + row, mask=row_ok, other=0.0)
        if not SOFTCAP:
            scale *= gain
        log_p = z * scale[:, None]
        log_p -= tl.load(log_normaliser + row, mask=row_ok, other=0.0)[:, None]
        p = tl.exp2(log_p)
        weight = tl.load(grad_logp + row, mask=row_ok, other=0.0)[:, None]
        if grad_entropy is not None:
            h = tl.load(grad_entropy + row, mask=row_ok, other=0.0)[:, None]
            log_p = tl.where(p == 0.0, 0.0, log_p)
            weight += h * (log_p * LN2 + tl.load(entropy + row, mask=row_ok, other=0.0)[:, None])
        own = tl.load(grad_target + row, mask=row_ok, other=0.0)[:, None]
        y = tl.load(target + row, mask=row_ok, other=-1)[:, None]
        value = tl.where(cols[None, :] == y, own, -p * weight) * slope
        value = tl.where(row_ok[:, None] & (cols < V)[None, :], value, 0.0)
        if TMA and SPLIT:
            left, right = halves(value.to(out.dtype), BM, BN)
            out.store([m * BM, n * BN], left)
            out.store([m * BM, n * BN + BN // 2], right)
        elif TMA:
            out.store([m * BM, n * BN], value.to(out.dtype))
        else:
            local = n * BN + tl.arange(0, BN)
            place = out + row.to(tl.int64)[:, None] * out_stride + local[None, :]
            tl.store(place, value.to(out.dtype.element_ty), mask=(row < N)[:, None] & (local < out_stride)[None, :])


@triton.jit
def store_rows(
    acc,  # [BM, columns] float32
    slot,  # [BM]
    slot_ok,  # [BM] whether the slot is taken
    cols,  # [columns]
    base,  # [slots, D] of row stride ``stride``, or None
    out,  # out [rows, D] of row stride ``stride``
    row_of_slot,  # [slots], or None for the slot itself
    factor,  # [slots] float32, or None for 1
    D, stride,
):  # fmt: skip
    """The epilogue of ``row_product``."""
    inside = slot_ok[:, None] & (cols < D)[None, :]
    if base is not None:
        acc += tl.load(base + slot.to(tl.int64)[:, None] * stride + cols[None, :], mask=inside, other=0.0)
    if factor is not None:
        acc *= tl.load(factor + slot, mask=slot_ok, other=0.0)[:, None]
    row = slot if row_of_slot is None else tl.load(row_of_slot + slot, mask=slot_ok, other=0)
    place = out + row.to(tl.int64)[:, None] * stride + cols[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def share_parts(num_rows, num_tiles, most, room, PROGRAMS: tl.constexpr):
    """Into how many parts a tile's sum is divided, so that few programs are idle.

    Tiles come in rounds of PROGRAMS; a last round that is nearly empty takes as long as a full one. A number of parts
    must save a 32nd of the time, and the parts of all rows must fit into ``room`` rows.
    """
    best = 1
    rounds = tl.cdiv(num_tiles, PROGRAMS)
    for parts in range(2, most + 1):
        some = tl.cdiv(num_tiles * parts, PROGRAMS)
        better = (some * best * 32 < rounds * parts * 31) & (num_rows * parts <= room)
        best = tl.where(better, parts, best)
        rounds = tl.where(better, some, rounds)
    return best


@triton.jit(do_not_specialize=["most", "room"], do_not_specialize_on_alignment=["count"])
def row_product(
    k,  # [slots, V] of row stride k_stride, or its TMA descriptor
    w,  # [V, D] of row stride w_stride, or its TMA descriptor
    base,  # [slots, D] of row stride ``stride``, or None
    out,  # out [rows, D] of row stride ``stride``; with SHARED [room, D] float32, the parts of all rows in turn
    row_of_slot,  # [slots], or None for the slot itself
    factor,  # [slots] float32, or None for 1
    count,  # [1] int32
    V, D, k_stride, w_stride, stride, most, room,
    SHARED: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """out[row_of_slot[j]] = factor[j] * (base[j] + sum_v k[j, v] w[v]), for j < count.

    Summed over v in float32, rounded once. With SHARED several programs share a tile, each with its part of the
    columns v, and ``sum_parts`` adds up what they write.
    """
    num_rows = tl.load(count).to(tl.int32)
    num_m = tl.cdiv(num_rows, BM)
    num_n = tl.cdiv(D, BN)
    parts = share_parts(num_rows, num_m * num_n, most, room, PROGRAMS) if SHARED else 1
    num_steps = tl.cdiv(V, BK * parts)
    for share in tl.range(tl.program_id(0), num_m * num_n * parts, PROGRAMS, flatten=TMA):
        m, n = tile_place(share // parts, num_m, num_n, GROUP)
        part = share % parts
        slot = m * BM + tl.arange(0, BM)
        slot_ok = slot < num_rows
        first = n * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(num_steps):
            start = (part * num_steps + step) * BK
            if TMA:
                a = k.load([m * BM, start])
                b = w.load([start, first])
            else:
                v = start + tl.arange(0, BK)
                cols = first + tl.arange(0, BN)
                a_place = k + slot.to(tl.int64)[:, None] * k_stride + v[None, :]
                b_place = w + v.to(tl.int64)[:, None] * w_stride + cols[None, :]
                a = tl.load(a_place, mask=slot_ok[:, None] & (v < V)[None, :], other=0.0)
                b = tl.load(b_place, mask=(v < V)[:, None] & (cols < D)[None, :], other=0.0)
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        place = out
        if SHARED:
            place += part.to(tl.int64) * num_rows * stride
        if SPLIT:
            left, right = halves(acc, BM, BN)
            cols = first + tl.arange(0, BN // 2)
            store_rows(left, slot, slot_ok, cols, base, place, row_of_slot, factor, D, stride)
            store_rows(right, slot, slot_ok, cols + BN // 2, base, place, row_of_slot, factor, D, stride)
        else:
            cols = first + tl.arange(0, BN)
            store_rows(acc, slot, slot_ok, cols, base, place, row_of_slot, factor, D, stride)


@triton.jit(do_not_specialize=["most", "room"], do_not_specialize_on_alignment=["count"])
def sum_parts(
    shares,  # [room, D] float32: the parts of all rows in turn
    tiles_across,  # of ``row_product``, as are most and room
    most, room,
    base,  # [slots, D] of row stride ``stride``, or None
    out,  # out [rows, D] of row stride ``stride``
    row_of_slot,  # [slots], or None for the slot itself
    factor,  # [slots] float32, or None for 1
    count,  # [1] int32
    D, stride, BM: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row_of_slot[j]] = factor[j] * (base[j] + the sum of share j over the parts), for j < count."""
    slot = tl.program_id(0).to(tl.int64)
    num_rows = tl.load(count).to(tl.int32)
    if slot < num_rows:
        parts = share_parts(num_rows, tl.cdiv(num_rows, BM) * tiles_across, most, room, PROGRAMS)
        part_stride = tl.cast(num_rows, tl.int64) * D
        row = slot if row_of_slot is None else tl.load(row_of_slot + slot).to(tl.int64)
        scale = 1.0
        if factor is not None:
            scale = tl.load(factor + slot)
        for start in range(0, D, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            if base is not None:
                total += tl.load(base + slot * stride + cols, mask=cols < D, other=0.0)
            for part in range(parts):
                total += tl.load(shares + part * part_stride + slot * D + cols, mask=cols < D, other=0.0)
            tl.store(out + row * stride + cols, (total * scale).to(out.dtype.element_ty), mask=cols < D)


@triton.jit
def store_columns(
    acc,  # [BM, columns] float32
    v,  # [BM] rows of ``out``
    cols,  # [columns]
    base,  # [V, D] of row stride ``stride``, or None
    out,  # out [V, D] of row stride ``stride``
    V, D, stride,
):  # fmt: skip
    """The epilogue of ``column_product``."""
    place = v.to(tl.int64)[:, None] * stride + cols[None, :]
    inside = (v < V)[:, None] & (cols < D)[None, :]
    if base is not None:
        acc += tl.load(base + place, mask=inside, other=0.0)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["count"])
def column_product(
    k,  # [slots, V] of row stride k_stride, or its TMA descriptor
    h,  # [slots, D] of row stride h_stride, or its TMA descriptor; both 0 from ``count`` to the next multiple of BK
    base,  # [V, D] of row stride ``stride``, or None
    out,  # out [V, D] of row stride ``stride``
    count,  # [1] int32
    V, D, k_stride, h_stride, stride,
    TMA: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """out[v] = base[v] + sum_{j < count} k[j, v] h[j]."""
    num_rows = tl.load(count)
    num_steps = tl.cdiv(tl.maximum(num_rows.to(tl.int32), 1), BK)
    num_m = tl.cdiv(V, BM)
    num_n = tl.cdiv(D, BN)
    for tile in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=TMA):
        m, n = tile_place(tile, num_m, num_n, GROUP)
        v = m * BM + tl.arange(0, BM)
        first = n * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(num_steps):
            if TMA:
                a = k.load([step * BK, m * BM])
                b = h.load([step * BK, first])
            else:
                slot = step * BK + tl.arange(0, BK)
                cols = first + tl.arange(0, BN)
                a_place = k + slot.to(tl.int64)[:, None] * k_stride + v[None, :]
                b_place = h + slot.to(tl.int64)[:, None] * h_stride + cols[None, :]
                a = tl.load(a_place, mask=(slot < num_rows)[:, None] & (v < V)[None, :], other=0.0)
                b = tl.load(b_place, mask=(slot < num_rows)[:, None] & (cols < D)[None, :], other=0.0)
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        if SPLIT:
            left, right = halves(acc, BM, BN)
            cols = first + tl.arange(0, BN // 2)
            store_columns(left, v, cols, base, out, V, D, stride)
            store_columns(right, v, cols + BN // 2, base, out, V, D, stride)
        else:
            store_columns(acc, v, first + tl.arange(0, BN), base, out, V, D, stride)
