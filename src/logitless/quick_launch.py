"""Triton kernels with a cheaper launch: a cache in front of Triton's own dispatch.

``kernel[grid](...)`` takes 20 to 40 microseconds to find a kernel that it has compiled before, and a training step
launches hundreds of kernels a pass. A kernel under ``quick_launch`` looks its compiled kernel up by a short key, and
calls its launcher directly. The key is what Triton specializes on:

    tensor        dtype, GPU, and whether its address is a multiple of 16
    int           whether it is 1, and whether it is a multiple of 16
    float, None   the type
    descriptor    dtype and block (TMA)
    by name       constants and options such as ``num_warps``: their values

All other launches go through Triton: other arguments, integers of more than 32 bits, constants by position or other
parameters by name, a grid that is a function, profiler hooks, Triton's debug mode, other hardware than NVIDIA's, other
versions of Triton, and the interpreter. Triton's other settings, and globals that a kernel reads, keep the values that
they had at the first launch with a key.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch  # noqa: F401  for the example
import triton
from torch import Tensor, nn
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

KNOWN_VERSIONS = ("3.5.", "3.6.", "3.7.")
"""Triton versions in which a compiled kernel's ``run`` takes grid, stream, function, metadata, hooks and arguments."""

_LIMIT = 1 << 31


def quick_launch(kernel: Any) -> Any:
    """Decorate a ``triton.jit`` kernel; one of Triton's interpreter stays unchanged.

    Pass constants by name and all other arguments by position: only such launches are cached.

    Example:
        >>> @quick_launch
        ... @triton.jit
        ... def copy(source, target, BLOCK: tl.constexpr):
        ...     i = tl.arange(0, BLOCK)
        ...     tl.store(target + i, tl.load(source + i))  # doctest: +SKIP
    """
    if type(kernel) is JITFunction and triton.__version__.startswith(KNOWN_VERSIONS):
        kernel.__class__ = QuickKernel
        kernel._by_kind = {}
    return kernel


def descriptor(tensor: Tensor, block: Sequence[int]) -> TensorDescriptor:
    """``TensorDescriptor.from_tensor`` without its checks, which take longer than the launch.

    Args:
        tensor: read through TMA. Its address and strides must be multiples of 16 bytes, its last dimension contiguous.
        block: shape of a block.
    """
    made = object.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = tensor, tensor.shape, tensor.stride(), block
    return made


class QuickKernel(JITFunction):
    """A Triton kernel with a cache of compiled kernels by ``kind_of`` their arguments."""

    _by_kind: dict[tuple[Any, ...], tuple[Any, ...]]

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self._launch, grid) if type(grid) is tuple else super().__getitem__(grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        cached = not self.pre_run_hooks and not _is_profiled_or_debugged()
        if cached and self._by_kind:
            active = driver.active
            device = active.get_current_device()
            kind = kind_of(device, args, named)
            compiled = None if kind is None else self._by_kind.get(kind[0])
            if kind is not None and compiled is not None:
                run, function, metadata, constants = compiled
                x, y, z = (*grid, 1, 1)[:3]
                stream = active.get_current_stream(device)
                run(x, y, z, stream, function, metadata, None, None, None, *kind[1], *constants)
                return
        kernel = self.run(*args, grid=grid, warmup=False, **named)
        if cached and type(kernel) is CompiledKernel and kernel.metadata.target.backend == "cuda":
            kind, constants = kind_of(driver.active.get_current_device(), args, named), self._constants(args, named)
            if kind is not None and constants is not None:
                self._by_kind[kind[0]] = (kernel.run, kernel.function, kernel.packed_metadata, constants)

    def _constants(self, args: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...] | None:
        """The constants, in the launcher's order; None unless exactly the constants are passed by name."""
        by_position, by_name = self.params[: len(args)], self.params[len(args) :]
        if any(param.is_constexpr for param in by_position):
            return None
        if not all(param.is_constexpr and param.name in named for param in by_name):
            return None
        return tuple(named[param.name] for param in by_name)


def kind_of(device: int, args: Sequence[Any], named: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]] | None:
    """The key of a launch, and its arguments as the launcher takes them; None if an argument has no key.

    Triton specializes two launches of a kernel with equal keys alike.

    Args:
        device: the current GPU.
        args: by position.
        named: constants and options.

    Example:
        >>> key, values = kind_of(0, [torch.zeros(4), 32, 1.5, None], {"BLOCK": 8})
        >>> key
        (0, torch.float32, -1, True, 16, 'float', None, 'BLOCK', 8, <class 'int'>)
    """
    key: list[Any] = [device]
    values: list[Any] = []
    add_key, add_value = key.append, values.append  # this loop runs at every launch
    for each in args:
        kind = type(each)
        if kind is Tensor or kind is nn.Parameter:
            address = each.data_ptr()
            add_key(each.dtype)
            add_key(each.get_device())
            add_key(not address & 15)
            add_value(address)
            continue
        if kind is int:
            if not -_LIMIT <= each < _LIMIT:
                return None
            add_key(1 if each == 1 else 0 if each & 15 else 16)
        elif kind is float:
            add_key("float")
        elif kind is TensorDescriptor:
            key += (each.base.dtype, *each.block_shape, each.padding, getattr(each, "round_f32_to_tf32", False))
        elif each is None:
            add_key(None)
        else:
            return None
        add_value(each)
    constants = named.values()
    return (*key, *named, *constants, *map(type, constants)), values


def _is_profiled_or_debugged() -> bool:
    """Whether a profiler has launch hooks, or kernels are compiled for debugging."""
    runtime = knobs.runtime
    return bool(runtime.debug or _calls(runtime.launch_enter_hook) or _calls(runtime.launch_exit_hook))


def _calls(hook: Any) -> Any:
    return getattr(hook, "calls", hook)
