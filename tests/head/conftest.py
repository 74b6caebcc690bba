"""Three gaps of Triton's interpreter, closed for the tests.

Loop bounds: it takes ``int()`` of one-element arrays, which NumPy from 2.4 on refuses. bfloat16: it multiplies bit
patterns, so operands of ``dot`` are widened first, and it truncates where GPUs round to nearest.
"""

from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def complete_interpreter():
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        yield
        return

    patch_tensor = interpreter._patch_lang_tensor
    create_dot = interpreter.InterpreterBuilder.create_dot
    cast = interpreter.InterpreterBuilder.cast_impl

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), tl.float32)

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patched_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    def patched_cast(self: Any, value: Any, to: Any) -> Any:
        if value.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, value, to)
        nearest = torch.from_numpy(np.ascontiguousarray(value.data)).bfloat16()
        return interpreter.TensorHandle(nearest.view(torch.uint16).numpy(), tl.bfloat16)

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(interpreter, "_patch_lang_tensor", patched_tensor)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", patched_dot)
        patch.setattr(interpreter.InterpreterBuilder, "cast_impl", patched_cast)
        yield
