"""Descriptions that are kept are those that Triton's interpreter would make anew."""

import os

import pytest

from tests import warm

pytest.importorskip("triton")

PROGRAM = """
import itertools
import numpy
import triton.language as tl
from triton.runtime import interpreter
from tests.head.interpreter import complete_interpreter

{complete}
semantic = interpreter.interpreter_semantic


def value(dtype, shape):
    data = numpy.arange(1, 1 + int(numpy.prod(shape or (1,)))).astype(interpreter._get_np_dtype(dtype))
    type = tl.block_type(dtype, list(shape)) if shape else dtype
    return tl.tensor(interpreter.TensorHandle(data.reshape(shape or (1,)), dtype), type)


def told(what, *operands):
    try:
        found = what(*operands)
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"
    shape = [length.value for length in found.shape]
    numbers = found.handle.data
    return f"{{found.type}} {{shape}} {{found.numel.value}} {{found.dtype}} {{numbers.dtype}} {{numbers.tolist()}}"


DTYPES = tl.int1, tl.int8, tl.int32, tl.int64, tl.uint32, tl.float16, tl.float32, tl.float64
VALUES = [value(dtype, shape) for dtype in DTYPES for shape in ((), (4,), (1, 4), (2, 1), (8,))] + [2, -3, 0.5]
OPERATIONS = {{
    "add": lambda a, b: semantic.add(a, b, True), "multiply": lambda a, b: semantic.mul(a, b, False),
    "divide": semantic.truediv, "modulo": semantic.mod, "less": semantic.less_than, "and": semantic.and_,
    "where": lambda a, b: semantic.where(value(tl.int1, (4,)), a, b),
}}
for (name, what), a, b in itertools.product(OPERATIONS.items(), VALUES, VALUES):
    if isinstance(a, tl.tensor) or isinstance(b, tl.tensor):
        print(name, told(what, a, b))
for pointer in (tl.pointer_type(tl.float32), tl.pointer_type(tl.int8)):
    for shape in ((), (4,)):
        for offset in (value(tl.int32, (4,)), value(tl.int64, ()), value(tl.float32, ()), value(pointer, (4,)), 3):
            print(told(lambda: semantic.add(value(pointer, shape), offset, False)))
for shape in ([3], [2, -1], [1 << 21], []):
    print(told(lambda: tl.tensor(None, tl.block_type(tl.int32, shape))))
"""


@pytest.mark.slow
def test_values_types_and_errors_are_those_of_the_interpreter_as_it_is():
    plain, ours = (
        warm.run("-c", PROGRAM.format(complete=complete), environment=os.environ | {"TRITON_INTERPRET": "1"})
        for complete in ("numpy.seterr(all='ignore')", "complete_interpreter()")
    )
    assert plain.returncode == ours.returncode == 0, plain.stderr + ours.stderr
    assert len(plain.stdout.splitlines()) > 10_000
    assert ours.stdout == plain.stdout
