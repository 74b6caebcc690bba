"""Kernels compiled side by side: half a second each on one processor, and a model's first step launches a dozen.

Code that launches kernels is run once while those that are not compiled yet are sent to threads in place of the GPU.
What it computes is then unfinished and means nothing; afterwards everything that it launches is there, and on the GPU:
Triton leaves a kernel's launcher, which a C compiler makes, and its loading to the first launch, and one after the
other they take as long as the compilations.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

_THREADS = 16
"""A tenth of a compilation is Python, of which one thread runs at a time: more of them wait for each other."""


@contextmanager
def compiled_together() -> Iterator[None]:
    """In this thread, kernels that are not compiled are compiled by others instead of launched; waits for all.

    The code inside must do no harm with numbers that nothing has written: no such number may become an index.

    Example:
        >>> with compiled_together():
        ...     pass
    """
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as executor, _Together(executor):
        yield


def ready_to_launch(kernel: Any) -> None:
    """Makes a compiled kernel's launcher and loads it, in the thread that compiled it; its device is the current one.

    One that does not fit into the GPU says so when it is launched.
    """
    try:
        kernel.run  # noqa: B018 a property that does so at its first use
    except OutOfResources:
        return


class _Together(triton.AsyncCompileMode):  # type: ignore[misc]
    """Triton's own, which waits for a kernel where it is launched, and this does not."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        super().__init__(executor)
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> "_Unlaunched":
        def compiled() -> Any:
            kernel = compile_fn()
            if self._device is not None:
                with torch.cuda.device(self._device):
                    torch.zeros(1, device="cuda")  # CUDA's runtime gives a thread its context with its first launch
                    ready_to_launch(kernel)
            return kernel

        super().submit(key, compiled, finalize_fn)
        return _Unlaunched()


class _Unlaunched:
    """Stands where a compiled kernel would: to launch it does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        """None asked for."""

    def run(self, *_: Any) -> None:
        """Not launched."""
