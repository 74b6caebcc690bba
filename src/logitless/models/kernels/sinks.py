"""Attention sinks: for each head a score that is part of the softmax and has no value, in one kernel after attention.

    out = attended * share,   share = exp(lse) / (exp(lse) + exp(sink)) = 1 / (1 + exp(sink - lse))

in float32, with the log-sum-exp of attention without the sink, rounded once. It is elementwise, hence row-invariant.
With s = sum_e grad_out * attended * share * (1 - share) for each token and head:

    grad_attended = grad_out * share,   grad_lse = s,   grad_sink = -sum_tokens s

The sum over tokens is over blocks of tokens in order, without atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless.models.kernels.gate import sigmoid
from logitless.models.kernels.norm import sum_parts
from logitless.models.kernels.overlap import after_inputs, overlapping
from logitless.models.kernels.rows import divided_up, empty_rows, power_of_two
from logitless.quick_launch import quick_launch


@quick_launch
@triton.jit
def sinks_kernel(
    attended,  # [T, H, E] contiguous
    log_sum_exp,  # [T, H] float32
    sinks,  # [H]
    out,  # [T, H * E] contiguous
    H: tl.constexpr, E: tl.constexpr,
    HEADS: tl.constexpr,  # a program takes
    WIDTH: tl.constexpr,  # power of two, at least E
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some heads of one token."""
    after_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)[None, :]
    at = (token * H + head)[:, None] * E + d
    inside = (head < H)[:, None] & (d < E)
    sink = tl.load(sinks + head, mask=head < H, other=0.0).to(tl.float32)
    share = sigmoid(tl.load(log_sum_exp + token * H + head, mask=head < H, other=0.0) - sink)
    x = tl.load(attended + at, mask=inside, other=0.0)
    tl.store(out + at, (x.to(tl.float32) * share[:, None]).to(x.dtype), mask=inside)


@quick_launch
@triton.jit(do_not_specialize=["num_rows", "rows_per_program"])
def sinks_backward_kernel(
    attended,  # [T, H, E] contiguous
    log_sum_exp,  # [T, H] float32
    sinks,  # [H]
    grad_out,  # [T, H * E] contiguous
    grad_attended,  # [T, H, E] contiguous
    grad_log_sum_exp,  # [T, H] float32
    parts,  # [programs, H] float32, the sinks' gradient over each program's tokens, or None
    num_rows,  # T
    rows_per_program,
    H: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some heads of consecutive tokens."""
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)[None, :]
    inside = (head < H)[:, None] & (d < E)
    sink = tl.load(sinks + head, mask=head < H, other=0.0).to(tl.float32)
    summed = tl.zeros((HEADS,), tl.float32)
    for i in range(tl.minimum(rows_per_program, num_rows - first)):
        place = (first + i) * H + head
        at = place[:, None] * E + d
        share = sigmoid(tl.load(log_sum_exp + place, mask=head < H, other=0.0) - sink)
        x = tl.load(attended + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad_out + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_attended + at, (g * share[:, None]).to(grad_attended.dtype.element_ty), mask=inside)
        slope = tl.sum(x * g, 1) * share * (1.0 - share)
        tl.store(grad_log_sum_exp + place, slope, mask=head < H)
        summed -= slope
    if parts is not None:
        tl.store(parts + tl.program_id(0) * H + head, summed, mask=head < H)


def _heads(attended: Tensor) -> dict[str, int]:
    _, heads, width = attended.shape
    padded = power_of_two(width)
    return {"H": heads, "E": width, "HEADS": min(power_of_two(heads), max(1, 2048 // padded)), "WIDTH": padded}


def with_sinks(attended: Tensor, log_sum_exp: Tensor, sinks: Tensor) -> Tensor:
    """Attention with sinks.

    Args:
        attended: [T, H, E] contiguous: attention without the sinks.
        log_sum_exp: [T, H] float32 contiguous, of the scores without the sinks; -inf where there are none.
        sinks: [H].

    Returns:
        [T, H * E] contiguous.
    """
    constants, rows = _heads(attended), len(attended)
    out = empty_rows(rows, constants["H"] * constants["E"], like=attended)
    sinks_kernel[(rows, divided_up(constants["H"], constants["HEADS"]))](
        attended, log_sum_exp, sinks, out, **constants, num_warps=4, **overlapping(attended.device)
    )
    return out


def with_sinks_backward(
    attended: Tensor, log_sum_exp: Tensor, sinks: Tensor, grad_out: Tensor, *, sinks_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of ``attended``, ``log_sum_exp`` and ``sinks``.

    Args:
        grad_out: [T, H * E] contiguous.
        sinks_dtype: of the sinks' gradient; None if that is not needed.
    """
    rows, constants = len(attended), _heads(attended)
    grad, grad_log_sum_exp = torch.empty_like(attended), torch.empty_like(log_sum_exp)
    per_program = divided_up(rows, 1056 if attended.is_cuda else 2)
    programs = divided_up(rows, per_program)
    parts = None if sinks_dtype is None else log_sum_exp.new_empty(programs, constants["H"])
    sinks_backward_kernel[(programs, divided_up(constants["H"], constants["HEADS"]))](
        attended, log_sum_exp, sinks, grad_out, grad, grad_log_sum_exp, parts, rows, per_program,
        **constants, num_warps=4,
    )  # fmt: skip
    return grad, grad_log_sum_exp, None if parts is None or sinks_dtype is None else sum_parts(parts, sinks_dtype)
