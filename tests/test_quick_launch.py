"""Launches that remember what Triton compiled: never another kernel than Triton itself would have chosen."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.driver import CudaLauncher  # noqa: E402
from triton.compiler import CompiledKernel, make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from logitless import quick_launch  # noqa: E402
from logitless.quick_launch import QuickKernel, descriptor, kind_of  # noqa: E402


def add(source, other, target, number, count, FLAG: tl.constexpr, BLOCK: tl.constexpr):
    """target = source + other + number (+ 1) on ``count`` numbers."""
    i = tl.arange(0, BLOCK)
    x = tl.load(source + i, mask=i < count, other=0.0)
    if other is not None:
        x += tl.load(other + i, mask=i < count, other=0.0)
    if FLAG:
        x += 1
    tl.store(target + i, x + number, mask=i < count)


class Launches:
    """A kernel whose compiler and driver are replaced: what was compiled, and what was launched with what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[int, tuple[Any, ...]]] = []
        self.kernel = quick_launch.quick_launch(JITFunction(add, **options))
        active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 7)
        monkeypatch.setattr(quick_launch, "driver", SimpleNamespace(active=active))
        monkeypatch.setattr(QuickKernel, "run", self.compile)

    def compile(self, *args: Any, grid: Any, warmup: bool, **named: Any) -> CompiledKernel:
        assert not warmup
        number = len(self.compiled)
        self.compiled.append((args, grid, named))
        made = object.__new__(CompiledKernel)
        made.metadata = SimpleNamespace(target=GPUTarget("cuda", 90, 32))
        made.function, made.packed_metadata, made.module = f"function {number}", ("metadata", number), object()
        made._run = lambda *given: self.launched.append((number, given))
        return made

    def of(self, *args: Any, grid: tuple[int, ...] = (3,), **named: Any) -> int | None:
        """Launch; the number of the compiled kernel that was launched quickly, or None."""
        before = len(self.launched)
        self.kernel[grid](*args, **{"FLAG": False, "BLOCK": 8, "num_warps": 1, **named})
        return self.launched[-1][0] if len(self.launched) > before else None


def numbers(count: int = 8, offset: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A vector that begins ``offset`` numbers behind a multiple of 16 bytes."""
    room = torch.zeros(count + offset + 16, dtype=dtype)
    begin = (-room.data_ptr() % 16) // room.itemsize + offset
    return room[begin : begin + count]


def test_the_second_launch_of_a_kind_goes_to_what_the_first_one_compiled(monkeypatch):
    launches = Launches(monkeypatch)
    x, y, z = numbers(), numbers(), numbers()
    assert launches.of(x, None, y, 1.5, 5) is None
    assert launches.of(x, None, z, 2.5, 6, grid=(4, 2)) == 0
    begin = (4, 2, 1, 7, "function 0", ("metadata", 0), None, None, None)
    assert launches.launched == [(0, (*begin, x.data_ptr(), None, z.data_ptr(), 2.5, 6, False, 8))]
    assert len(launches.compiled) == 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("alignment of an address", {"source": numbers(offset=1)}),
        ("dtype", {"source": numbers(dtype=torch.bfloat16)}),
        ("an integer that is 1", {"count": 1}),
        ("an integer that is a multiple of 16", {"count": 32}),
        ("a tensor for None", {"other": numbers()}),
        ("an integer for a number", {"number": 3}),
        ("a constant", {"BLOCK": 16}),
        ("a constant that is equal and of another type", {"FLAG": 0}),
        ("an option", {"num_warps": 2}),
        ("one more option", {"launch_pdl": True}),
    ],
)
def test_another_kind_is_compiled_for_itself(monkeypatch, name, change):
    launches = Launches(monkeypatch)

    def launch(**changed):
        positional = {"source": numbers(), "other": None, "target": numbers(), "number": 1.5, "count": 5}
        named = {key: value for key, value in changed.items() if key not in positional}
        return launches.of(*(positional | {k: v for k, v in changed.items() if k in positional}).values(), **named)

    launch()
    assert launch() == 0, name
    assert launch(**change) is None, name
    assert launch(**change) == 1, name
    assert launch() == 0, name


def test_launches_that_have_no_key_go_through_triton(monkeypatch):
    launches = Launches(monkeypatch)
    x, y = numbers(), numbers()
    for args, named in (
        ((x, None, y, 1.5, 1 << 31), {}),  # another type of integer
        ((x, None, y, True, 5), {}),
        ((x, None, y, 1.5), {"count": 5}),  # by name, but no constant
        ((x, None, y, tl.constexpr(1.5), 5), {}),
    ):
        for _ in range(3):
            assert launches.of(*args, **named) is None
    assert launches.launched == []


def test_a_constant_by_position_is_no_integer_of_its_kind(monkeypatch):
    launches = Launches(monkeypatch)
    for block in (8, 24, 8):  # neither is 1 or a multiple of 16
        launches.kernel[(3,)](numbers(), None, numbers(), 1.5, 5, 0, block, num_warps=1)
    assert launches.launched == []


def test_a_grid_that_is_a_function_is_left_to_triton(monkeypatch):
    launches = Launches(monkeypatch)

    def grid(constants):
        return (constants["BLOCK"],)

    assert launches.of(numbers(), None, numbers(), 1.5, 5) is None
    assert launches.of(numbers(), None, numbers(), 1.5, 5, grid=grid) is None
    assert launches.compiled[1][1] is grid


def test_a_tensor_on_another_gpu_is_of_another_kind(monkeypatch):
    kinds = []
    for device in (0, 1):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda _, device=device: device)
        kinds.append(kind_of(0, [numbers()], {}))
    assert kinds[0][0] != kinds[1][0]


@pytest.mark.parametrize("setting", ["launch_enter_hook", "launch_exit_hook", "debug"])
def test_while_hooks_or_debugging_are_on_triton_launches_and_nothing_is_cached(monkeypatch, setting):
    launches, known = Launches(monkeypatch), quick_launch.knobs
    unset = {"launch_enter_hook": None, "launch_exit_hook": None, "debug": False}
    watching = SimpleNamespace(runtime=SimpleNamespace(**(unset | {setting: print})))
    monkeypatch.setattr(quick_launch, "knobs", watching)
    for _ in range(2):
        assert launches.of(numbers(), None, numbers(), 1.5, 5) is None
    monkeypatch.setattr(quick_launch, "knobs", known)
    assert launches.of(numbers(), None, numbers(), 1.5, 5) is None
    assert launches.of(numbers(), None, numbers(), 1.5, 5) == 2
    monkeypatch.setattr(quick_launch, "knobs", watching)
    assert launches.of(numbers(), None, numbers(), 1.5, 5) is None


def test_the_triton_that_is_installed_is_launched_quickly():
    """Fails when Triton moves on: compare its launcher with ``QuickKernel._launch``, then add the version."""
    assert triton.__version__.startswith(quick_launch.KNOWN_VERSIONS)
    taken = list(inspect.signature(CudaLauncher.__call__).parameters)
    assert taken == ["self", "gridX", "gridY", "gridZ", "stream", "function", "args"]
    assert type(quick_launch.quick_launch(JITFunction(add))) is QuickKernel


def test_unknown_versions_of_triton_are_not_wrapped(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "9.0.0")
    assert type(quick_launch.quick_launch(JITFunction(add))) is JITFunction


def test_the_interpreter_keeps_its_functions():
    from triton.runtime.interpreter import InterpretedFunction

    kernel = InterpretedFunction(add)
    assert quick_launch.quick_launch(kernel) is kernel


def test_the_quick_descriptor_is_the_checked_one():
    x = torch.zeros(8, 16)
    assert descriptor(x, [4, 16]).__dict__ == {
        key: value
        for key, value in TensorDescriptor.from_tensor(x, [4, 16]).__dict__.items()
        if key in ("base", "shape", "strides", "block_shape")
    }
    assert descriptor(x, [4, 16]).padding == "zero"


BUFFER = torch.zeros(64)
TENSORS = st.builds(
    lambda offset, dtype: BUFFER[offset : offset + 16].view(dtype),
    st.integers(0, 40),
    st.sampled_from([torch.float32, torch.int32, torch.bfloat16]),
)
INTEGERS = st.one_of(st.integers(-40, 40), st.integers(-(1 << 33), 1 << 33), st.sampled_from([1, 16, -(1 << 31)]))
BLOCKS = st.builds(
    lambda block, dtype: TensorDescriptor.from_tensor(torch.zeros(16, 16, dtype=dtype), [block, 16]),
    st.sampled_from([8, 16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
ARGUMENTS = st.one_of(TENSORS, INTEGERS, BLOCKS, st.none(), st.floats(allow_nan=False), st.booleans())
LAUNCHES = st.tuples(
    st.lists(ARGUMENTS, min_size=5, max_size=5),
    st.fixed_dictionaries({"FLAG": st.sampled_from([True, False, 1, 0]), "BLOCK": st.sampled_from([8, 16])}),
)


@settings(max_examples=300)
@given(st.lists(LAUNCHES, min_size=2, max_size=12), st.sampled_from([(), ("count",), ("source", "count")]))
def test_equal_kinds_are_specialised_equally_by_triton(launches, unspecialised):
    kernel = JITFunction(add, do_not_specialize=list(unspecialised))
    backend = make_backend(GPUTarget("cuda", 90, 32))
    specialise = create_function_from_signature(kernel.signature, kernel.params, backend)
    known: dict[tuple[Any, ...], str] = {}
    for args, named in launches:
        found = kind_of(0, args, named)
        if found is None:
            continue
        key, values = found
        _, specialisation, options = specialise(*args, **named)
        assert known.setdefault(key, repr((specialisation, options))) == repr((specialisation, options))
        for given_value, value in zip(args, values, strict=True):
            assert value == (given_value.data_ptr() if isinstance(given_value, torch.Tensor) else given_value)
