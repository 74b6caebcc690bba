"""Keep Python's garbage collector away from the objects that a run begins with."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def startup_objects_frozen() -> Iterator[None]:
    """Inside, full garbage collections skip every object that existed before (``gc.freeze``).

    torch, transformers and Triton leave more than a million objects that live as long as the process. A full collection
    visits all of them, which takes a quarter of a second in the middle of some step. If objects are frozen already (by
    a server before it forks, or by an outer block of this kind) nothing happens here, for ``gc.unfreeze`` would thaw
    those too.

    Example:
        >>> with startup_objects_frozen():
        ...     print(gc.get_freeze_count() > 0)
        True
        >>> gc.get_freeze_count()
        0
    """
    if gc.get_freeze_count():
        yield
        return
    if torch.cuda.is_available():  # garbage that holds GPU memory would be frozen too
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
