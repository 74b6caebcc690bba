"""Triton kernels launched without looking at everything again.

``kernel[grid](...)`` binds arguments to names, specialises each, turns options into a string and asks a dozen settings
before it comes to a compiled kernel that it has launched a thousand times: 20 to 40 microseconds, and a training step
launches hundreds of kernels a pass. A kernel under ``quick_launch`` remembers what Triton compiled for arguments of
one kind, and calls its launcher directly the next time.

What kind an argument is of decides what Triton compiles, so it is all that the memory goes by:

    tensor        dtype, its GPU, and whether its address is a multiple of 16
    int           whether it is 1, and whether it is a multiple of 16
    float, None   that
    descriptor    dtype and block (TMA)
    by name       constants and options such as ``num_warps``: their values

Everything else is launched as ever: other arguments, integers of more than 32 bits, constants that are given by
position and other parameters by name, a grid that is a function, hooks of a profiler, Triton's debugging, other
hardware than NVIDIA's, versions of Triton whose launcher is not known here, Triton's interpreter. Triton's other
settings, and constants of a kernel's module, stay what they were at the first launch of a kind.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch  # noqa: F401 the example speaks of it
import triton
from torch import Tensor, nn
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

KNOWN_VERSIONS = ("3.5.", "3.6.", "3.7.")
"""Of Triton: in these a compiled kernel's ``run`` takes grid, stream, function, metadata, hooks and all arguments."""

_LIMIT = 1 << 31


def quick_launch(kernel: Any) -> Any:
    """The kernel that ``triton.jit`` made, launched quickly from its second launch on; the interpreter's as it is.

    A launch is quick where constants are passed by name, and all other parameters by position.

    Example:
        >>> @quick_launch
        ... @triton.jit
        ... def copy(source, target, BLOCK: tl.constexpr):
        ...     i = tl.arange(0, BLOCK)
        ...     tl.store(target + i, tl.load(source + i))  # doctest: +SKIP
    """
    if type(kernel) is JITFunction and triton.__version__.startswith(KNOWN_VERSIONS):
        kernel.__class__ = QuickKernel
        kernel._remembered = {}
    return kernel


def descriptor(tensor: Tensor, block: Sequence[int]) -> TensorDescriptor:
    """``TensorDescriptor.from_tensor`` without its checks, which take longer than the launch: callers know that start
    and strides are multiples of 16 bytes, and that the last dimension is contiguous.

    Args:
        tensor: read block by block through TMA.
        block: as many numbers as it has dimensions.
    """
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = tensor, tensor.shape, tensor.stride(), block
    return made


class QuickKernel(JITFunction):
    """A kernel of Triton that remembers what was compiled for which kind of arguments."""

    _remembered: dict[tuple[Any, ...], tuple[Any, ...]]

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self._launch, grid) if type(grid) is tuple else super().__getitem__(grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        quick = not self.pre_run_hooks and not _watched()
        if quick and self._remembered:
            active = driver.active
            device = active.get_current_device()
            found = kind_of(device, args, named)
            known = None if found is None else self._remembered.get(found[0])
            if found is not None and known is not None:
                run, function, metadata, constants = known
                x, y, z = (*grid, 1, 1)[:3]
                stream = active.get_current_stream(device)
                run(x, y, z, stream, function, metadata, None, None, None, *found[1], *constants)
                return
        compiled = self.run(*args, grid=grid, warmup=False, **named)
        if quick and type(compiled) is CompiledKernel and compiled.metadata.target.backend == "cuda":
            found, constants = kind_of(driver.active.get_current_device(), args, named), self._constants(args, named)
            if found is not None and constants is not None:
                self._remembered[found[0]] = (compiled.run, compiled.function, compiled.packed_metadata, constants)

    def _constants(self, args: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...] | None:
        """What the launcher gets behind the arguments given by position: all constants; None where they are others."""
        given, behind = self.params[: len(args)], self.params[len(args) :]
        if any(param.is_constexpr for param in given):
            return None
        if not all(param.is_constexpr and param.name in named for param in behind):
            return None
        return tuple(named[param.name] for param in behind)


def kind_of(device: int, args: Sequence[Any], named: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]] | None:
    """What decides which compiled kernel is launched, and the arguments as the launcher takes them; None: unknown.

    Two launches of one kernel with equal keys are specialised equally by Triton.

    Args:
        device: current.
        args: of the launch, by position.
        named: constants and options.

    Example:
        >>> key, values = kind_of(0, [torch.zeros(4), 32, 1.5, None], {"BLOCK": 8})
        >>> key
        (0, torch.float32, -1, True, 16, 'float', None, 'BLOCK', 8, <class 'int'>)
    """
    key: list[Any] = [device]
    values: list[Any] = []
    say, give = key.append, values.append
    for each in args:
        kind = type(each)
        if kind is Tensor or kind is nn.Parameter:
            address = each.data_ptr()
            say(each.dtype)
            say(each.get_device())
            say(not address & 15)
            give(address)
            continue
        if kind is int:
            if not -_LIMIT <= each < _LIMIT:
                return None
            say(1 if each == 1 else 0 if each & 15 else 16)
        elif kind is float:
            say("float")
        elif kind is TensorDescriptor:
            key += (each.base.dtype, *each.block_shape, each.padding, getattr(each, "round_f32_to_tf32", False))
        elif each is None:
            say(None)
        else:
            return None
        give(each)
    constants = named.values()
    return (*key, *named, *constants, *map(type, constants)), values


def _watched() -> bool:
    """Whether a profiler wants to hear of every launch, or kernels are to be compiled for debugging: for a while."""
    runtime = knobs.runtime
    return bool(runtime.debug or _calls(runtime.launch_enter_hook) or _calls(runtime.launch_exit_hook))


def _calls(hook: Any) -> Any:
    return getattr(hook, "calls", hook)
