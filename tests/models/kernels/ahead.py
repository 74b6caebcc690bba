"""Triton kernels compiled for a GPU that is not there: every launch that some code makes, with the arguments it makes.

A process of its own without the interpreter runs the code, on CPU tensors, while a launch compiles and does no more.
"""

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests import warm

SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
"""KiB that a program may have, by compute capability."""

CAPABILITIES = [
    pytest.param(capability, marks=[] if capability == 90 else [pytest.mark.slow]) for capability in SHARED_MEMORY
]
"""The others among the slow tests."""


class Kernel(NamedTuple):
    """What became of one launch; ``spilled`` in bytes a thread, -1 where nothing disassembled it.

    ``narrow_loads`` read two bytes of global memory each.
    """

    name: str
    shared_memory: int
    registers: int
    spilled: int
    warp_group_products: int
    narrow_loads: int


def _compile(kernel: Any, capability: int, resources: bool, positional: Any, named: dict[str, Any]) -> Kernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    values = dict(zip(names, positional, strict=False)) | {n: v for n, v in named.items() if n in names}
    options = {n: v for n, v in named.items() if n not in names}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        is_one = type(value) is int and value == 1 and not parameter.do_not_specialize  # as Triton takes strides
        if parameter.is_constexpr or value is None or is_one:
            signature[name], constants[(i,)] = "constexpr", value
            continue
        signature[name] = _type(value)
        even = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
        if even and not parameter.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled = _resources(made.asm["ptx"], capability) if resources else (-1, -1)
    ptx = made.asm["ptx"]
    products, narrow_loads = ptx.count("wgmma.mma_async"), len(re.findall(r"ld\.global\S*\.b16", ptx))
    return Kernel(kernel.__name__, made.metadata.shared, registers, spilled, products, narrow_loads)


def _type(value: Any) -> str:
    dtypes = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    dtypes |= {torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1"}
    if isinstance(value, Tensor):
        return "*" + dtypes[value.dtype]
    if isinstance(value, int):
        return "i32"
    if isinstance(value, float):
        return "fp32"
    layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
    return f"tensordesc<{dtypes[value.base.dtype]}{list(value.block_shape)}{layout}>"


def _resources(ptx: str, capability: int) -> tuple[int, int]:
    """Registers and bytes spilled a thread, as the assembler reports them."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    names = ("ptxas-blackwell", "ptxas") if capability >= 100 else ("ptxas",)
    tool = next(tools / name for name in names if (tools / name).exists())
    target = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool, "-v", f"--gpu-name={target}", file.name, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores", report)
    return int(registers[1]) if registers else -1, int(spilled[1]) if spilled else -1


@contextmanager
def compiled(capability: int, resources: bool = False) -> Iterator[list[Kernel]]:
    """While it lasts, launches are compilations; yields what they found."""
    from triton.runtime.jit import JITFunction

    found: list[Kernel] = []

    def run(kernel: Any, *positional: Any, grid: Any, warmup: bool, **named: Any) -> None:
        found.append(_compile(kernel, capability, resources, positional, named))

    launch = JITFunction.run
    try:
        JITFunction.run = run
        yield found
    finally:
        JITFunction.run = launch


def run(module: str, *arguments: str) -> Any:
    """JSON that ``python -m module arguments`` prints last, in a process without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    imported = ("logitless.head.fused", "logitless.models.row_invariant", "logitless.rollout.gpu")
    done = warm.run("-m", module, *arguments, environment=environment, imported=imported)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
