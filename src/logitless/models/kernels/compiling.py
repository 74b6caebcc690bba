"""Kernels compiled side by side: half a second each on one processor, and a model's first step launches a dozen.

Code that launches kernels is called while a CUDA graph is captured, which is thrown away: nothing runs on the GPU,
neither torch's operations nor kernels that are there already. Kernels that are not compiled yet are compiled by threads
from the arguments of their launch. Afterwards each is ready to be launched: Triton leaves a kernel's launcher, which a
C compiler makes, and its loading to the first launch, and one after the other they take as long as the compilations.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from logitless.graph_capture import not_executed

_THREADS = 16
"""A tenth of a compilation is Python, of which one thread runs at a time: more of them wait for each other."""


@contextmanager
def compiled_together(device: torch.device) -> Iterator[None]:
    """In this thread, kernels that are not compiled are compiled by others, and nothing is executed; waits for all.

    Args:
        device: CUDA's, on which the code inside launches. That code copies nothing from the host, waits for nothing
            and keeps no tensor that it makes (``graph_capture.not_executed``).
    """
    with Compiling(device) as compiling, compiling.unlaunched, not_executed(device):
        yield


class Compiling:
    """Threads that compile what calls launch; at its end all is there.

    Args:
        device: as of ``compiled_together``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> "Compiling":
        self._threads = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
        self.unlaunched = _Unlaunched(self._threads)
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        self.unlaunched.wait(0)

    def begin(self, calls: Iterable[Callable[[], object]]) -> Callable[[], None]:
        """Makes these calls as inside ``compiled_together``; the result waits for the kernels that they brought."""
        first = len(self.unlaunched.kernels)
        with self.unlaunched, not_executed(self._device):
            for call in calls:
                call()
        return partial(self.unlaunched.wait, first, len(self.unlaunched.kernels))


def ready_to_launch(kernel: Any) -> None:
    """Makes a compiled kernel's launcher and loads it, in the thread that compiled it; its device is the current one.

    One that does not fit into the GPU says so when it is launched.
    """
    try:
        kernel.run  # noqa: B018 a property that does so at its first use
    except OutOfResources:
        return


class _Unlaunched(triton.AsyncCompileMode):  # type: ignore[misc]
    """Triton's own, which waits for a kernel where it is launched and for all where it ends; this does not."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        super().__init__(threads)
        self.kernels: list[tuple[Future[Any], Callable[[Any], None]]] = []
        self._known: set[str] = set()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> "_Nothing":
        if key not in self._known:
            self._known.add(key)
            self.kernels.append((self.executor.submit(self._compiled, compile_fn), finalize_fn))
        return _Nothing()

    def _compiled(self, compile_fn: Callable[[], Any]) -> Any:
        kernel = compile_fn()
        if self._device is not None:
            with torch.cuda.device(self._device):
                torch.zeros(1, device="cuda")  # CUDA's runtime gives a thread its context with its first launch
                ready_to_launch(kernel)
        return kernel

    def wait(self, first: int, stop: int | None = None) -> None:
        """For some kernels, which are launched from here on."""
        for future, finalize in self.kernels[first:stop]:
            finalize(future.result())


class _Nothing:
    """Stands where a compiled kernel would: to launch it does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        """None asked for."""

    def run(self, *_: Any) -> None:
        """Not launched."""
