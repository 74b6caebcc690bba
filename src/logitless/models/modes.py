"""Context managers that set a mode of a model, a thread or the process, and restore it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode, without recomputed activations (a CUDA graph cannot hold them).

    Example:
        >>> layer = nn.Dropout()
        >>> with evaluating(layer):
        ...     layer.training
        False
        >>> layer.training
        True
    """
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class _Compiled(threading.local):
    off: bool = False


_compiled = _Compiled()


@contextmanager
def uncompiled() -> Iterator[None]:
    """In this thread, layers of ``compile_layers`` run uncompiled: for shapes that change with every call.

    ``torch.compiler.set_stance`` holds for all threads, and two that use it side by side may leave it set for ever.
    """
    before, _compiled.off = _compiled.off, True
    try:
        yield
    finally:
        _compiled.off = before


def runs_compiled() -> bool:
    """Whether compiled layers run compiled in this thread.

    Example:
        >>> with uncompiled():
        ...     runs_compiled()
        False
        >>> runs_compiled()
        True
    """
    return not _compiled.off


@contextmanager
def whole_float32() -> Iterator[None]:
    """float32 products without TF32, whose error depends on the shape and would hide a difference.

    Example:
        >>> with whole_float32():
        ...     torch.get_float32_matmul_precision()
        'highest'
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
