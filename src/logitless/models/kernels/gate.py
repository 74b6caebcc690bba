"""The gate of a gated MLP or attention: ``act(gate) * up`` in one kernel, and its backward.

    act = SiLU: g / (1 + exp(-g));    GELU: g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)));    or the sigmoid

in float32, rounded after ``act`` and after the product, as in transformers. It is elementwise, hence row-invariant; but
its exponential may differ from torch's in a bit, so sampling and training both use it, or neither.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.models.kernels.overlap import after_inputs, overlapping
from logitless.models.kernels.rows import divided_up, empty_rows, power_of_two
from logitless.quick_launch import quick_launch


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activation(g, GELU: tl.constexpr):
    """act(g) and its derivative, float32."""
    if GELU:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        s = sigmoid(2.0 * inner)  # (1 + tanh(inner)) / 2
        slope = 0.7978845608028654 * (1.0 + 0.134145 * g * g)
        return g * s, s + g * (2.0 * s * (1.0 - s)) * slope
    s = sigmoid(g)
    return g / (1.0 + tl.exp(-g)), s * (1.0 + g * (1.0 - s))


@quick_launch
@triton.jit
def gate_kernel(
    gate,  # [T, I] a row ``stride`` after the other
    up,  # [T, I] likewise
    out,  # [T, I] contiguous
    stride,
    width,  # I
    GELU: tl.constexpr, SIGMOID: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A block of a row's columns."""
    after_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * stride + column, mask=inside, other=0.0)
    u = tl.load(up + row * stride + column, mask=inside, other=0.0)
    act, _ = activation(g.to(tl.float32), GELU)
    if SIGMOID:
        act = sigmoid(g.to(tl.float32))
    product = act.to(g.dtype).to(tl.float32) * u.to(tl.float32)
    tl.store(out + row * width + column, product.to(g.dtype), mask=inside)


@quick_launch
@triton.jit
def gate_backward_kernel(
    gate,  # [T, I] a row ``stride`` after the other
    up,  # [T, I] likewise
    grad_out,  # [T, I] contiguous
    grad_gate,  # [T, I] a row ``grad_stride`` after the other
    grad_up,  # [T, I] likewise
    stride, grad_stride,
    width,  # I
    GELU: tl.constexpr, SIGMOID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a row's columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(grad_out + row * width + column, mask=inside, other=0.0).to(tl.float32)
    act, slope = activation(g, GELU)
    if SIGMOID:
        act = sigmoid(g)
        slope = act * (1.0 - act)
    at = row * grad_stride + column
    tl.store(grad_gate + at, (d * u * slope).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + at, (d * act).to(grad_up.dtype.element_ty), mask=inside)


def _grid(gate: Tensor, most: int) -> tuple[tuple[int, int], int]:
    rows, width = gate.shape
    block = min(most, power_of_two(width))
    return (rows, divided_up(width, block)), block


def gated(gate: Tensor, up: Tensor, *, gelu: bool, sigmoid: bool = False, out: Tensor | None = None) -> Tensor:
    """``act(gate) * up`` [T, I]; both may be columns of one wider tensor, with the same row stride."""
    out = empty_rows(*gate.shape, like=gate) if out is None else out
    grid, block = _grid(gate, 2048)
    gate_kernel[grid](
        gate, up, out, gate.stride(0), gate.shape[1], GELU=gelu, SIGMOID=sigmoid, BLOCK=block, num_warps=4,
        **overlapping(gate.device),
    )  # fmt: skip
    return out


def gated_backward(
    gate: Tensor, up: Tensor, grad_out: Tensor, *, gelu: bool, sigmoid: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, side by side in one [T, 2 I] tensor."""
    rows, width = gate.shape
    both = torch.empty(rows, 2 * width, dtype=gate.dtype, device=gate.device)
    grad_gate, grad_up = both[:, :width], both[:, width:]
    grid, block = _grid(gate, 1024)
    gate_backward_kernel[grid](
        gate, up, grad_out, grad_gate, grad_up, gate.stride(0), both.stride(0), width,
        GELU=gelu, SIGMOID=sigmoid, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return grad_gate, grad_up
