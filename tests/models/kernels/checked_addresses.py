"""Triton's interpreter with checked addresses: loads and stores outside a launch's tensors are errors.

On a GPU such an access may go unnoticed, or end the process at a later call that says nothing of the kernel.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from torch import Tensor


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte, and the byte after the last element."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() if tensor.numel() else 0


@contextmanager
def checked_addresses() -> Iterator[list[str]]:
    """While it lasts, an access outside the arguments of its launch raises; yields the names of kernels launched."""
    from triton.runtime import interpreter

    spans: list[tuple[int, int]] = []
    launched: list[str] = []
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    prepare, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store

    def prepared(self: Any, args: Any, named: Any) -> Any:
        host, host_named = prepare(self, args, named)
        spans[:] = [_span(x) for x in (*host, *host_named.values()) if isinstance(x, Tensor)]
        launched.append(self.fn.__name__)
        return host, host_named

    def check(pointers: Any, mask: Any, what: str) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        at = np.atleast_1d(pointers.data)[np.atleast_1d(mask.data).astype(bool)].astype(np.uint64)
        inside = np.zeros(at.shape, dtype=bool)
        for first, end in spans:
            inside |= (at >= first) & (at + np.uint64(size) <= end)
        if not inside.all():
            wrong = int(at[~inside][0])
            near = min((wrong - first for first, _ in spans), key=abs)
            raise IndexError(f"{launched[-1]} {what} {(~inside).sum()} elements outside its tensors, {near} bytes off")

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "loads")
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "stores")
        return store(self, pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_init_args_hst", prepared)
        patch.setattr(builder, "create_masked_load", checked_load)
        patch.setattr(builder, "create_masked_store", checked_store)
        yield launched
