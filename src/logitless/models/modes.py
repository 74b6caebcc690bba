"""Context managers that set a mode of a model, a thread or the process, and restore it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Sets a model to evaluation mode, which also turns off gradient checkpointing, and restores its modules' modes.

    Example:
        >>> layer = nn.Dropout()
        >>> with evaluating(layer):
        ...     layer.training
        False
        >>> layer.training
        True
    """
    # Not model.eval(), which takes ten times as long: an adapted model has thousands of modules.
    training = [module for module in every_module(model) if module.training]
    for module in training:
        object.__setattr__(module, "training", False)
    try:
        yield
    finally:
        for module in training:
            object.__setattr__(module, "training", True)


def every_module(model: nn.Module) -> Iterator[nn.Module]:
    """Every module of a model, as ``model.modules()``, in a fraction of its time; one that is shared comes repeatedly.

    Example:
        >>> [type(module).__name__ for module in every_module(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))]
        ['Sequential', 'ReLU', 'Linear']
    """
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None:
            yield module
            left.extend(module._modules.values())


def every_parameter(model: nn.Module) -> Iterator[nn.Parameter]:
    """Every parameter of a model, as ``model.parameters()``, in a fraction of its time; a tied one comes repeatedly.

    Example:
        >>> [tuple(parameter.shape) for parameter in every_parameter(nn.Linear(2, 3))]
        [(3, 2), (3,)]
    """
    for module in every_module(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter


class _Compiled(threading.local):
    off: bool = False


_compiled = _Compiled()


@contextmanager
def uncompiled() -> Iterator[None]:
    """In this thread, layers of ``compile_layers`` run without ``torch.compile``.

    For inputs whose shapes change with every call, which would recompile them each time.
    """
    # Not torch.compiler.set_stance: it holds for all threads, and two that use it at once may never restore it.
    before, _compiled.off = _compiled.off, True
    try:
        yield
    finally:
        _compiled.off = before


def runs_compiled() -> bool:
    """Whether layers of ``compile_layers`` run compiled in this thread: False inside ``uncompiled``.

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
    """Float32 matrix products without TF32, in the whole process, for numerical checks.

    Example:
        >>> with whole_float32():
        ...     torch.get_float32_matmul_precision()
        'highest'
    """
    # TF32's error depends on the shapes, and is larger than the differences that such a check looks for.
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
