"""What the chunked head does with a tile of float32 logits, in one pass each.

Equal to the torch operations in ``chunked.py``, which read and write the tile six to ten times. One program works on a
row, so that its sums are row-invariant.
"""

import triton
import triton.language as tl

from logitless.head.kernels.forward import tanh

LOWEST = tl.constexpr(-3.0e38)
"""Below any logit that is a number; finite, for a row may have nothing but -inf."""
FLOOR = tl.constexpr(-1e4)
"""Stands for -inf in differences of logits: exp of it is exactly 0, and so is 0 times it."""


@triton.jit
def logits(product, inside, outside, SOFTCAP: tl.constexpr):
    """(tanh, or the product without a softcap; the logit)."""
    capped = tanh(product * inside) if SOFTCAP else product
    return capped, capped * outside


@triton.jit(do_not_specialize=["num_columns"])
def tile_sums(
    z,  # [n, stride] float32 products
    outside,  # [n] float32, or None for 1
    target,  # [n] int64, counted from the first of these columns; may be none of them
    sums,  # out [4, n] float32: top, S, T, z_y
    inside, num_columns, stride, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest logit, S and T relative to it over v != y, and the target's logit (0 where it is not here)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.num_programs(0)
    scale = 1.0 if outside is None else tl.load(outside + row)
    y = tl.load(target + row)
    top = tl.full((), LOWEST, tl.float32)
    s = tl.zeros((), tl.float32)
    t = tl.zeros((), tl.float32)
    own = tl.zeros((), tl.float32)
    for start in range(0, num_columns, BLOCK):
        v = start + tl.arange(0, BLOCK)
        here = v < num_columns
        _, logit = logits(tl.load(z + row * stride + v, mask=here, other=0.0), inside, scale, SOFTCAP)
        own += tl.sum(tl.where(v == y, logit, 0.0), 0)
        new = tl.maximum(top, tl.max(tl.where(here, logit, LOWEST), 0))
        d = logit - new
        d = tl.where(d < FLOOR, FLOOR, d)
        e = tl.where(here & (v != y), tl.exp(d), 0.0)
        shift = tl.maximum(top - new, FLOOR)
        factor = tl.exp(shift)
        t = (t + s * shift) * factor + tl.sum(e * d, 0)
        s = s * factor + tl.sum(e, 0)
        top = new
    tl.store(sums + row, top)
    tl.store(sums + n + row, s)
    tl.store(sums + 2 * n + row, t)
    tl.store(sums + 3 * n + row, own)


@triton.jit(do_not_specialize=["num_columns"])
def tile_gradient(
    z,  # in [n, stride] float32 products; out u where WIDE
    narrow,  # out [n, stride] u in the dtype of the operands; may be z
    outside,  # [n] float32, or None for 1
    target,  # [n] int64, as of ``tile_sums``
    top, over, offset, at_target,  # [n] float32: see ``chunked._Slopes``
    grad_logp, grad_entropy,  # [n] float32, or None
    inside, num_columns, stride, SOFTCAP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """u of ``chunked._Slopes``, times the softcap's slope."""
    row = tl.program_id(0).to(tl.int64)
    scale = 1.0 if outside is None else tl.load(outside + row)
    highest = tl.load(top + row)
    weight = tl.load(over + row)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = v < num_columns
    capped, logit = logits(tl.load(z + row * stride + v, mask=here, other=0.0), inside, scale, SOFTCAP)
    d = logit - highest
    d = tl.where(d < FLOOR, FLOOR, d)
    u = tl.exp(d) * weight
    if grad_entropy is not None:
        slope = tl.load(grad_entropy + row) * (d + tl.load(offset + row))
        if grad_logp is not None:
            slope += tl.load(grad_logp + row)
        u *= slope
    elif grad_logp is not None:
        u *= tl.load(grad_logp + row)
    u = tl.where(v == tl.load(target + row), tl.load(at_target + row), u)
    if SOFTCAP:
        u *= 1.0 - capped * capped
    if WIDE:
        tl.store(z + row * stride + v, u, mask=here)
    tl.store(narrow + row * stride + v, u.to(narrow.dtype.element_ty), mask=here)
