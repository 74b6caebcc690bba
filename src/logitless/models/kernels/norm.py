"""RMSNorm together with the residual stream, a program a row; torch's reductions choose their order by shape.

    plain       out = norm(x)
    add before  sum = x + delta;  out = norm(sum)           (Llama, Qwen, Mistral, Phi)
    add after   sum = x + norm(delta)                       (Gemma's norms after attention and MLP)

    norm(v) = round(v * rsqrt(mean(v^2) + eps)) * weight                  as transformers' LlamaRMSNorm
    norm(v) = round(v * rsqrt(mean(v^2) + eps) * weight)                  with ``once``, as its GptOssRMSNorm
    norm(v) = round(v * rsqrt(mean(v^2) + eps) * (1 + weight))            with ``gemma``, as its GemmaRMSNorm

in float32, rounded as in transformers. The order of the sum over a row depends on the row's length only. The backward
is one kernel; the weight's gradient is summed over blocks of rows in order, without atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.models.kernels.overlap import after_inputs, overlapping
from logitless.models.kernels.rows import divided_up, empty_rows, power_of_two
from logitless.quick_launch import quick_launch


@triton.jit
def normalised(v, weight, eps, length, GEMMA: tl.constexpr, ONCE: tl.constexpr, dtype: tl.constexpr):
    """norm(v) of one row in float32, with transformers' roundings; v and weight are 0 beyond ``length``."""
    unit = v * tl.rsqrt(tl.sum(v * v, 0) / length + eps)
    if GEMMA:
        return (unit * (1.0 + weight)).to(dtype).to(tl.float32)
    if ONCE:
        return (unit * weight).to(dtype).to(tl.float32)
    return (unit.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@quick_launch
@triton.jit
def norm_kernel(
    x,  # [T, D] what is normed, or the residual stream; a row ``stride`` after the other
    delta,  # [T, D] or None
    weight,  # [D]
    total,  # [T, D] the new residual stream, or None
    out,  # [T, D] normed, or None
    eps,
    length,  # D
    stride,
    GEMMA: tl.constexpr, ONCE: tl.constexpr,
    AFTER: tl.constexpr,  # norm delta and add it, instead of adding it and norming the sum
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row."""
    after_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * length
    column = tl.arange(0, BLOCK)
    inside = column < length
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    stored = tl.load(x + tl.program_id(0).to(tl.int64) * stride + column, mask=inside, other=0.0)
    v = stored.to(tl.float32)
    if AFTER:
        d = tl.load(delta + row + column, mask=inside, other=0.0).to(tl.float32)
        v = v + normalised(d, w, eps, length, GEMMA, ONCE, stored.dtype)
        tl.store(total + row + column, v.to(stored.dtype), mask=inside)
    else:
        if delta is not None:
            v = (v + tl.load(delta + row + column, mask=inside, other=0.0).to(tl.float32)).to(stored.dtype)
            tl.store(total + row + column, v, mask=inside)
            v = v.to(tl.float32)
        normed = normalised(v, w, eps, length, GEMMA, ONCE, stored.dtype)
        tl.store(out + row + column, normed.to(stored.dtype), mask=inside)


@quick_launch
@triton.jit(do_not_specialize=["num_rows", "rows_per_program"])
def norm_backward_kernel(
    v,  # [T, D] what was normed, a row ``stride`` after the other
    weight,  # [D]
    grad_out,  # [T, D] of norm(v), a row ``grad_stride`` after the other
    grad_total,  # [T, D] that reached v by the residual stream, or None
    grad_v,  # [T, D] as ``grad_out``; may be the same memory
    parts,  # [P, D] float32, the weight's gradient over each program's rows, or None
    eps,
    num_rows,  # T
    length,  # D
    stride, grad_stride, rows_per_program,
    GEMMA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Consecutive rows, one after the other."""
    column = tl.arange(0, BLOCK)
    inside = column < length
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if GEMMA:
        w = tl.where(inside, 1.0 + w, 0.0)
    first = tl.program_id(0) * rows_per_program
    summed = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.minimum(rows_per_program, num_rows - first)):
        row = first.to(tl.int64) + i
        at = row * grad_stride + column
        x = tl.load(v + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad_out + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / length + eps)
        unit = x * inverse
        scaled = g * w
        summed += g * unit
        grad = inverse * (scaled - unit * (tl.sum(scaled * unit, 0) / length))
        if grad_total is not None:
            grad += tl.load(grad_total + row * length + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_v + at, grad.to(grad_v.dtype.element_ty), mask=inside)
    if parts is not None:
        tl.store(parts + tl.program_id(0) * length + column, summed, mask=inside)


@quick_launch
@triton.jit
def sum_parts_kernel(
    parts,  # [P, D] float32
    out,  # [D]
    num_parts,  # P
    length,  # D
    PARTS: tl.constexpr,  # at a time
    BLOCK: tl.constexpr,
):
    """Sum of each column over the parts, in order."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS)
    inside = (column < length)[None, :]
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for p in range(0, num_parts, PARTS):
        at = (p + part)[:, None]
        total += tl.load(parts + at * length + column[None, :], mask=inside & (at < num_parts), other=0.0)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < length)


def row_warps(block: int) -> int:
    """Warps of a program that reduces a row. Depends on the row's length only: the order of a sum depends on it."""
    return min(8, max(1, block // 512))


def norm(
    x: Tensor, weight: Tensor, eps: float, *, delta: Tensor | None = None, gemma: bool = False, once: bool = False,
    after: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(residual stream, normed row) of the forms above.

    Args:
        x: [T, D] contiguous: what is normed, or the residual stream. Without ``delta`` it may be columns of a tensor.
        weight: [D].
        eps: inside the root.
        delta: [T, D] contiguous: what is added to the residual stream.
        gemma: norm as Gemma does.
        once: round as gpt-oss does, after the weight alone.
        after: norm ``delta`` and add the result; no normed row is returned.

    Returns:
        ``(x, norm(x))`` without ``delta``; ``(x + delta, norm(x + delta))``; or ``(x + norm(delta), None)``.
    """
    length = x.shape[-1]
    block = power_of_two(length)
    total = x if delta is None else torch.empty_like(x)
    out = None if after else empty_rows(*x.shape, like=x)
    norm_kernel[(x.numel() // length,)](
        x, delta, weight, None if delta is None else total, out, eps, length, x.stride(0),
        GEMMA=gemma, ONCE=once, AFTER=after, BLOCK=block, num_warps=row_warps(block), **overlapping(x.device),
    )  # fmt: skip
    return total, out


def norm_backward(
    v: Tensor, weight: Tensor, eps: float, grad_out: Tensor, grad_total: Tensor | None, *, gemma: bool,
    weight_dtype: torch.dtype | None, in_place: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of what was normed and of the weight.

    Args:
        v: [T, D] what was normed; may be columns of a tensor.
        grad_out: [T, D] gradient of ``norm(v)``; contiguous unless ``in_place``.
        grad_total: [T, D] gradient of v from the residual stream; added.
        weight_dtype: of the weight's gradient; None if that is not needed.
        in_place: write the gradient of v over ``grad_out``, which may be columns of a tensor.
    """
    length = v.shape[-1]
    rows = v.numel() // length
    block = power_of_two(length)
    grad_v = grad_out if in_place else torch.empty_like(grad_out)
    per_program = max(1, divided_up(rows, 1056)) if v.is_cuda else divided_up(rows, 2)
    programs = divided_up(rows, per_program)
    parts = torch.empty(programs, length, dtype=torch.float32, device=v.device) if weight_dtype else None
    norm_backward_kernel[(programs,)](
        v, weight, grad_out, grad_total, grad_v, parts, eps, rows, length, v.stride(0), grad_out.stride(0), per_program,
        GEMMA=gemma, BLOCK=block, num_warps=row_warps(block),
    )  # fmt: skip
    return grad_v, None if parts is None or weight_dtype is None else sum_parts(parts, weight_dtype)


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """[D] sums over the first dimension of [P, D], in order."""
    num_parts, length = parts.shape
    out = torch.empty(length, dtype=dtype, device=parts.device)
    block = 16 if parts.is_cuda else power_of_two(length)
    sum_parts_kernel[(divided_up(length, block),)](
        parts, out, num_parts, length, PARTS=128 if parts.is_cuda else 2, BLOCK=block, num_warps=4
    )
    return out
