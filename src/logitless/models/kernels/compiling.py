"""Compile kernels in parallel: each takes half a second on one processor, and a model's first step launches a dozen.

Code that launches kernels runs inside a captured CUDA graph that is thrown away, so that nothing is executed on the
GPU. Kernels that are not compiled yet are compiled by threads, for the arguments of their launch, and loaded. Triton
would build a kernel's launcher (with a C compiler) and load it at the first launch, one kernel at a time, which takes
as long as the compilations.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Lock
from types import ModuleType
from typing import Any

import torch
import triton
from triton.runtime import build
from triton.runtime.errors import OutOfResources

from logitless.graph_capture import not_executed

_THREADS = 16
"""A tenth of a compilation holds Python's global lock, so more threads would wait for each other."""
_loading = Lock()


def _load_alone(load: Callable[[str, str], ModuleType], name: str, path: str) -> ModuleType:
    """Load a kernel's launcher as a module that no other load changes.

    Triton before 3.7 gives all launchers one module name. CPython keeps one module object for it and, when a launcher
    that it has loaded before is asked for again, puts that one's function into this object: of two threads that load
    at once, one would launch its kernel with the other's argument list.
    """
    with _loading:
        sys.modules.pop(name, None)
        return load(name, path)


if triton.__version__.startswith(("3.5.", "3.6.")):
    build._load_module_from_path = partial(_load_alone, build._load_module_from_path)


@contextmanager
def compiled_together(device: torch.device) -> Iterator[None]:
    """Compile the kernels that the code inside launches, in other threads, without executing any; waits at the end.

    Args:
        device: the GPU on which the code inside launches. That code must not copy from the host, synchronize, or keep a
            tensor that it creates (``graph_capture.not_executed``).
    """
    with Compiling(device) as compiling, compiling.unlaunched, not_executed(device):
        yield


class Compiling:
    """Threads that compile what calls launch; waits for all compilations at the end.

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
        """Start to compile the kernels that these calls launch; returns a function that waits for them."""
        first = len(self.unlaunched.kernels)
        with self.unlaunched, not_executed(self._device):
            for call in calls:
                call()
        return partial(self.unlaunched.wait, first, len(self.unlaunched.kernels))


def ready_to_launch(kernel: Any) -> None:
    """Build a compiled kernel's launcher and load it on the current device.

    A kernel that needs more resources than the GPU has raises at its launch instead.
    """
    try:
        kernel.run  # noqa: B018 a property that loads at its first use
    except OutOfResources:
        return


class _Unlaunched(triton.AsyncCompileMode):  # type: ignore[misc]
    """Triton's mode, without its waits for a kernel at its launch and for all at the end."""

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
                torch.zeros(1, device="cuda")  # a thread gets its CUDA context with its first launch
                ready_to_launch(kernel)
        return kernel

    def wait(self, first: int, stop: int | None = None) -> None:
        """Wait for some kernels, which can be launched afterwards."""
        for future, finalize in self.kernels[first:stop]:
            finalize(future.result())


class _Nothing:
    """A stand-in for a compiled kernel; its launch does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        """Not needed."""

    def run(self, *_: Any) -> None:
        """Not launched."""
