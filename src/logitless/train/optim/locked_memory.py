"""Page-locked (pinned) host memory in exact size, which is freed with its tensor.

``Tensor.pin_memory`` takes the next power of two for each tensor, and keeps it when the tensor is gone. Here memory
comes from the operating system and is registered with the CUDA driver for as long as the tensor lives.
"""

import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from logitless.errors import UnavailableError
from logitless.graph_capture import between_captures


def locked_bytes(size: int) -> int:
    """Bytes that ``pinned`` takes for a tensor of ``size`` bytes: whole pages, at least one.

    Example:
        >>> [locked_bytes(size) // mmap.PAGESIZE for size in (0, 1, mmap.PAGESIZE, mmap.PAGESIZE + 1)]
        [1, 1, 1, 2]
    """
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A contiguous copy of a tensor in page-locked host memory.

    The memory is freed when the copy and all its views are gone, after a wait for the device: PyTorch does not know
    this memory and would not keep it for a copy in flight. During the capture of a CUDA graph, which such a wait would
    break, it is freed later, when the next copy is made or freed.

    Raises:
        UnavailableError: too little memory, or the driver does not lock it.
    """
    _unlock_left()
    size = locked_bytes(tensor.nbytes)
    try:
        pages = mmap.mmap(-1, size)  # shared mapping: a private one would be copied for forked processes
    except OSError as error:
        raise _unavailable(size, str(error)) from error
    view = memoryview(pages)
    numbers = torch.frombuffer(view, dtype=tensor.dtype)[: tensor.numel()].view(tensor.shape)
    numbers.copy_(tensor.detach())
    address = numbers.untyped_storage().data_ptr()
    if why := _register(address, size, device):
        raise _unavailable(size, why)
    # The tensor keeps the view alive. At the end of the process the system unlocks what is left.
    weakref.finalize(view, _unregister, address, device, pages).atexit = False
    return numbers


def _register(address: int, size: int, device: torch.device) -> str:
    """Lock pages; returns the driver's error, or an empty text."""
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        code = driver.cudaHostRegister(address, size, 0)
    return "" if code == driver.cudaError.success else str(driver.cudaGetErrorString(code))


_left: list[tuple[int, torch.device, mmap.mmap]] = []
"""Addresses, devices and pages whose tensors are gone and which are still locked."""

_lost: list[mmap.mmap] = []
"""Pages that could not be unlocked. They are kept: the driver would take new memory at their addresses for them."""


def _unregister(address: int, device: torch.device, pages: mmap.mmap) -> None:
    """Unlock pages, now or later. The garbage collector may call this at any moment, in any thread."""
    _left.append((address, device, pages))
    _unlock_left()


def _unlock_left() -> None:
    """Wait for the device and unlock what is left; during the capture of a CUDA graph do nothing."""
    if not _left:
        return
    with suppress(RuntimeError), between_captures() as may_wait:  # raised by a failed device, and in a forked process
        while may_wait and _left:
            address, device, pages = _left.pop()
            if not _is_unlocked(address, device):
                _lost.append(pages)


def _is_unlocked(address: int, device: torch.device) -> bool:
    try:
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            return bool(driver.cudaHostUnregister(address) == driver.cudaError.success)
    except RuntimeError:
        return False


def _unavailable(size: int, why: str) -> UnavailableError:
    return UnavailableError(
        needed=f"{size:,} bytes more of the host's memory, page-locked",
        given=f"the error {why!r}",
        remedy="Free memory of the host, raise its limit (of the container, for example), or leave "
        "train.optimizer.moments: host out where the GPU has room.",
    )
