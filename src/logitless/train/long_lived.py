"""Keep Python's garbage collector away from the objects that a run begins with."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_open: list[None] = []
"""One for each block of ``startup_objects_frozen`` that has not ended."""


@contextmanager
def startup_objects_frozen() -> Iterator[None]:
    """Inside, full garbage collections skip every object that existed before (``gc.freeze``).

    torch, transformers and Triton leave more than a million objects that live as long as the process. A full collection
    visits all of them, which takes a quarter of a second in the middle of some step. A block inside another one freezes
    what was made since; all is thawed when the outer one ends. If objects were frozen by others (as by a server before
    it forks) nothing happens here, for ``gc.unfreeze`` would thaw those too.

    Example:
        >>> with startup_objects_frozen():
        ...     print(gc.get_freeze_count() > 0)
        True
        >>> gc.get_freeze_count()
        0
    """
    if gc.get_freeze_count() and not _open:
        yield
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # garbage that holds GPU memory would be frozen
        gc.collect()
    gc.freeze()
    _open.append(None)
    try:
        yield
    finally:
        _open.pop()
        if not _open:
            gc.unfreeze()
