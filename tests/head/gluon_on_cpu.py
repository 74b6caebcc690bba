"""Gluon kernels on the CPU, from their own source: a thread a group of warps, in an order that a seed draws.

Triton's interpreter does not know Gluon. Here its operations stand for what the hardware promises and no more: a copy
arrives and a product is made at any time after it was asked for, and no later than something waits for it. So a kernel
fails here that waits for ever, gives a barrier a wrong count, phase or number of bytes, overwrites what a product or a
copy still reads, uses products that are under way, or lets the copy engine read what it may not see yet. What this
does not know: layouts, registers, threads of one group, time.
"""

import inspect
import operator
import random
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Turns:
    """Threads of which one runs at a time; who is next, or which copy arrives, is drawn among those that can."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._copies: list[Callable[[], None]] = []
        self._back = threading.Semaphore(0)
        self._until: dict[threading.Thread, Callable[[], bool]] = {}
        self._go: dict[threading.Thread, threading.Semaphore] = {}
        self._failure: BaseException | None = None

    def copy(self, arrives: Callable[[], None]) -> None:
        """Something that happens by itself, at any time from now on."""
        self._copies.append(arrives)

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Let others go on, and go on when ``until`` says so; at once where there are no others."""
        me = threading.current_thread()
        if me not in self._go:
            return
        self._until[me] = until
        self._back.release()
        self._go[me].acquire()
        if self._failure is not None:
            raise SystemExit

    def run(self, functions: list[Callable[[], None]]) -> None:
        """All of them to their ends, and every copy to its place."""
        for function in functions:
            thread = threading.Thread(target=self._whole, args=(function,), daemon=True)
            self._go[thread], self._until[thread] = threading.Semaphore(0), lambda: True
            thread.start()
        while self._until or self._copies:
            able: list[Any] = [thread for thread, until in self._until.items() if until()]
            able += self._copies
            if not able:
                self._failure = AssertionError(f"{len(self._until)} groups wait for ever")
            if self._failure is not None:
                break
            chosen = self._random.choice(able)
            if isinstance(chosen, threading.Thread):
                self._go[chosen].release()
                self._back.acquire()
            else:
                self._copies.remove(chosen)
                chosen()
        for thread in list(self._until):
            self._go[thread].release()
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _whole(self, function: Callable[[], None]) -> None:
        me = threading.current_thread()
        self._go[me].acquire()
        try:
            if self._failure is None:
                function()
        except Exception as error:
            self._failure = error
        except SystemExit:
            pass
        finally:
            del self._until[me]
            self._back.release()


class Number(int):
    """A number in registers, which can be asked for in another type."""

    def to(self, dtype: torch.dtype) -> "Number":
        return self


class Block:
    """A tensor in registers."""

    type = SimpleNamespace(layout=None)

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    def __getitem__(self, key: Any) -> "Block":
        return Block(self.value[key])

    def to(self, dtype: torch.dtype) -> "Block":
        return Block(self.value.to(dtype))

    def reshape(self, shape: list[int]) -> "Block":
        return Block(self.value.reshape(shape))

    def permute(self, order: list[int]) -> "Block":
        return Block(self.value.permute(order))

    def split(self) -> tuple["Block", "Block"]:
        return Block(self.value[..., 0]), Block(self.value[..., 1])


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Block) else value


def _add_operators() -> None:
    def of_block(name: str) -> Callable[..., Any]:
        return lambda a, b: Block(getattr(operator, name)(a.value, _plain(b)))

    def of_block_from_the_right(name: str) -> Callable[..., Any]:
        return lambda a, b: Block(getattr(operator, name)(_plain(b), a.value))

    def of_number(name: str) -> Callable[..., Any]:
        def applied(a: Number, b: Any) -> Any:
            found = getattr(int, name)(a, b)
            return found if found is NotImplemented else Number(found)

        return applied

    for name in ("add", "sub", "mul", "floordiv", "mod", "and_", "or_", "xor"):
        short = f"{name.rstrip('_')}__"
        setattr(Block, f"__{short}", of_block(name))
        setattr(Block, f"__r{short}", of_block_from_the_right(name))
        for dunder in (f"__{short}", f"__r{short}"):
            setattr(Number, dunder, of_number(dunder))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Block, f"__{name}__", of_block(name))


_add_operators()


class Pointer:
    """Where a tensor begins in memory, or elements of it."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        assert memory.is_contiguous()
        self.memory, self.offset = memory.view(-1), offset

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, other + self.offset)

    def places(self, mask: Block) -> Tensor:
        places = self.offset.value[mask.value]
        assert ((places >= 0) & (places < len(self.memory))).all(), "an access outside of the tensor"
        return places


class Descriptor:
    """A matrix in memory as the copy engine knows it: of a box what lies outside is 0, and not written.

    It writes no less than 16 bytes, so that a row's last store may go on beyond the matrix.
    """

    layout = None

    def __init__(self, given: Any) -> None:
        self.matrix, self.block, self.dtype = given.base, tuple(given.block_shape), given.base.dtype

    def box(self, place: list[int]) -> Tensor:
        """A copy."""
        box = torch.zeros(self.block, dtype=self.dtype)
        inside = self._inside(place)
        box[: inside.shape[0], : inside.shape[1]] = inside
        return box

    def put(self, place: list[int], box: Tensor) -> None:
        inside = self._inside(place)
        rows, columns = inside.shape
        columns += -columns % (16 // self.dtype.itemsize)
        inside.as_strided((rows, columns), inside.stride()).copy_(box[:rows, :columns])

    def _inside(self, place: list[int]) -> Tensor:
        (row, column), (rows, columns) = place, self.block
        assert min(row, column) >= 0
        return self.matrix[row : row + rows, column : column + columns]


class Shared:
    """Shared memory, or a part of it; what ordinary stores wrote the copy engine sees after a fence and a barrier."""

    def __init__(self, value: Tensor, whole: "Shared | None" = None) -> None:
        self.value = value
        self.whole = whole or self
        self.writer: threading.Thread | None = None
        self.is_behind_a_fence = False

    def index(self, i: int) -> "Shared":
        return Shared(self.value[i], self.whole)

    def slice(self, first: int, length: int, dim: int) -> "Shared":
        return Shared(self.value.narrow(dim, first, length), self.whole)

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.value.permute(order), self.whole)


class Barrier:
    """Counts arrivals and bytes; a phase ends when none of either is left."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phases = 0

    def changed(self, arrivals: int, more_bytes: int) -> None:
        assert self.count, "a barrier that was not initialised"
        self.left -= arrivals
        self.bytes += more_bytes
        assert self.left >= 0, "more arrivals than a phase has"
        assert self.left or self.bytes >= 0, "more bytes than were expected"
        if self.left == self.bytes == 0:
            self.phases, self.left = self.phases + 1, self.count


class Products:
    """An accumulator with products under way; whoever adds to it or waits for it may have it, nobody else."""

    def __init__(self, value: Tensor, under_way: list[tuple[Tensor, Tensor, Tensor, Tensor, bool]]) -> None:
        self._value, self._under_way = value, under_way

    @classmethod
    def more(cls, a: Tensor, b: Tensor, onto: "Block | Products", keeps: bool) -> "Products":
        before = (onto.value, []) if isinstance(onto, Block) else (onto._value, onto._under_way)
        return cls(before[0], [*before[1], (a, b, a.clone(), b.clone(), keeps)])

    def waited(self, left: int) -> "Block | Products":
        value, under_way = self._value, list(self._under_way)
        while len(under_way) > left:
            a, b, seen_a, seen_b, keeps = under_way.pop(0)
            assert all(map(_same, (a, b), (seen_a, seen_b))), "overwritten while a product read it"
            product = a.float() @ b.float()
            value = value + product if keeps else product
        return Products(value, under_way) if under_way else Block(value)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


class OnCpu:
    """A kernel of a module of Gluon, to be launched like the kernel, on CPU tensors; programs run one after the other.

    Args:
        module: as imported.
        name: of the kernel.
        seed: of the order in which groups and copies take turns.
        instead: (text of the module, other text), to see that a fault is found.
    """

    def __init__(self, module: ModuleType, name: str, seed: int, instead: tuple[str, str] | None = None) -> None:
        source = inspect.getsource(module)
        if instead is not None:
            assert source.count(instead[0]) == 1, instead
            source = source.replace(*instead)
        self._module, self._source, self._name, self._seed = module, source, name, seed
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launched(*positional: Any, num_warps: int, **named: Any) -> None:
            self.launches += 1
            for program in range(grid[0]):
                kernel = _Program(program, Turns(self._seed + program)).namespace(self._module, self._source)
                names = list(inspect.signature(kernel[self._name]).parameters)
                values = dict(zip(names, positional, strict=False)) | named
                kernel[self._name](**{name: _argument(value) for name, value in values.items()})

        return launched


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Pointer(value)
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    return Number(value) if isinstance(value, int) and not isinstance(value, bool) else value


class _Program:
    """Gluon's operations, for one program of a grid."""

    def __init__(self, number: int, turns: Turns) -> None:
        self._number, self._turns, self._shared = number, turns, list[Shared]()
        self._stores: dict[threading.Thread, int] = {}

    def namespace(self, module: ModuleType, source: str) -> dict[str, Any]:
        """The module's names, with kernels that are plain functions of these operations."""
        body = "\n".join("" if line.startswith("@gluon.jit") else line for line in source.split("\n"))
        names = {"range": _numbers, "__name__": module.__name__}
        imports, definitions = body.split("\nHALF =", 1)
        assert "gluon" in imports
        names |= {
            "gl": self._language(), "mbarrier": self._barriers(), "tma": self._copy_engine(),
            "fence_async_shared": self._fence, "warpgroup_mma": self._product, "warpgroup_mma_wait": self._products,
        }  # fmt: skip
        exec(compile("HALF =" + definitions, module.__file__ or "", "exec"), names)
        return names

    def _language(self) -> SimpleNamespace:
        return SimpleNamespace(
            constexpr=lambda value: Number(value) if isinstance(value, int) else value,
            program_id=lambda axis: Number(self._number),
            cdiv=lambda a, b: Number(-(-a // b)),
            minimum=lambda a, b: Number(min(a, b)),
            static_range=_numbers,
            NVMMADistributedLayout=lambda **given: None,
            SliceLayout=lambda dim, layout: None,
            convert_layout=lambda block, layout: block,
            zeros=lambda shape, dtype, layout: Block(torch.zeros(shape, dtype=dtype)),
            arange=lambda first, last, layout: Block(torch.arange(first, last)),
            where=lambda mask, a, b: Block(torch.where(mask.value, _plain(a), _plain(b))),
            exp2=lambda block: Block(block.value.exp2()),
            sum=lambda block, dim: Block(block.value.sum(dim)),
            load=_load,
            store=_store,
            allocate_shared_memory=self._allocate,
            thread_barrier=self._thread_barrier,
            warp_specialize=lambda parts, warps, registers: self._turns.run([_called(*part) for part in parts]),
            int32=torch.int32,
            int64=torch.int64,
            float32=torch.float32,
            bfloat16=torch.bfloat16,
        )

    def _allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if dtype == torch.int64:
            barriers = [Barrier() for _ in range(shape[0])]
            return SimpleNamespace(index=lambda i: barriers[i])
        made = Shared(torch.full(shape, torch.nan, dtype=dtype))
        made.store = lambda block: self._written(made, block)  # type: ignore[attr-defined]
        self._shared.append(made)
        return made

    def _written(self, shared: Shared, block: Block) -> None:
        self._turns.pause()
        assert (block.value.shape, block.value.dtype) == (shared.value.shape, shared.value.dtype)
        shared.value.copy_(block.value)
        shared.writer, shared.is_behind_a_fence = threading.current_thread(), False

    def _fence(self) -> None:
        for shared in self._shared:
            shared.is_behind_a_fence |= shared.writer is threading.current_thread()

    def _thread_barrier(self) -> None:
        for shared in self._shared:
            if shared.writer is threading.current_thread() and shared.is_behind_a_fence:
                shared.writer = None

    def _barriers(self) -> SimpleNamespace:
        def init(barrier: Barrier, count: int) -> None:
            barrier.count = barrier.left = count

        def expect(barrier: Barrier, size: int) -> None:
            self._turns.pause()
            barrier.changed(1, size)

        def arrive(barrier: Barrier, pred: bool = True) -> None:
            self._turns.pause()
            if pred:
                barrier.changed(1, 0)

        def wait(barrier: Barrier, phase: int) -> None:
            assert barrier.count, "a barrier that was not initialised"
            self._turns.pause(until=lambda: barrier.phases & 1 != phase)

        return SimpleNamespace(MBarrierLayout=lambda: None, init=init, expect=expect, arrive=arrive, wait=wait)

    def _copy_engine(self) -> SimpleNamespace:
        def load(source: Descriptor, place: list[int], barrier: Barrier, to: Shared) -> None:
            self._turns.pause()
            assert (to.value.shape, to.value.dtype) == (source.block, source.dtype)
            to.value.fill_(torch.nan)

            def arrives() -> None:
                to.value.copy_(source.box(place))
                barrier.changed(0, -to.value.nbytes)

            self._turns.copy(arrives)

        def store(to: Descriptor, place: list[int], source: Shared) -> None:
            self._turns.pause()
            assert source.whole.writer is None, "the copy engine may not see yet what was written"
            me, seen = threading.current_thread(), source.value.clone()
            self._stores[me] = self._stores.get(me, 0) + 1

            def arrives() -> None:
                assert _same(source.value, seen), "overwritten while it was stored"
                to.put(place, seen)
                self._stores[me] -= 1

            self._turns.copy(arrives)

        def store_wait(left: int) -> None:
            me = threading.current_thread()
            self._turns.pause(until=lambda: self._stores.get(me, 0) <= left)

        return SimpleNamespace(
            async_copy_global_to_shared=load, async_copy_shared_to_global=store, store_wait=store_wait
        )

    def _product(self, a: Shared, b: Shared, acc: Any, *, use_acc: bool, is_async: bool) -> Products:
        self._turns.pause()
        assert is_async
        return Products.more(a.value, b.value, acc, bool(use_acc))

    def _products(self, left: int, deps: list[Any]) -> Any:
        self._turns.pause()
        (of,) = deps
        return of.waited(left) if isinstance(of, Products) else of


def _numbers(*bounds: int) -> Iterator[Number]:
    return map(Number, range(*bounds))


def _called(function: Callable[..., None], arguments: tuple[Any, ...]) -> Callable[[], None]:
    return lambda: function(*arguments)


def _load(source: Pointer, mask: Block, other: float) -> Block:
    found = torch.full(mask.shape, other, dtype=source.memory.dtype)
    found[mask.value] = source.memory[source.places(mask)]
    return Block(found)


def _store(to: Pointer, block: Block, mask: Block) -> None:
    to.memory[to.places(mask)] = block.value[mask.value].to(to.memory.dtype)
