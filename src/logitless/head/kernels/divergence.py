"""What two streams do with the tiles of their products, in one pass over both each.

Equal to the torch operations in ``divergence_chunked.py``, which read and write both tiles about ten times. One program
works on a row, so that its sums are row-invariant. z is of the student, y of the teacher; d is a logit minus a maximum.
"""

import triton
import triton.language as tl

from logitless.head.kernels.tiles import FLOOR, LOWEST, logits

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """exp(x), and 0 below 2^-126, which takes three operations less than ``tl.exp``."""
    return tl.exp2(x * LOG2E)


@triton.jit
def relative(logit, top, MASKED: tl.constexpr):
    """``logit - top``, and FLOOR for a logit of -inf, which only a bias can make (MASKED)."""
    d = logit - top
    if MASKED:
        d = tl.where(logit == float("-inf"), FLOOR, d)
    return d


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0; near 0 by its series, whose next term is below 1e-8 of it."""
    series = 1.0 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040))))))
    return tl.where(x > -0.4, x * series, exp(x) - 1.0)


@triton.jit
def log1p(x):
    """log(1 + x) for -1 < x <= 0; what the sum loses is added, and is 0 where 1 + x is small."""
    u = 1.0 + x
    return tl.log(u) + (x - (u - 1.0))


@triton.jit
def over_mixture(log_ratio, beta, rest):
    """(log(p / m), log(q / m)) of log_ratio = log(q / p), with m = rest p + beta q; only the larger of p / m, q / m
    is computed, which needs no exponential of a positive number."""
    up = log_ratio > 0.0
    larger = -log1p(tl.where(up, rest, beta) * expm1(-tl.abs(log_ratio)))
    return tl.where(up, larger - log_ratio, larger), tl.where(up, larger, larger + log_ratio)


@triton.jit
def log_probs(product, inside, outside, top, log_normaliser, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """(tanh, or the product without a softcap; the log-probability)."""
    capped, logit = logits(product, inside, outside, SOFTCAP)
    return capped, relative(logit, top, MASKED) - log_normaliser


@triton.jit
def moved(gap, weights, shift, shift_other, factor, MASKED: tl.constexpr):
    """Partial sums of exp(d) (d - d_other) after both maxima have moved."""
    after = (gap + weights * (shift - shift_other)) * factor
    if MASKED:
        after = tl.where(factor == 0.0, 0.0, after)  # inf * 0: the old terms vanish beside the new maximum
    return after


@triton.jit
def gap_terms(e, d, d_other, other, MASKED: tl.constexpr):
    """exp(d) (d - d_other); inf where ``other`` excludes what has a weight."""
    terms = e * (d - d_other)
    if MASKED:
        terms = tl.where((other == float("-inf")) & (e > 0.0), float("inf"), terms)
    return terms


@triton.jit
def both_larger(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def more_sums(
    z_row, y_row, start, own, num_columns, scale, scale_teacher, inside, inside_teacher,
    top, top_teacher, s, t, s_teacher, t_teacher, gap,
    SOFTCAP: tl.constexpr, SOFTCAP_TEACHER: tl.constexpr, MASKED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """The state of ``pair_sums`` with one more block of columns; FULL: all of them are there."""
    lane = tl.arange(0, BLOCK)
    here = None if FULL else lane < num_columns - start
    _, p_logit = logits(tl.load(z_row + start + lane, mask=here), inside, scale, SOFTCAP)
    _, q_logit = logits(tl.load(y_row + start + lane, mask=here), inside_teacher, scale_teacher, SOFTCAP_TEACHER)
    counted = lane != own - start
    if not FULL:
        counted = counted & here
    p_logit = tl.where(counted, p_logit, LOWEST)
    q_logit = tl.where(counted, q_logit, LOWEST)
    new, new_teacher = tl.reduce((p_logit, q_logit), 0, both_larger)
    new = tl.maximum(top, new)
    new_teacher = tl.maximum(top_teacher, new_teacher)
    if (new > top) | (new_teacher > top_teacher):  # of few blocks; the others take half of the operations
        shift = tl.maximum(top - new, FLOOR)
        shift_teacher = tl.maximum(top_teacher - new_teacher, FLOOR)
        factor = exp(shift)
        factor_teacher = exp(shift_teacher)
        if KIND == "reverse_kl":
            gap = moved(gap, s, shift, shift_teacher, factor, MASKED)
        elif (KIND == "forward_kl") | (KIND == "centering"):
            gap = moved(gap, s_teacher, shift_teacher, shift, factor_teacher, MASKED)
        t = (t + s * shift) * factor
        s = s * factor
        t_teacher = (t_teacher + s_teacher * shift_teacher) * factor_teacher
        s_teacher = s_teacher * factor_teacher
    d = relative(p_logit, new, MASKED)
    d_teacher = relative(q_logit, new_teacher, MASKED)
    e = exp(d)
    e_teacher = exp(d_teacher)
    if KIND == "reverse_kl":
        gap += gap_terms(e, d, d_teacher, q_logit, MASKED)
    elif (KIND == "forward_kl") | (KIND == "centering"):
        gap += gap_terms(e_teacher, d_teacher, d, p_logit, MASKED)
    t += e * d
    s += e
    t_teacher += e_teacher * d_teacher
    s_teacher += e_teacher
    return new, new_teacher, s, t, s_teacher, t_teacher, gap


@triton.jit
def pair_sums(
    z, y,  # [n, stride] float32 products
    outside, outside_teacher,  # [n] float32, or None for 1
    target,  # [n] int64, counted from the first of these columns; may be none of them
    sums,  # out [9, n] float32: see ``divergence_chunked._PairSums``
    inside, inside_teacher, num_columns, stride,
    SOFTCAP: tl.constexpr, SOFTCAP_TEACHER: tl.constexpr, MASKED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum, S, T and the target's logit of both streams, and the sum ``gap`` that a KL divergence needs."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.num_programs(0)
    scale = 1.0 if outside is None else tl.load(outside + row)
    scale_teacher = 1.0 if outside_teacher is None else tl.load(outside_teacher + row)
    own = tl.load(target + row).to(tl.int32)
    z_row = z + row * stride
    y_row = y + row * stride
    is_here = (own >= 0) & (own < num_columns)
    _, at = logits(tl.load(z_row + own, mask=is_here, other=0.0), inside, scale, SOFTCAP)
    _, at_teacher = logits(
        tl.load(y_row + own, mask=is_here, other=0.0), inside_teacher, scale_teacher, SOFTCAP_TEACHER
    )
    # BLOCK partial sums each, added up at the end: only the maxima are reduced for every block
    top = tl.maximum(tl.where(is_here, at, LOWEST), LOWEST)
    top_teacher = tl.maximum(tl.where(is_here, at_teacher, LOWEST), LOWEST)
    s = tl.zeros((BLOCK,), tl.float32)
    t = tl.zeros((BLOCK,), tl.float32)
    s_teacher = tl.zeros((BLOCK,), tl.float32)
    t_teacher = tl.zeros((BLOCK,), tl.float32)
    gap = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, num_columns - BLOCK + 1, BLOCK, num_stages=3):
        top, top_teacher, s, t, s_teacher, t_teacher, gap = more_sums(
            z_row, y_row, start, own, num_columns, scale, scale_teacher, inside, inside_teacher,
            top, top_teacher, s, t, s_teacher, t_teacher, gap,
            SOFTCAP, SOFTCAP_TEACHER, MASKED, KIND, BLOCK, FULL=True,
        )  # fmt: skip
    if num_columns % BLOCK > 0:
        top, top_teacher, s, t, s_teacher, t_teacher, gap = more_sums(
            z_row, y_row, num_columns // BLOCK * BLOCK, own, num_columns, scale, scale_teacher, inside, inside_teacher,
            top, top_teacher, s, t, s_teacher, t_teacher, gap,
            SOFTCAP, SOFTCAP_TEACHER, MASKED, KIND, BLOCK, FULL=False,
        )  # fmt: skip
    tl.store(sums + row, top)
    tl.store(sums + n + row, tl.sum(s, 0))
    tl.store(sums + 2 * n + row, tl.sum(t, 0))
    tl.store(sums + 3 * n + row, at)
    tl.store(sums + 4 * n + row, top_teacher)
    tl.store(sums + 5 * n + row, tl.sum(s_teacher, 0))
    tl.store(sums + 6 * n + row, tl.sum(t_teacher, 0))
    tl.store(sums + 7 * n + row, at_teacher)
    tl.store(sums + 8 * n + row, tl.sum(gap, 0))


@triton.jit(do_not_specialize=["stride_rows"])
def pair_terms(
    z, y,  # [n, stride] float32 products
    outside, outside_teacher, target,  # as of ``pair_sums``
    normalisers,  # [4, stride_rows] float32: the maximum and the log of the normaliser, of both streams
    terms,  # out [2, n] float32
    inside, inside_teacher, beta, rest, num_columns, stride, stride_rows,
    SOFTCAP: tl.constexpr, SOFTCAP_TEACHER: tl.constexpr, MASKED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums over v != y of the value and of ``divergence_chunked._Row.expected``, once normalisers are known."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.num_programs(0)
    scale = 1.0 if outside is None else tl.load(outside + row)
    scale_teacher = 1.0 if outside_teacher is None else tl.load(outside_teacher + row)
    own = tl.load(target + row)
    top = tl.load(normalisers + row)
    log_normaliser = tl.load(normalisers + stride_rows + row)
    top_teacher = tl.load(normalisers + 2 * stride_rows + row)
    log_normaliser_teacher = tl.load(normalisers + 3 * stride_rows + row)
    value = tl.zeros((BLOCK,), tl.float32)
    expected = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, num_columns, BLOCK, num_stages=3):
        v = start + tl.arange(0, BLOCK)
        here = v < num_columns
        counted = here & (v != own)
        p_product = tl.load(z + row * stride + v, mask=here, other=0.0)
        q_product = tl.load(y + row * stride + v, mask=here, other=0.0)
        _, log_p = log_probs(p_product, inside, scale, top, log_normaliser, SOFTCAP, MASKED)
        _, log_q = log_probs(
            q_product, inside_teacher, scale_teacher, top_teacher, log_normaliser_teacher, SOFTCAP_TEACHER, MASKED
        )
        p = exp(log_p)
        q = exp(log_q)
        if KIND == "jensen_shannon":
            over_p, over_q = over_mixture(log_q - log_p, beta, rest)
            part = p * over_p
            term = beta * q * over_q + rest * part
        else:
            change = p - q
            part = tl.where(change > 0.0, 0.5, tl.where(change < 0.0, -0.5, change)) * p
            term = tl.abs(change) * 0.5
        value += tl.where(counted, term, 0.0)
        expected += tl.where(counted, part, 0.0)
    tl.store(terms + row, tl.sum(value, 0))
    tl.store(terms + n + row, tl.sum(expected, 0))


@triton.jit(do_not_specialize=["stride_rows"])
def pair_gradient(
    z, y,  # [rows, stride] float32 products; y is None if the measure has no gradient
    source,  # [n] int64: the row of z and y to take, or None for the row itself
    wide,  # out [n, stride] float32, may be z; or None
    narrow,  # out [n, stride] u in the dtype of the operands
    outside, outside_teacher, target,  # as of ``pair_sums``
    slopes,  # [10, stride_rows] float32: see ``divergence_chunked._Gradient``
    inside, inside_teacher, beta, rest, num_columns, stride, stride_rows,
    SOFTCAP: tl.constexpr, SOFTCAP_TEACHER: tl.constexpr, MASKED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """u of ``divergence_chunked._Gradient``, times the softcap's slope."""
    row = tl.program_id(0).to(tl.int64)
    taken = row if source is None else tl.load(source + row)
    scale = 1.0 if outside is None else tl.load(outside + row)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = v < num_columns
    slope = slopes + row
    product = tl.load(z + taken * stride + v, mask=here, other=0.0)
    capped, log_p = log_probs(product, inside, scale, tl.load(slope), tl.load(slope + stride_rows), SOFTCAP, MASKED)
    p = exp(log_p)
    of_entropy = tl.load(slope + 7 * stride_rows) * (log_p + tl.load(slope + 8 * stride_rows))
    u = -p * (tl.load(slope + 6 * stride_rows) + of_entropy)
    if y is not None:
        scale_teacher = 1.0 if outside_teacher is None else tl.load(outside_teacher + row)
        product_teacher = tl.load(y + taken * stride + v, mask=here, other=0.0)
        _, log_q = log_probs(
            product_teacher, inside_teacher, scale_teacher, tl.load(slope + 2 * stride_rows),
            tl.load(slope + 3 * stride_rows), SOFTCAP_TEACHER, MASKED,
        )  # fmt: skip
        expected = tl.load(slope + 4 * stride_rows)
        if KIND == "reverse_kl":
            of_measure = p * (log_p - log_q - expected)
        elif KIND == "jensen_shannon":
            over_p, _ = over_mixture(log_q - log_p, beta, rest)
            of_measure = rest * p * (over_p - expected)
        elif KIND == "total_variation":
            change = p - exp(log_q)
            of_measure = p * (tl.where(change > 0.0, 0.5, tl.where(change < 0.0, -0.5, change)) - expected)
        elif KIND == "centering":
            of_measure = exp(log_q) - p
        else:
            of_measure = p - exp(log_q)
        u += tl.load(slope + 5 * stride_rows) * of_measure
    u = tl.where(v == tl.load(target + row), tl.load(slope + 9 * stride_rows), u)
    if SOFTCAP:
        u *= 1.0 - capped * capped
    place = row * stride + v
    if wide is not None:
        tl.store(wide + place, u, mask=here)
    tl.store(narrow + place, u.to(narrow.dtype.element_ty), mask=here)
