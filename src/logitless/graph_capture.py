"""When CUDA graphs are captured, and when it is certain that none is.

A wait for a whole GPU ends every capture on it with an error, whichever thread waits and whatever the capture's mode.
Python's garbage collector may run in the middle of a capture, and so may what it calls.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

_capturing = threading.Lock()


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, memory: Any = None) -> Iterator[None]:
    """Inside, what is launched on the current stream becomes a graph; other threads may launch and allocate.

    Args:
        graph: that nothing was captured in yet.
        memory: of another graph (``pool()``), to share it; None for memory of its own.
    """
    with _capturing:
        graph.capture_begin(memory, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # that the capture is invalid; what made it so is being raised
                graph.capture_end()
            raise
        graph.capture_end()


@contextmanager
def not_executed(device: torch.device) -> Iterator[None]:
    """Inside, nothing runs on the GPU: what is launched is captured in a graph, which is then thrown away.

    Tensors that are made inside have an address and are never written, so that nothing made there may be kept.
    Nothing can be copied from the host inside, nor waited for.

    Args:
        device: CUDA's.
    """
    stream = side_stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        one = multiplied_once(device, torch.float32)
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # never instantiated
        with captured(graph):
            one.add_(1)  # torch warns of a graph without a kernel
            yield


def multiplied_once(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[1, 1], after a product on the current stream, which is about to capture.

    cuBLAS keeps a workspace for every stream, from the first product on: it must not lie in a graph's memory.
    """
    one = torch.ones(1, 1, dtype=dtype, device=device)
    return one @ one


def refuse_unwritten(what: str, device: torch.device) -> None:
    """Called where something is made to be kept: inside of a capture it would be kept without ever being written.

    Args:
        what: in words, for the error.
        device: on which it is made.

    Raises:
        RuntimeError: a graph is being captured on the current stream.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{what} must be made before a graph is captured: nothing is written while it is")


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures on a device: a library keeps a workspace for every stream that it has met."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def between_captures() -> Iterator[bool]:
    """Inside, where it says True, the GPU may be waited for: no thread is amid ``captured``, this one in no capture.

    It says False at once, and does not wait, where a graph is being captured, by this thread or another.

    Raises:
        RuntimeError: CUDA does not answer: in a forked process, or after a failure of the GPU.
    """
    is_free = _capturing.acquire(blocking=False)
    try:
        yield is_free and not torch.cuda.is_current_stream_capturing()
    finally:
        if is_free:
            _capturing.release()
