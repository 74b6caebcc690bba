"""Triton's interpreter as the tests need it: three gaps closed, and most of its time saved.

Loop bounds: it takes ``int()`` of one-element arrays, which NumPy from 2.4 on refuses. bfloat16: it multiplies bit
patterns, so operands of ``dot`` are widened first, and it truncates where GPUs round to nearest. Time: it puts its own
functions into ``triton.language`` at every call of every function, here once; it repeats every integer operation in
64 bits to look for overflows; it describes shapes and types anew for every value, here once for each that occurs; it
combines a block's elements one by one where a kernel brings the function for it, here halves of the block; and it finds
a common type and shape before every operation, here only where operands differ in theirs.
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
        _operate_on_equal_types_at_once(tl.core, interpreter)

    def patched_lang(fn: Any) -> Any:
        patched_for_good()
        return interpreter._LangPatchScope()

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patched_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    def patched_cast(self: Any, value: Any, to: Any) -> Any:
        if value.dtype.scalar == tl.bfloat16 and to.scalar == tl.float32:
            return widened(value)
        if value.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, value, to)
        nearest = torch.from_numpy(np.ascontiguousarray(value.data)).bfloat16()
        return interpreter.TensorHandle(nearest.view(torch.uint16).numpy(), tl.bfloat16)

    def patched_builtin(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic, function = interpreter.interpreter_semantic, getattr(member, "__wrapped__", member)

        def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return function(*args, **kwargs, _semantic=semantic)

        scope.set_attr(owner, name, call)

    np.seterr(all="ignore")
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    interpreter._patch_attr = patched_builtin
    interpreter._patch_lang = patched_lang
    interpreter._patch_lang_tensor = patched_tensor
    interpreter.InterpreterBuilder.create_dot = patched_dot
    interpreter.InterpreterBuilder.cast_impl = patched_cast
    interpreter.ReduceOps.generic_reduce = _reduced_by_halves
    _describe_shapes_and_types_once(tl.core, interpreter)


def _reduced_by_halves(self: Any, values: tuple[Any, ...]) -> list[Any]:
    """``ReduceOps.generic_reduce`` along an axis, whose length is a power of 2 as Triton's all are."""
    dtypes = [value.dtype for value in values]
    parts = [np.moveaxis(value.handle.data, self.axis, 0) for value in values]
    while len(parts[0]) > 1:
        middle = len(parts[0]) // 2
        halves = [[self.to_tensor(part[where], dtype) for part, dtype in zip(parts, dtypes, strict=True)]
                  for where in (slice(middle), slice(middle, None))]  # fmt: skip
        combined = self.combine_fn.fn(*halves[0], *halves[1])
        parts = [value.handle.data for value in (combined if isinstance(combined, tuple) else (combined,))]
    ends = [np.moveaxis(part, 0, self.axis) if self.keep_dims else part[0] for part in parts]
    return [self.to_tensor(end, dtype) for end, dtype in zip(ends, dtypes, strict=True)]


def _describe_shapes_and_types_once(core: Any, interpreter: Any) -> None:
    """Keeps what a block type, and a tensor of it, derive from a shape, and the NumPy type of an element."""
    semantic, numpy_type = interpreter.TritonSemantic, interpreter._get_np_dtype
    equal, unwrap = core.dtype.__eq__, core._unwrap_if_constexpr
    broadcast, checked = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl
    of_a_scalar = core.tuple([]), core.constexpr(1)

    @functools.cache
    def of_shape(shape: tuple[int, ...]) -> tuple[Any, ...]:
        if not shape:
            raise TypeError("0d block_type is forbidden")
        numel = core.validate_block_shape(shape)
        of_a_tensor = core.tuple([core.constexpr(s) for s in shape]), core.constexpr(numel)
        return core.tuple(shape), numel, of_a_tensor

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        lengths = tuple(s.value if isinstance(s, core.constexpr) else s for s in shape)
        self.shape, self.numel, self.of_a_tensor = of_shape(lengths)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_a_tensor if type.is_block() else of_a_scalar

    def splat(self: Any, scalar: Any, like: Any) -> Any:
        block = core.block_type(scalar.dtype, like.type.shape)
        return core.tensor(self.builder.create_splat(block, scalar.handle), block)

    def broadcast_where_shapes_differ(self: Any, left: Any, right: Any) -> Any:
        if left.type.is_block() and right.type.is_block():
            return (left, right) if left.type.shape is right.type.shape else broadcast(self, left, right)
        if left.type.is_block():
            return left, splat(self, right, like=left)
        return (splat(self, left, like=right), right) if right.type.is_block() else (left, right)

    def operands(self: Any, left: Any, right: Any, *rules: bool, **named_rules: bool) -> Any:
        alike = isinstance(left, core.tensor) and isinstance(right, core.tensor) and left.dtype is right.dtype
        if alike and not rules and not named_rules and not left.dtype.is_ptr():  # neither is converted
            return broadcast_where_shapes_differ(self, left, right)
        return checked(self, left, right, *rules, **named_rules)

    numpy_types: dict[str, Any] = {}

    def numpy_type_of(type: Any) -> Any:
        element = type.element_ty if isinstance(type, core.block_type) else type
        if element.name not in numpy_types:
            numpy_types[element.name] = numpy_type(element)
        return numpy_types[element.name]

    def unwrapped(value: Any) -> Any:
        if isinstance(value, core.constexpr):
            return value.value
        return unwrap(value) if isinstance(value, list | tuple | core.tuple) else value

    def same_dtype(self: Any, other: Any) -> Any:
        if type(self) is core.dtype and type(other) is core.dtype:
            return self.name == other.name
        return self is other or equal(self, other)

    core.block_type.__init__ = block_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__ = tensor
    core.dtype.__eq__ = same_dtype
    core._unwrap_if_constexpr = unwrapped
    semantic.broadcast_impl_value = broadcast_where_shapes_differ
    semantic.binary_op_type_checking_impl = operands
    interpreter._get_np_dtype = numpy_type_of


def _operate_on_equal_types_at_once(core: Any, interpreter: Any) -> None:
    """``tensor`` takes operands of one type, a number or an offset of a pointer as they are, without a cast."""
    tensor, handle_of = core.tensor, interpreter.TensorHandle
    integers = (core.int32, core.int64)

    def made(data: Any, element: Any, *operands: Any) -> Any:
        of_a_block = any(operand.is_block() for operand in operands)
        return tensor(handle_of(data, element), core.block_type(element, data.shape) if of_a_block else element)

    def replace_operator(name: str, function: Any, elements: tuple[Any, ...], result: Any = None) -> None:
        usual, pointers = getattr(tensor, name), name == "__add__"
        swapped = name.startswith("__r")

        def operate(self: Any, other: Any) -> Any:
            element, left = self.dtype, self.handle.data
            if isinstance(other, core.constexpr):
                other = other.value
            if element in elements:
                if type(other) is tensor and other.dtype is element:
                    return made(function(left, other.handle.data), result or element, self.type, other.type)
                if type(other) is int or (type(other) is float and element is core.float32):
                    data = function(other, left) if swapped else function(left, other)
                    return made(data, result or element, self.type)
            elif pointers and element.is_ptr() and type(other) is tensor and other.dtype in integers:
                width = max(1, element.element_ty.primitive_bitwidth // 8)
                data = left + width * other.handle.data.astype(np.uint64)
                return made(data, element, self.type, other.type)
            return usual(self, other)

        setattr(tensor, name, operate)

    index = tensor.__getitem__

    def with_new_axes(self: Any, where: Any) -> Any:
        if type(where) is tuple and all(part is None or part == slice(None) for part in where):
            return made(self.handle.data[where], self.dtype, self.type)
        return index(self, where)

    def handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    tensor.__getitem__, handle_of.__init__ = with_new_axes, handle
    for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        replace_operator(f"__{name}__", function, (core.float32, *integers))
        replace_operator(f"__r{name}__", function, (core.float32, *integers))
    replace_operator("__truediv__", np.divide, (core.float32,))
    for name, function in (("and", np.bitwise_and), ("or", np.bitwise_or)):
        replace_operator(f"__{name}__", function, (core.int1,))
    comparisons = {
        "lt": "less",
        "le": "less_equal",
        "gt": "greater",
        "ge": "greater_equal",
        "eq": "equal",
        "ne": "not_equal",
    }
    for name, function in comparisons.items():
        replace_operator(f"__{name}__", getattr(np, function), (core.float32, *integers), core.int1)
