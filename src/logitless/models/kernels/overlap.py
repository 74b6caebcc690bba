"""Kernels that start while the previous kernel ends (programmatic dependent launch, from Hopper on).

A decoding step is hundreds of short kernels, and their start-up is a good part of its time. A kernel that is launched
this way must call ``after_inputs`` before it reads anything.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def after_inputs(OVERLAP: tl.constexpr):
    """Wait until earlier kernels are done and their writes visible; the next kernel may start up meanwhile."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ask_for_rows(weight, first, num_rows, length, ROWS: tl.constexpr, PIECES: tl.constexpr):
    """Prefetch rows of a weight into the L2 cache while the previous kernel still runs.

    Rows have ``length`` 16-bit numbers, and are prefetched in PIECES pieces of a multiple of 16 bytes. L2 is coherent:
    every write goes through it.
    """
    n = tl.arange(0, ROWS * PIECES)
    row = tl.minimum(first + n // PIECES, num_rows - 1)
    piece = length // PIECES
    at = (weight + row.to(tl.int64) * length + n % PIECES * piece).to(tl.uint64, bitcast=True)
    size = tl.zeros_like(n) + 2 * piece
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at, size],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def overlapping(device: torch.device) -> dict[str, Any]:
    """Launch arguments for a kernel that calls ``after_inputs(OVERLAP)`` first.

    Example:
        >>> overlapping(torch.device("cpu"))
        {'OVERLAP': False}
    """
    return _OVERLAPPING if _can(device) else _APART


_OVERLAPPING = {"OVERLAP": True, "launch_pdl": True}
_APART = {"OVERLAP": False}


@cache
def _can(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
