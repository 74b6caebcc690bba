"""How much memory a run has held."""

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
