"""Triton's interpreter as the tests need it: three gaps closed, and half of its time saved.

Loop bounds: it takes ``int()`` of one-element arrays, which NumPy from 2.4 on refuses. bfloat16: it multiplies bit
patterns, so operands of ``dot`` are widened first, and it truncates where GPUs round to nearest. Time: it puts its own
functions into ``triton.language`` at every call of every function, here once, and it repeats every integer operation
in 64 bits to look for overflows.
"""

import dataclasses
import functools
import os
import types
from typing import Any

import numpy as np
import torch


def interpreted() -> bool:
    """Whether kernels run under the interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def complete_interpreter() -> None:
    """Closes the gaps in this process, for good."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return

    patch_lang, patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
    create_dot = interpreter.InterpreterBuilder.create_dot
    cast = interpreter.InterpreterBuilder.cast_impl

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), tl.float32)

    @functools.cache
    def patched_for_good() -> None:
        for lang in (tl, tl.core):
            patch_lang(types.SimpleNamespace(__globals__={"tl": lang}))

    def patched_lang(fn: Any) -> Any:
        patched_for_good()
        return interpreter._LangPatchScope()

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

    np.seterr(all="ignore")
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    interpreter._patch_lang = patched_lang
    interpreter._patch_lang_tensor = patched_tensor
    interpreter.InterpreterBuilder.create_dot = patched_dot
    interpreter.InterpreterBuilder.cast_impl = patched_cast
