"""Tiles by GPU, dtype and shape; the measurements are in docs/head.md."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """A kernel's output block (rows, columns), depth of a step, row tiles in a group, pipeline stages and warps.

    With ``halves`` a block is stored in two steps, in half the shared memory.
    """

    rows: int
    columns: int
    depth: int
    group: int
    stages: int
    warps: int
    halves: bool = False


def kept_dtype(product: torch.dtype) -> torch.dtype:
    """Dtype of kept exponentials for rows of this dtype: bfloat16 for bfloat16, else float32."""
    return torch.bfloat16 if product == torch.bfloat16 else torch.float32


@dataclass(frozen=True)
class Variant:
    """How the kernels run.

    Args:
        tma: tiles come through TMA descriptors (Hopper and later); else through masked loads.
        programs: programs of a persistent grid.
        score: tile of the forward product and of recomputed logit gradients (the same, so that scoring and training are
            bitwise identical).
        hidden: tile of the hidden gradient's product.
        weight: tile of the weight gradient's product.
        kept: dtype of kept exponentials and logit gradients.
        precision: how float32 operands are multiplied.
        truncation: relative loss of a sum of products per unit of its length, measured.
    """

    tma: bool
    programs: int
    score: Tile
    hidden: Tile
    weight: Tile
    kept: torch.dtype
    precision: str
    truncation: float = 0.0

    @property
    def narrow(self) -> bool:
        """Whether kept exponentials are narrower than float32."""
        return self.kept.itemsize < 4


INTERPRETED = Tile(rows=16, columns=16, depth=16, group=2, stages=1, warps=1)
WIDE = Tile(rows=128, columns=256, depth=64, group=16, stages=3, warps=8)
"""For Hopper: fits its shared memory together with the buffer of a stored tile."""

DEEP = 2048
"""Hidden size from which the epilogue takes a small part of a tile's time."""

HOPPER_TRUNCATION = 1.0e-9
"""A bfloat16 product over D on Hopper is 1 - 1.0e-9 D of the exact one, in the mean over D of 896 to 8192."""


def truncation(device: torch.device, dtype: torch.dtype) -> float:
    """Relative loss, per unit of length, of this device's products of this dtype summed in float32.

    Example:
        >>> truncation(torch.device("cpu"), torch.bfloat16)
        0.0
    """
    halves = (torch.bfloat16, torch.float16)
    if device.type != "cuda" or dtype not in halves or torch.cuda.get_device_capability(device)[0] != 9:
        return 0.0
    return HOPPER_TRUNCATION


PLAIN = Tile(rows=128, columns=128, depth=32, group=8, stages=3, warps=8)
FLOAT32 = Tile(rows=64, columns=64, depth=32, group=8, stages=2, warps=4)


def hopper(width: int, programs: int) -> Variant:
    """bfloat16 on Hopper, by hidden size; ``programs`` is the number of multiprocessors."""
    score = replace(WIDE, group=64, stages=4, halves=True) if width < DEEP else replace(WIDE, group=8)
    backward = replace(WIDE, group=4)
    return Variant(True, programs, score, backward, backward, torch.bfloat16, "tf32", HOPPER_TRUNCATION)


def variant(hidden: Tensor) -> Variant:
    """The variant for these hidden states on this device, and for weights that start at a multiple of 16 bytes.

    bfloat16 keeps exponentials in bfloat16; float16 and float32 keep them in float32, whose products run as tf32
    (exact for float16 weights) or as three tf32 products.
    """
    kept = kept_dtype(hidden.dtype)
    precision = "tf32x3" if hidden.dtype == torch.float32 else "tf32"
    aligned = (hidden.shape[1] * hidden.element_size()) % 16 == 0 and hidden.data_ptr() % 16 == 0
    if hidden.device.type != "cuda":
        return Variant(aligned, 2, INTERPRETED, INTERPRETED, INTERPRETED, kept, "ieee")
    capability = torch.cuda.get_device_capability(hidden.device)
    programs = torch.cuda.get_device_properties(hidden.device).multi_processor_count
    if kept == torch.bfloat16 and capability[0] in (9, 10) and aligned:  # others have less shared memory
        return replace(hopper(hidden.shape[1], programs), truncation=truncation(hidden.device, hidden.dtype))
    if kept == torch.bfloat16:
        return Variant(False, programs * 2, PLAIN, PLAIN, PLAIN, kept, precision)
    score = PLAIN if hidden.dtype == torch.float16 else FLOAT32
    return Variant(False, programs * 2, score, FLOAT32, FLOAT32, kept, precision)
