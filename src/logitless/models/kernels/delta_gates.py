"""Elementwise operations around the gated delta rule: its decay and beta, and the gated norm of its output.

    log_decay = -exp(a_log) * softplus(a + dt_bias),   beta = sigmoid(b)          float32, for each token and head
    out = round(round(x * rsqrt(mean(x^2) + eps)) * weight) * silu(gate)          for each head, rounded as transformers

The order of a head's sum depends on its width only. Gradients of weights are summed over blocks of rows in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.models.kernels.gate import activation, sigmoid
from logitless.models.kernels.norm import sum_parts
from logitless.models.kernels.overlap import after_inputs, overlapping
from logitless.models.kernels.rows import divided_up, empty_rows, power_of_two
from logitless.quick_launch import quick_launch


@triton.jit
def softplus(x):
    """log(1 + exp(x)), without cancellation: log(1 + e) e / ((1 + e) - 1) for small e."""
    e = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + e
    small = tl.where(one == 1.0, e, tl.log(one) * (e / tl.where(one == 1.0, 1.0, one - 1.0)))
    return tl.where(x > 20.0, x, small)


@quick_launch
@triton.jit(do_not_specialize=["num_rows"])
def decay_and_beta_kernel(
    a,  # [T, HV] rows ``a_stride`` apart
    b,  # [T, HV] rows ``b_stride`` apart
    a_log,  # [HV]
    dt_bias,  # [HV]
    log_decay,  # [T, HV] float32, written
    beta,  # [T, HV] float32, written
    num_rows, a_stride, b_stride,
    HV: tl.constexpr,
    HEADS: tl.constexpr,  # HV padded to a power of two
    ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some tokens."""
    after_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.arange(0, HEADS)[None, :]
    some = head < HV
    inside = (row < num_rows) & some
    rate = tl.exp(tl.load(a_log + head, mask=some, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + head, mask=some, other=0.0).to(tl.float32)
    step = softplus(tl.load(a + row * a_stride + head, mask=inside, other=0.0).to(tl.float32) + bias)
    tl.store(log_decay + row * HV + head, -rate * step, mask=inside)
    strength = sigmoid(tl.load(b + row * b_stride + head, mask=inside, other=0.0).to(tl.float32))
    tl.store(beta + row * HV + head, strength, mask=inside)


@quick_launch
@triton.jit(do_not_specialize=["num_rows", "rows_per_program"])
def decay_and_beta_backward_kernel(
    a,  # [T, HV] rows ``a_stride`` apart
    b,  # [T, HV] rows ``b_stride`` apart
    a_log,  # [HV]
    dt_bias,  # [HV]
    grad_log_decay,  # [T, HV] float32
    grad_beta,  # [T, HV] float32
    grad_a,  # [T, HV] written
    grad_b,  # [T, HV] written
    parts,  # [programs, 2, HV] float32 written: of ``a_log`` and ``dt_bias``
    num_rows, a_stride, b_stride, rows_per_program,
    HV: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Consecutive tokens, one after the other."""
    head = tl.arange(0, HEADS)
    some = head < HV
    rate = tl.exp(tl.load(a_log + head, mask=some, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + head, mask=some, other=0.0).to(tl.float32)
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    of_rate = tl.zeros((HEADS,), tl.float32)
    of_bias = tl.zeros((HEADS,), tl.float32)
    for i in range(tl.minimum(rows_per_program, num_rows - first)):
        row = first + i
        x = tl.load(a + row * a_stride + head, mask=some, other=0.0).to(tl.float32) + bias
        grad = tl.load(grad_log_decay + row * HV + head, mask=some, other=0.0) * -rate
        slope = grad * sigmoid(x)
        of_rate += grad * softplus(x)
        of_bias += slope
        tl.store(grad_a + row * HV + head, slope.to(grad_a.dtype.element_ty), mask=some)
        s = sigmoid(tl.load(b + row * b_stride + head, mask=some, other=0.0).to(tl.float32))
        of_beta = tl.load(grad_beta + row * HV + head, mask=some, other=0.0) * s * (1.0 - s)
        tl.store(grad_b + row * HV + head, of_beta.to(grad_b.dtype.element_ty), mask=some)
    at = parts + tl.program_id(0) * 2 * HV + head
    tl.store(at, of_rate, mask=some)
    tl.store(at + HV, of_bias, mask=some)


@quick_launch
@triton.jit(do_not_specialize=["num_rows"])
def gated_norm_kernel(
    x,  # [T, HV, V] contiguous
    gate,  # [T, HV * V] rows ``gate_stride`` apart
    weight,  # [V]
    out,  # [T, HV * V] contiguous
    eps,
    num_rows,  # T * HV
    gate_stride,
    HV: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some heads."""
    after_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, V)[None, :]
    inside = (row < num_rows)[:, None]
    stored = tl.load(x + row[:, None] * V + column, mask=inside, other=0.0)
    v = stored.to(tl.float32)
    unit = v * tl.rsqrt(tl.sum(v * v, 1) / V + eps)[:, None]
    w = tl.load(weight + column).to(tl.float32)
    normed = (unit.to(stored.dtype).to(tl.float32) * w).to(stored.dtype).to(tl.float32)
    gate_at = gate + (row // HV * gate_stride + row % HV * V)[:, None] + column
    act, _ = activation(tl.load(gate_at, mask=inside, other=0.0).to(tl.float32), False)
    tl.store(out + row[:, None] * V + column, (normed * act).to(stored.dtype), mask=inside)


@quick_launch
@triton.jit(do_not_specialize=["num_rows", "tiles_per_program"])
def gated_norm_backward_kernel(
    x,  # [T, HV, V] contiguous
    gate,  # [T, HV * V] rows ``gate_stride`` apart
    weight,  # [V]
    grad_out,  # [T, HV * V] contiguous
    grad_x,  # [T, HV, V] written
    grad_gate,  # [T, HV * V] contiguous, written
    parts,  # [programs, V] float32 written: of the weight
    eps,
    num_rows,  # T * HV
    gate_stride, tiles_per_program,
    HV: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Consecutive tiles of heads, one after the other."""
    column = tl.arange(0, V)[None, :]
    w = tl.load(weight + column).to(tl.float32)
    summed = tl.zeros((ROWS, V), tl.float32)
    first = tl.program_id(0).to(tl.int64) * tiles_per_program
    for n in range(tiles_per_program):
        row = (first + n) * ROWS + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None]
        at = row[:, None] * V + column
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad_out + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(v * v, 1) / V + eps)[:, None]
        unit = v * inverse
        gate_at = gate + (row // HV * gate_stride + row % HV * V)[:, None] + column
        act, slope = activation(tl.load(gate_at, mask=inside, other=0.0).to(tl.float32), False)
        tl.store(grad_gate + at, (g * unit * w * slope).to(grad_gate.dtype.element_ty), mask=inside)
        of_normed = g * act
        summed += of_normed * unit
        scaled = of_normed * w
        grad = inverse * (scaled - unit * (tl.sum(scaled * unit, 1) / V)[:, None])
        tl.store(grad_x + at, grad.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(parts + (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None] * V + column, summed)


_TOKENS = 16
_HEADS, _WARPS = 8, 2  # the order of a head's sum depends on them


def decay_and_beta(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log-decays in nats and beta, [T, HV] float32.

    Args:
        a, b: [T, HV] with contiguous rows.
        a_log, dt_bias: [HV].
    """
    rows, heads = a.shape
    log_decay, beta = (torch.empty(rows, heads, dtype=torch.float32, device=a.device) for _ in range(2))
    decay_and_beta_kernel[(divided_up(rows, _TOKENS),)](
        a, b, a_log, dt_bias, log_decay, beta, rows, a.stride(0), b.stride(0), HV=heads, HEADS=power_of_two(heads),
        ROWS=_TOKENS, num_warps=4, **overlapping(a.device),
    )  # fmt: skip
    return log_decay, beta


def decay_and_beta_backward(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, grad_log_decay: Tensor, grad_beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``a``, ``b``, and in float32 of ``a_log`` and ``dt_bias``."""
    rows, heads = a.shape
    grad_a, grad_b = (torch.empty(rows, heads, dtype=a.dtype, device=a.device) for _ in range(2))
    per_program = divided_up(rows, 512 if a.is_cuda else 2)
    programs = divided_up(rows, per_program)
    parts = torch.empty(programs, 2 * heads, dtype=torch.float32, device=a.device)
    decay_and_beta_backward_kernel[(programs,)](
        a, b, a_log, dt_bias, grad_log_decay, grad_beta, grad_a, grad_b, parts, rows, a.stride(0), b.stride(0),
        per_program, HV=heads, HEADS=power_of_two(heads), num_warps=1,
    )  # fmt: skip
    of_rate, of_bias = sum_parts(parts, torch.float32).view(2, heads)
    return grad_a, grad_b, of_rate, of_bias


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``norm(x) * silu(gate)`` [T, HV * V].

    Args:
        x: [T, HV, V] contiguous; V a power of two.
        gate: [T, HV * V] with contiguous rows.
        weight: [V].
        eps: inside the root.
    """
    rows, heads, width = x.shape
    out = empty_rows(rows, heads * width, like=x)
    gated_norm_kernel[(divided_up(rows * heads, _HEADS),)](
        x, gate, weight, out, eps, rows * heads, gate.stride(0), HV=heads, V=width, ROWS=_HEADS, num_warps=_WARPS,
        **overlapping(x.device),
    )  # fmt: skip
    return out


def gated_norm_backward(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, grad_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x``, ``gate`` and, in float32, ``weight``; ``grad_out`` is contiguous."""
    rows, heads, width = x.shape
    grad_x, grad_gate = torch.empty_like(x), torch.empty_like(grad_out)
    tiles = divided_up(rows * heads, _HEADS)
    per_program = divided_up(tiles, 1056 if x.is_cuda else 2)
    programs = divided_up(tiles, per_program)
    parts = torch.empty(programs * _HEADS, width, dtype=torch.float32, device=x.device)
    gated_norm_backward_kernel[(programs,)](
        x, gate, weight, grad_out, grad_x, grad_gate, parts, eps, rows * heads, gate.stride(0), per_program,
        HV=heads, V=width, ROWS=_HEADS, num_warps=_WARPS,
    )  # fmt: skip
    return grad_x, grad_gate, sum_parts(parts, torch.float32)
