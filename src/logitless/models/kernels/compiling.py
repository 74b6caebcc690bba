"""Kernels compiled side by side: half a second each on one processor, and a model's first step launches a dozen.

Code that launches kernels is run once while those that are not compiled yet are sent to threads in place of the GPU.
What it computes is then unfinished and means nothing; afterwards everything that it launches is there.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton


@contextmanager
def compiled_together() -> Iterator[None]:
    """In this thread, kernels that are not compiled are compiled by others instead of launched; waits for all.

    The code inside must do no harm with numbers that nothing has written: no such number may become an index.

    Example:
        >>> with compiled_together():
        ...     pass
    """
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as executor, _Together(executor):
        yield


class _Together(triton.AsyncCompileMode):  # type: ignore[misc]
    """Triton's own, which waits for a kernel where it is launched, and this does not."""

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> "_Unlaunched":
        super().submit(key, compile_fn, finalize_fn)
        return _Unlaunched()


class _Unlaunched:
    """Stands where a compiled kernel would: to launch it does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        """None asked for."""

    def run(self, *_: Any) -> None:
        """Not launched."""
