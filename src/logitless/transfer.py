"""Tensors on their way from the host to a GPU."""

import torch
from torch import Tensor


def sent(numbers: Tensor, device: torch.device | str) -> Tensor:
    """Numbers on the device, for whatever is launched next; the host does not wait for what was launched before.

    ``Tensor.to`` does wait, unless the numbers are in page-locked memory, by which they go here. Of numbers that are on
    a GPU, or go to none, it is that. Numbers that lie apart, or one that stands for many (``expand``), are laid side by
    side first: ``Tensor.pin_memory`` keeps strides, and refuses a stride of 0.

    Example:
        >>> sent(torch.arange(2), "cpu").tolist()
        [0, 1]
    """
    if numbers.is_cuda or torch.device(device).type != "cuda":
        return numbers.to(device)
    return numbers.contiguous().pin_memory().to(device, non_blocking=True)
