"""Copies from the host to a GPU that do not block the host."""

import torch
from torch import Tensor


def sent(numbers: Tensor, device: torch.device | str) -> Tensor:
    """``numbers.to(device)``, through pinned memory where it copies from the host to a GPU.

    The host does not wait for kernels launched before; kernels launched afterwards see the numbers.

    Example:
        >>> sent(torch.arange(2), "cpu").tolist()
        [0, 1]
    """
    if numbers.is_cuda or torch.device(device).type != "cuda":
        return numbers.to(device)
    # contiguous: pin_memory keeps strides, and refuses a stride of 0 (expand)
    return numbers.contiguous().pin_memory().to(device, non_blocking=True)
