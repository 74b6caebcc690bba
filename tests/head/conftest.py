"""Two gaps of Triton's interpreter, closed for the tests.

Loop bounds: it takes ``int()`` of one-element arrays, which NumPy from 2.4 on refuses. bfloat16: it multiplies the bit
patterns, so operands of ``dot`` are widened first.
"""

from typing import Any

import pytest


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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patched_tensor)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", patched_dot)
        yield
