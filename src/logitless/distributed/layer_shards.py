"""A model that samples whose layers are sharded over ranks: each layer is gathered while the one before it computes.

A rank holds a piece of every layer, as bytes, and two buffers that layers take turns in; embedding, LM head and last
norm are whole on every rank. Parameters are views of the buffers, laid out as in the whole model, so that a layer runs
the kernels of the whole model on the same bytes: its bits are those of the unsharded layer.

A pass through the layers is a collective that a rank begins whenever it needs one. The others join in, with a pass of
their own or, if they have nothing to compute, by gathering alone (``serve``). So ranks need not have equally many
completions, steps or calls. The hosts agree on each pass, so passes cannot be captured in CUDA graphs, and nothing
hides the gather of the first layer.

    bytes of a rank  =  whole weights  +  sum of layers / n  +  2 * largest layer        (n > 1)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from logitless.distributed.ranks import Ranks
from logitless.errors import LostRankError

ALIGNMENT = 256
"""Bytes at whose multiples weights begin, as those that torch allocates for itself on a GPU, which kernels rely on."""


@dataclass(frozen=True)
class Placed:
    """Parameters in one allocation of bytes.

    Example:
        >>> a, b = nn.Linear(8, 8, device="meta").parameters()
        >>> placed = Placed.of([a, b])
        >>> placed.starts[b], placed.num_bytes, placed.piece_bytes(3)
        (256, 512, 256)
    """

    starts: Mapping[nn.Parameter, int]
    num_bytes: int

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter]) -> "Placed":
        """Places for parameters, on any device; those that share an allocation keep their distances."""
        allocations, starts, size = dict[int, int](), dict[nn.Parameter, int](), 0
        for parameter in dict.fromkeys(parameters):
            storage = parameter.untyped_storage()
            if storage._cdata not in allocations:
                allocations[storage._cdata] = size
                size += _aligned(storage.nbytes())
            starts[parameter] = allocations[storage._cdata] + int(parameter.storage_offset()) * parameter.itemsize
        return cls(starts, size)

    def piece_bytes(self, num_ranks: int) -> int:
        """Bytes of a rank's piece; all pieces are equally long."""
        return self.num_bytes if num_ranks == 1 else _aligned(-(-self.num_bytes // num_ranks))


@dataclass(frozen=True)
class CopyBytes:
    """Memory of a rank for a model that samples.

    Args:
        whole: embedding, LM head and the rest outside of the layers.
        pieces: of the layers.
    """

    whole: int
    pieces: int
    buffers: int

    @classmethod
    def of(cls, model: nn.Module, layers: Sequence[nn.Module], num_ranks: int) -> "CopyBytes":
        """Memory of ``LayerShards`` for a model on any device, ``meta`` included."""
        placed = [Placed.of(layer.parameters()) for layer in layers]
        pieces = [each.piece_bytes(num_ranks) for each in placed]
        buffers = 2 * num_ranks * max(pieces, default=0) if num_ranks > 1 else 0
        return cls(_around(model, layers).num_bytes, sum(pieces), buffers)

    @property
    def total(self) -> int:
        """All of it."""
        return self.whole + self.pieces + self.buffers


class LayerShards:
    """The layers of a model, sharded over ranks; with one rank all weights are whole.

    Every parameter of the model becomes a frozen view of this object's memory, without values before ``load``; modules
    and names stay, and buffers are moved to the device.

    Args:
        model: with row-invariant layers, usually on ``meta``.
        layers: of the model, in the order in which a pass runs them.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], ranks: Ranks, device: torch.device) -> None:
        self.num_bytes = CopyBytes.of(model, layers, ranks.world)
        self._ranks, self._device = ranks, device
        placed = [Placed.of(layer.parameters()) for layer in layers]
        sizes = [each.piece_bytes(ranks.world) for each in placed]
        self._pieces = [self._zeros(size) for size in sizes]
        both = [self._zeros(ranks.world * max(sizes, default=0)) for _ in range(2 * (ranks.world > 1))]
        if both:
            self._gathered = [both[i % 2][: ranks.world * size] for i, size in enumerate(sizes)]
        else:
            self._gathered = self._pieces
        around, made = _around(model, layers), dict[nn.Parameter, nn.Parameter]()
        self._layer: dict[nn.Parameter, tuple[int, int]] = {}  # of a view: its layer, and its first byte there
        for parts, memory in [(around, self._zeros(around.num_bytes)), *zip(placed, self._gathered, strict=True)]:
            for parameter, start in parts.starts.items():
                made[parameter] = nn.Parameter(_view(memory, start, parameter), requires_grad=False)
        for number, parts in enumerate(placed):
            self._layer |= {made[parameter]: (number, start) for parameter, start in parts.starts.items()}
        for module in model.modules():
            module._parameters |= {n: made[p] for n, p in module._parameters.items() if p is not None}
            module._buffers |= {n: b.to(device) for n, b in module._buffers.items() if b is not None}
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take weights by name; of a layer's this rank keeps its piece alone.

        Args:
            tensors: whole, on any device, one after the other, so that one is whole at a time.
        """
        for name, tensor in tensors:
            view = self.parameters[name]
            number, start = self._layer.get(view, (None, 0))
            if number is None or self._ranks.world == 1:
                view.data.copy_(tensor.detach())
                continue
            piece = self._pieces[number]
            own = self._ranks.rank * len(piece)
            low, high = max(start, own), min(start + view.numel() * view.itemsize, own + len(piece))
            if low < high:
                sent = tensor.detach().to(self._device, view.dtype).contiguous().flatten().view(torch.uint8)
                piece[low - own : high - own].copy_(sent[low - start : high - start])

    @contextmanager
    def a_pass(self) -> Iterator[Callable[[int], None]]:
        """Inside, a pass through all layers, which the other ranks join; call what it yields before each layer.

        Raises:
            LostRankError: another rank is gone.
        """
        if self._ranks.world == 1:
            yield lambda _: None
            return
        self._is_any_running(True)
        turns = _Turns(self._ranks, self._pieces, self._gathered)
        try:
            yield turns.ready
        except LostRankError:
            raise
        except BaseException:
            turns.rest()  # the others are in this pass too, and wait for this rank's pieces
            raise
        turns.rest()

    def serve(self) -> None:
        """Join in the passes of the other ranks until none of them makes any more, and all are here.

        Raises:
            LostRankError: another rank is gone.
        """
        while self._ranks.world > 1 and self._is_any_running(False):
            _Turns(self._ranks, self._pieces, self._gathered).rest()

    def _is_any_running(self, is_running: bool) -> bool:
        """Whether any rank begins a pass now. A collective of the hosts, which GPUs do not wait for."""
        return bool(self._ranks.sum_over_all(torch.tensor(int(is_running))))

    def _zeros(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)


class _Turns:
    """The gathers of one pass, each behind the kernels of the layer two before it, whose buffer it takes."""

    def __init__(self, ranks: Ranks, pieces: Sequence[Tensor], gathered: Sequence[Tensor]) -> None:
        self._ranks, self._pieces, self._gathered = ranks, pieces, gathered
        self._done, self._wait = 0, self._begin(0)

    def ready(self, number: int) -> None:
        """Wait for a layer's weights, and begin with the next one's; layers come in order."""
        assert number == self._done, "a pass runs its layers in order"
        self._wait()
        self._done += 1
        if self._done < len(self._pieces):
            self._wait = self._begin(self._done)

    def rest(self) -> None:
        """Gather the layers that are left."""
        while self._done < len(self._pieces):
            self.ready(self._done)

    def _begin(self, number: int) -> Callable[[], None]:
        return self._ranks.begin_gather(self._gathered[number], self._pieces[number])


def _around(model: nn.Module, layers: Sequence[nn.Module]) -> Placed:
    """The parameters outside of the layers."""
    inside = {p for layer in layers for p in layer.parameters()}
    return Placed.of(p for p in model.parameters() if p not in inside)


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    assert like.is_contiguous(), "weights are"
    return memory[start : start + like.numel() * like.itemsize].view(like.dtype).view(like.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
