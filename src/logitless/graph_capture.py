"""Capture of CUDA graphs, and a check that no capture is under way.

Synchronizing a whole GPU makes every capture on it fail, from any thread and in any capture mode. The garbage
collector, and the finalizers that it calls, may run in the middle of a capture.
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
    """Capture what is launched on the current stream; other threads may launch and allocate.

    Args:
        graph: an empty graph.
        memory: pool of another graph (``pool()``), to share it; None for a new one.
    """
    with _capturing:
        graph.capture_begin(memory, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # says only that the capture is invalid; its cause is raised here
                graph.capture_end()
            raise
        graph.capture_end()


@contextmanager
def not_executed(device: torch.device) -> Iterator[None]:
    """Capture what is launched inside, in a graph that is thrown away: nothing runs on the GPU.

    Tensors made inside are allocated and never written; keep none of them. Copies from the host and synchronization are
    errors inside.

    Args:
        device: a GPU.
    """
    stream = side_stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        one = multiplied_once(device, torch.float32)
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # never instantiated
        with captured(graph):
            one.add_(1)  # torch warns of a graph without a kernel
            yield


def multiplied_once(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[1, 1], computed by a matrix product on the current stream; call it before the stream captures."""
    # cuBLAS allocates a workspace at a stream's first product: it must not be in a graph's memory pool
    one = torch.ones(1, 1, dtype=dtype, device=device)
    return one @ one


def refuse_unwritten(what: str, device: torch.device) -> None:
    """Raise during a capture: a tensor made then and kept would never be written.

    Args:
        what: what is about to be made, for the error.
        device: where.

    Raises:
        RuntimeError: a graph is being captured on the current stream.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{what} must be made before a graph is captured: a capture writes nothing")


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for all captures on a device. One only: libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def between_captures() -> Iterator[bool]:
    """Yield True, and hold off other captures, if the GPU may be synchronized; yield False during a capture.

    Does not wait. False also where this thread's stream is captured by something else.

    Raises:
        RuntimeError: CUDA does not answer: in a forked process, or after a failure of the GPU.
    """
    is_free = _capturing.acquire(blocking=False)
    try:
        yield is_free and not torch.cuda.is_current_stream_capturing()
    finally:
        if is_free:
            _capturing.release()
