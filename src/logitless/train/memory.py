"""How much memory a run has held, and sizes in words."""

import resource
import sys

import torch


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on the GPU, or the largest resident size of this process on a CPU.

    Example:
        >>> peak_memory(torch.device("cpu")) > 0
        True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def size_text(size: int | float) -> str:
    """A number of bytes in the unit that shows something of it.

    Example:
        >>> size_text(1536), size_text(300 * 2**20), size_text(2.5 * 2**30)
        ('1.5 KiB', '300.0 MiB', '2.50 GiB')
    """
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"
