"""All of a model in float64, what its modules cast to float32 included, so that rounding hides nothing."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Wide(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        given = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **given)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside, a cast to float32 is one to float64, and new tensors are float64."""
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def recomputed_in_float64() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The ``context_fn`` of ``torch.utils.checkpoint``: backward passes are outside of every mode."""
    return nullcontext(), _Wide()
