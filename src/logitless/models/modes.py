"""Modes that a model or the process is in for a while, and back again."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode, where it recomputes no activations (a graph could not hold that), and back.

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


@contextmanager
def whole_float32() -> Iterator[None]:
    """Products of float32 without TF32, whose error depends on the shape and would hide what is looked for.

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
