"""When CUDA graphs are captured, and when it is certain that none is.

A wait for a whole GPU ends every capture on it with an error, whichever thread waits and whatever the capture's mode.
Python's garbage collector may run in the middle of a capture, and so may what it calls.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
        finally:
            graph.capture_end()


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
