"""A kernel that begins while the one before it ends (programmatic dependent launch, from Hopper on).

A step of decoding is hundreds of short kernels; what each waits for at its start is a good part of it. A kernel that is
launched so is on its processors when the one before it ends; it must call ``after_inputs`` before it reads anything.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def after_inputs(OVERLAP: tl.constexpr):
    """Waits until what was launched before is done and its writes are seen; the next kernel may get ready meanwhile."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def overlapping(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch of a kernel that calls ``after_inputs(OVERLAP)`` first.

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
