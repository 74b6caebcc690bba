"""What a run begins with is left alone by Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def left_alone() -> Iterator[None]:
    """Inside, full collections pass over every object that was there before; what is made inside is collected as ever.

    torch, transformers and Triton leave more than a million objects that live as long as the process. A full collection
    looks at each of them, which takes a quarter of a second in the middle of some step. Where somebody has frozen
    objects already (a server before it forks, or another such block around this one), all of this is left to them:
    ``gc.unfreeze`` would give theirs back too.

    Example:
        >>> with left_alone():
        ...     print(gc.get_freeze_count() > 0)
        True
        >>> gc.get_freeze_count()
        0
    """
    if gc.get_freeze_count():
        yield
        return
    if torch.cuda.is_available():  # memory of the GPU must not stay in what is garbage already
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
