"""The short causal convolution of gated delta nets, with SiLU: one order of sums in packed rows and in decoding.

    out[t] = silu(sum_n weight[n] * x[t - TAPS + 1 + n]),   without what lies before the sequence's start

Terms are added from the oldest on in float32 by fused multiply-adds, and the result is rounded once. A decoding step
keeps the last ``TAPS - 1`` inputs of each sequence. It is a sum of a row's own terms, hence row-invariant.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from logitless.models.kernels.gate import activation
from logitless.models.kernels.norm import sum_parts
from logitless.models.kernels.overlap import after_inputs, overlapping
from logitless.models.kernels.rows import divided_up, power_of_two
from logitless.quick_launch import quick_launch


@triton.jit
def weight_of(weight, tap, column, inside, TAPS: tl.constexpr):
    """One tap of some channels, float32."""
    return tl.load(weight + column * TAPS + tap, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def summed(x, weight, row, age, column, inside, stride, TAPS: tl.constexpr):
    """The convolution at some rows, before SiLU; ``age`` is how many rows of the sequence lie before each."""
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        ok = (age >= back)[:, None] & inside[None, :]
        now = tl.load(x + (row - back)[:, None] * stride + column[None, :], mask=ok, other=0.0).to(tl.float32)
        total = tl.fma(now, weight_of(weight, tap, column, inside, TAPS)[None, :], total)
    return total


@quick_launch
@triton.jit(do_not_specialize=["num_rows"])
def convolution_kernel(
    x,  # [T, D], rows ``stride`` apart
    weight,  # [D, TAPS] contiguous
    age,  # [T] int32: rows of the sequence before each
    out,  # [T, D] contiguous
    num_rows,
    width,  # D
    stride,
    TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A tile of the output."""
    after_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    before = tl.load(age + row, mask=row < num_rows, other=-1)
    act, _ = activation(summed(x, weight, row, before, column, inside, stride, TAPS), False)
    stored = (row < num_rows)[:, None] & inside[None, :]
    tl.store(out + row[:, None] * width + column[None, :], act.to(out.dtype.element_ty), mask=stored)


@quick_launch
@triton.jit
def convolution_step_kernel(
    x,  # [R, D], rows ``stride`` apart
    weight,  # [D, TAPS]
    history,  # [slots, TAPS - 1, D] read and written: each sequence's last inputs, the oldest first
    slot,  # [R] int32; -1: no token
    out,  # [R, D] contiguous
    width, stride,
    TAPS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row of the output; the history moves on."""
    after_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    at = tl.load(slot + row).to(tl.int64)
    if at >= 0:
        past = history + at * (TAPS - 1) * width + column
        total = tl.zeros((COLUMNS,), tl.float32)
        for tap in tl.static_range(TAPS):
            if tap < TAPS - 1:
                now = tl.load(past + tap * width, mask=inside, other=0.0)
            else:
                now = tl.load(x + row * stride + column, mask=inside, other=0.0)
            if tap > 0:
                tl.store(past + (tap - 1) * width, now, mask=inside)
            total = tl.fma(now.to(tl.float32), weight_of(weight, tap, column, inside, TAPS), total)
        act, _ = activation(total, False)
        tl.store(out + row * width + column, act.to(out.dtype.element_ty), mask=inside)


@quick_launch
@triton.jit(do_not_specialize=["num_rows", "tiles_per_program"])
def convolution_backward_kernel(
    x,  # [T, D], rows ``stride`` apart
    weight,  # [D, TAPS]
    age,  # [T] int32
    grad_out,  # [T, D] contiguous
    grad_x,  # [T, D] contiguous, written
    parts,  # [programs, TAPS, D] float32: the weight's gradient over each program's rows
    num_rows, width, stride, tiles_per_program,
    TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Consecutive tiles of rows, one after the other; the convolution is recomputed."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    first = tl.program_id(0).to(tl.int64) * tiles_per_program
    for tap in tl.static_range(TAPS):
        to_weight = tl.zeros((COLUMNS,), tl.float32)
        for n in range(tiles_per_program):
            row = (first + n) * ROWS + tl.arange(0, ROWS)
            ok = row < num_rows
            before = tl.load(age + row, mask=ok, other=-1)
            _, slope = activation(summed(x, weight, row, before, column, inside, stride, TAPS), False)
            both = ok[:, None] & inside[None, :]
            grad = tl.load(grad_out + row[:, None] * width + column[None, :], mask=both, other=0.0).to(tl.float32)
            back = TAPS - 1 - tap
            seen = (before >= back)[:, None] & both
            now = tl.load(x + (row - back)[:, None] * stride + column[None, :], mask=seen, other=0.0)
            to_weight += tl.sum(grad * slope * now.to(tl.float32), 0)
        tl.store(parts + (tl.program_id(0) * TAPS + tap) * width + column, to_weight, mask=inside)
    for n in range(tiles_per_program):
        row = (first + n) * ROWS + tl.arange(0, ROWS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for ahead in tl.static_range(TAPS):  # rows that this row is part of
            later = row + ahead
            before = tl.load(age + later, mask=later < num_rows, other=-1)
            _, slope = activation(summed(x, weight, later, before, column, inside, stride, TAPS), False)
            ok = (before >= ahead)[:, None] & inside[None, :]
            grad = tl.load(grad_out + later[:, None] * width + column[None, :], mask=ok, other=0.0).to(tl.float32)
            total += grad * slope * weight_of(weight, TAPS - 1 - ahead, column, inside, TAPS)[None, :]
        stored = (row < num_rows)[:, None] & inside[None, :]
        tl.store(grad_x + row[:, None] * width + column[None, :], total.to(grad_x.dtype.element_ty), mask=stored)


_ROWS, _COLUMNS = 16, 128


def convolution(
    x: Float[Tensor, "T D"], weight: Float[Tensor, "D taps"], age: Int[Tensor, "T"]
) -> Float[Tensor, "T D"]:
    """The convolution of packed sequences, with SiLU.

    Args:
        x: with contiguous rows.
        weight: contiguous, the oldest tap first.
        age: int32, how many rows of its sequence lie before each.
    """
    (rows, width), taps = x.shape, weight.shape[1]
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    columns = min(_COLUMNS, power_of_two(width))
    convolution_kernel[(divided_up(rows, _ROWS), divided_up(width, columns))](
        x, weight, age, out, rows, width, x.stride(0), TAPS=taps, ROWS=_ROWS, COLUMNS=columns, num_warps=4,
        **overlapping(x.device),
    )  # fmt: skip
    return out


def convolution_step(
    x: Float[Tensor, "R D"], weight: Float[Tensor, "D taps"], history: Float[Tensor, "slots past D"],
    slot: Int[Tensor, "R"],
) -> Float[Tensor, "R D"]:  # fmt: skip
    """One more row of each sequence, by its last inputs, which move on.

    Args:
        x: with contiguous rows.
        weight: as of ``convolution``.
        history: [slots, taps - 1, D], zeros before a sequence's start.
        slot: int32; -1: no token.
    """
    (rows, width), taps = x.shape, weight.shape[1]
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    columns = min(1024, power_of_two(width))
    convolution_step_kernel[(rows, divided_up(width, columns))](
        x, weight, history, slot, out, width, x.stride(0), TAPS=taps, COLUMNS=columns, num_warps=4,
        **overlapping(x.device),
    )  # fmt: skip
    return out


def convolution_backward(
    x: Float[Tensor, "T D"], weight: Float[Tensor, "D taps"], age: Int[Tensor, "T"], grad_out: Float[Tensor, "T D"]
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "D taps"]]:
    """Gradients of ``x`` and ``weight``, which is float32; ``grad_out`` is contiguous."""
    (rows, width), taps = x.shape, weight.shape[1]
    grad_x = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    columns = min(_COLUMNS, power_of_two(width))
    tiles = divided_up(divided_up(rows, _ROWS), 64)
    programs = divided_up(rows, _ROWS * tiles)
    parts = torch.empty(programs, taps * width, dtype=torch.float32, device=x.device)
    convolution_backward_kernel[(programs, divided_up(width, columns))](
        x, weight, age, grad_out, grad_x, parts, rows, width, x.stride(0), tiles,
        TAPS=taps, ROWS=_ROWS, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return grad_x, sum_parts(parts, torch.float32).view(taps, width).T.contiguous()
