"""A decoder's layers, forward and backward, as CUDA graphs: for packed rows whose kernels are faster than their
launches.

A layer of a small model is twenty kernels of ten microseconds each, and the host takes longer to launch them; a graph
launches all at once. Its addresses and counts are fixed, so a packed row is padded to one of a few sizes, and the
tables of its attention to one of very few, with lines that refer to no token. A new size is a new graph, whose capture
takes longer than ten replays.

The forward pass is bitwise the same with and without padding. A weight's gradient is a product over the padded row, and
may be summed in another order. Whether a row uses a graph depends on the row, the model and the GPU's memory only,
never on what ran before.

Memory: all graphs of a model share the memory of the largest, ``kept_bytes`` times its tokens. They keep it, and sums
of the layers' gradients in float32, between steps.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from logitless.graph_capture import captured, multiplied_once, side_stream
from logitless.models.attention import AttentionLayout, prepare_tables
from logitless.models.kernels.rows import divided_up, power_of_two
from logitless.models.kernels.window import Window
from logitless.transfer import sent

if TYPE_CHECKING:
    from logitless.models.row_invariant.layers import AttentionForm

MOST_WORK = 1 << 41
"""Up to this product of rows and parameters of the layers, launching takes longer than an H200 computes."""

MEMORY_FRACTION = 16
"""A packed row's activations take at most 1/MEMORY_FRACTION of the GPU's memory, and so do the sums of gradients."""

MOST_GRAPHS = 16

_LEAST_ROWS = 256
_LEAST_LINES = 256
_LEAST_PARTS = 64
_LEAST_BRANCH_ROWS = 16384


def rounded_rows(num_rows: int) -> int:
    """The number of tokens that a packed row is padded to; the longer it is, the more its padding costs.

    Example:
        >>> [rounded_rows(n) for n in (1, 256, 1025, 6300)]
        [256, 256, 1536, 7168]
    """
    unit = max(_LEAST_ROWS if num_rows <= 4 * _LEAST_ROWS else 2 * _LEAST_ROWS, power_of_two(num_rows) // 8)
    return divided_up(num_rows, unit) * unit


def rounded_lines(num_lines: int, least: int) -> int:
    """The number of lines that a table is padded to: ``least`` times a power of four.

    Example:
        >>> [rounded_lines(n, 256) for n in (0, 256, 257, 1025)]
        [256, 256, 1024, 4096]
    """
    return least if num_lines <= least else rounded_lines(num_lines, 4 * least)


def rounded_parts(num_parts: int) -> int:
    """The number of parts of keys' gradients that there is room for; each takes memory."""
    return max(_LEAST_PARTS, power_of_two(num_parts))


@dataclass(frozen=True)
class HostTables:
    """What attention reads about a packed row, on the CPU.

    Args:
        tables: of ``AttentionLayout``, by name.
        branch_rows: [b] int32 of the layout, or None.
        positions: [rows] int32.
    """

    tables: dict[Any, Any]
    branch_rows: Tensor | None
    positions: Tensor

    @classmethod
    def of(
        cls, layout: AttentionLayout, forms: Sequence["AttentionForm"], dtype: torch.dtype, device: torch.device
    ) -> "HostTables":
        """Every table that attention of these forms reads forward and backward.

        Args:
            layout: on the CPU, padded.
            forms: of the layers.
            dtype, device: of the model; tiles depend on them.
        """
        for form in forms:
            prepare_tables(layout, form, dtype, gradients=True, device=device)
        tables = {name: table for name, table in layout.tables.items() if name[0] in ("query", "key")}
        return cls(tables, layout.branch_rows, layout.positions)

    @cached_property
    def padded(self) -> list[Tensor]:
        """Every array, padded: tables, branch rows if there are any, positions."""
        most = max(len(table[0] if isinstance(table, tuple) else table) for table in self.tables.values())
        found = list[Tensor]()
        for table in self.tables.values():
            if isinstance(table, tuple):
                tiles, divided, _ = table
                found.append(_padded(tiles, rounded_lines(most, _LEAST_LINES)))
                found[-1][len(tiles) :, 4] = -1  # padding lines belong to no part
                found.append(_padded(divided, rounded_lines(len(divided), _LEAST_PARTS)))
            else:
                found.append(_padded(table, rounded_lines(most, _LEAST_LINES)))
        if self.branch_rows is not None:
            found.append(_padded(self.branch_rows, rounded_lines(len(self.branch_rows), _LEAST_BRANCH_ROWS)))
        return [*found, self.positions]

    @property
    def size(self) -> tuple[Any, ...]:
        """Equal for packed rows that fit the same ``PaddedLayout``."""
        parts = [rounded_parts(table[2]) for table in self.tables.values() if isinstance(table, tuple)]
        return (*self.tables, self.branch_rows is None, *map(len, self.padded), *parts)


def _padded(lines: Tensor, count: int) -> Tensor:
    """So many lines, those behind the given ones 0."""
    found = lines.new_zeros(count, *lines.shape[1:])
    found[: len(lines)] = lines
    return found


class PaddedLayout:
    """An ``AttentionLayout`` at fixed addresses; ``load`` copies the numbers of another packed row there.

    Args:
        tables: of the first row; they determine the sizes.
        device: of the model.

    Attributes:
        num_tokens: rows, padding included.
        positions: [num_tokens] int32, 0 in padding.
        position: the same in int64.
        branch_rows: [b] int32, or None.
    """

    every_row = False

    def __init__(self, tables: HostTables, device: torch.device | str) -> None:
        self.num_tokens = len(tables.positions)
        room = [array.numel() for array in tables.padded]
        self._numbers = torch.zeros(sum(room), dtype=torch.int32, device=device)
        *arrays, self.positions = self._numbers.split(room)  # type: ignore[no-untyped-call]
        self.position = torch.zeros(self.num_tokens, dtype=torch.int64, device=device)
        self.branch_rows: Tensor | None = None if tables.branch_rows is None else arrays.pop()
        lines = iter([array.view(-1, 8) for array in arrays])
        self._tables: dict[Any, Any] = {
            name: (next(lines), next(lines), rounded_parts(table[2])) if isinstance(table, tuple) else next(lines)
            for name, table in tables.tables.items()
        }

    def load(self, tables: HostTables) -> None:
        """Copy the numbers of a packed row of the same ``size``, in one transfer."""
        numbers = torch.cat([array.flatten() for array in tables.padded])
        self._numbers.copy_(sent(numbers, self._numbers.device))
        self.position.copy_(self.positions)

    def query_tiles(self, tokens: int, num_key_heads: int, window: Window | None) -> Tensor:
        found: Tensor = self._tables["query", tokens, num_key_heads, window]
        return found

    def key_tiles(self, keys: int, num_key_heads: int, window: Window | None) -> tuple[Tensor, Tensor, int]:
        found: tuple[Tensor, Tensor, int] = self._tables["key", keys, num_key_heads, window]
        return found


class LayerGraphs:
    """The graphs of one decoder's layers.

    Args:
        run: computes the layers, from hidden states [T, D] and a ``PaddedLayout``; only launches kernels.
        tensors: returns every weight that ``run`` reads.
        forms: of the layers' attention.
        kept_bytes: activations of a token that the layers keep for the backward pass.
    """

    def __init__(
        self,
        run: Callable[[Tensor, PaddedLayout], Tensor],
        tensors: Callable[[], list[Tensor]],
        forms: Sequence["AttentionForm"],
        kept_bytes: int,
    ) -> None:
        self._run, self._tensors, self._forms, self._kept_bytes = run, tensors, tuple(forms), kept_bytes
        self._graphs = OrderedDict[tuple[Any, ...], "_Graph"]()
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._weights: tuple[Any, ...] = ()
        self._memory: Any = None
        self._in_use: weakref.ref[_Use] | None = None

    def __call__(self, layout: AttentionLayout, hidden: Float[Tensor, "T D"], held: Any) -> Tensor | None:
        """Hidden states [T, D] after the layers, as without a graph; None if no graph can be used for the row.

        Args:
            layout: of the row.
            hidden: before the layers.
            held: key of further tensors whose addresses a graph holds; a graph is captured for each.
        """
        if not torch.is_grad_enabled() or not hidden.is_cuda or torch.cuda.is_current_stream_capturing():
            return None
        if self._in_use is not None and self._in_use() is not None:
            return None
        tensors, rows = list(dict.fromkeys(self._tensors())), rounded_rows(layout.num_tokens)
        trained = [t for t in tensors if isinstance(t, nn.Parameter) and t.requires_grad]
        if not trained or any(_has_hooks(t) for t in trained) or not self._fits(rows, tensors, trained):
            return None
        weights = tuple((t.data_ptr(), t.requires_grad) for t in tensors)
        if weights != self._weights:
            self._forget()
            self._weights = weights
        on_host = AttentionLayout(layout.groups, "cpu", rows)
        tables = HostTables.of(on_host, self._forms, hidden.dtype, hidden.device)
        key = (held, *tables.size)
        graph = self._graphs.get(key)
        if graph is None:
            if any(_in_a_graph(t) for t in trained):
                return None
            while len(self._graphs) >= MOST_GRAPHS:
                self._graphs.popitem(last=False)
            padded = PaddedLayout(tables, hidden.device)
            padded.load(tables)
            graph = _Graph(self._run, padded, hidden, trained, self._sums, self._memory)
            self._memory, self._graphs[key] = graph.memory, graph
        else:
            graph.layout.load(tables)
        self._graphs.move_to_end(key)
        use = _Use(graph, self._sums)
        self._in_use = weakref.ref(use)
        anchor = hidden.new_zeros(0, requires_grad=True)
        out: Tensor = _Replayed.apply(use, hidden, anchor)  # type: ignore[no-untyped-call]
        return out

    def __len__(self) -> int:
        return len(self._graphs)

    def _fits(self, rows: int, tensors: Sequence[Tensor], trained: Sequence[Tensor]) -> bool:
        """Whether launches take longer than the kernels, and a graph fits the memory it may use."""
        device = trained[0].device
        share = torch.cuda.get_device_properties(device).total_memory // MEMORY_FRACTION
        return (
            rows * sum(t.numel() for t in tensors) <= MOST_WORK
            and rows * self._kept_bytes <= share
            and 4 * sum(t.numel() for t in trained) <= share
        )

    def _forget(self) -> None:
        self._graphs.clear()
        self._sums.clear()
        self._memory = None


class _Use:
    """A use of a graph whose backward may follow; the graph's next use waits until this object is gone."""

    def __init__(self, graph: "_Graph", sums: dict[nn.Parameter, Tensor]) -> None:
        self.graph, self.sums = graph, sums


class _Graph:
    """The layers' forward and backward pass as CUDA graphs.

    Args:
        run: see ``LayerGraphs``.
        layout: loaded with the tables of the row.
        hidden: [T, D] of the row.
        trained: parameters that get gradients.
        sums: their gradients; the first graph allocates them.
        memory: pool of the other graphs; None for the first.
    """

    def __init__(
        self,
        run: Callable[[Tensor, PaddedLayout], Tensor],
        layout: PaddedLayout,
        hidden: Tensor,
        trained: Sequence[nn.Parameter],
        sums: dict[nn.Parameter, Tensor],
        memory: Any,
    ) -> None:
        self.layout = layout
        self._trained = trained
        self.hidden = hidden.new_zeros(layout.num_tokens, hidden.shape[1])
        self.hidden[: len(hidden)] = hidden.detach()
        self.hidden.requires_grad_()
        self.grad = torch.zeros_like(self.hidden, requires_grad=False)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        stream = side_stream(hidden.device)
        before = [p.grad for p in trained]
        # the backward pass runs in the thread that captures
        with torch.autograd.set_multithreading_enabled(False), torch.enable_grad():
            try:
                for p in trained:
                    p.grad = None
                self._pass_back(run(self.hidden, layout))  # compiles and loads kernels, and allocates the sums
                for p in trained:
                    if p.grad is not None:
                        sums.setdefault(p, p.grad)
                    p.grad = sums.get(p)
                torch.cuda.synchronize(hidden.device)
                with torch.cuda.stream(stream):
                    multiplied_once(hidden.device, hidden.dtype)
                    with captured(self._forward, memory):
                        output = run(self.hidden, layout)
                    self.memory = self._forward.pool()
                    with captured(self._backward, self.memory):
                        self.grad_hidden = self._pass_back(output)
                self.output = output.detach()
            finally:
                for p, grad in zip(trained, before, strict=True):
                    p.grad = grad
        torch.cuda.current_stream(hidden.device).wait_stream(stream)

    def _pass_back(self, output: Tensor) -> Tensor:
        """Gradient of ``hidden``; those of parameters are added to their ``grad``."""
        grad_hidden, *grads = torch.autograd.grad(output, [self.hidden, *self._trained], self.grad, allow_unused=True)
        for p, grad in zip(self._trained, grads, strict=True):
            if grad is not None:  # None: its product has added it
                p.grad = grad if p.grad is None else p.grad.add_(grad)
        return grad_hidden

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states after the layers."""
        with torch.no_grad():
            self.hidden[: len(hidden)].copy_(hidden)
            self.hidden[len(hidden) :].zero_()
            self._forward.replay()
            return self.output[: len(hidden)].clone()

    def backward(self, grad: Tensor) -> Tensor:
        """Gradient of the hidden states; those of parameters are added to ``sums``."""
        self.grad[: len(grad)].copy_(grad)
        self.grad[len(grad) :].zero_()
        self._backward.replay()
        return self.grad_hidden[: len(grad)].clone()


def _add_here(sums: dict[nn.Parameter, Tensor]) -> None:
    """Make every parameter's ``grad`` the tensor that graphs add to, with its present value."""
    missing = [total for p, total in sums.items() if p.grad is None]
    if missing:
        torch._foreach_zero_(missing)
    for p, total in sums.items():
        if p.grad is not None and p.grad is not total:
            total.copy_(p.grad)
        p.grad = total


class _Replayed(torch.autograd.Function):
    """The layers of a graph. ``anchor``, which needs a gradient, makes autograd call backward under LoRA too."""

    @staticmethod
    def forward(ctx: Any, use: _Use, hidden: Tensor, anchor: Tensor) -> Tensor:  # noqa: ARG004
        ctx.use = use
        return use.graph.forward(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        use, ctx.use = ctx.use, None
        _add_here(use.sums)
        grad_hidden = use.graph.backward(grad)
        return None, grad_hidden if ctx.needs_input_grad[1] else None, None


def _in_a_graph(parameter: Tensor) -> bool:
    """Whether an autograd graph that was not freed yet leads to the parameter."""

    # Its node belongs to that pass's stream, which would have to wait for the one that captures.
    def node() -> Any:
        view: Any = parameter.view_as(parameter)
        return view.grad_fn.next_functions[0][0]

    node().metadata["seen"] = True  # of a node that is made here, this dies with it
    return "seen" in node().metadata


def _has_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))
