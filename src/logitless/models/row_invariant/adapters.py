"""LoRA adapters of several owners over one base model, unmerged: each row of a pass uses the adapter of its owner.

Training uses *spans*: the packed rows of the owners end to end, each with its own factors, which get gradients.
Everything that depends on a number of rows (LoRA's products, gradients of rows, parts of attention's gradient) is
computed span by span, so that weights, log-probs and gradients are bitwise those of a pass over that span alone.

Decoding uses a *stack*: the factors of a few adapters in tensors that stay in place, and an index for each row on the
device. A step's launches, and its CUDA graph, do not depend on which adapters its rows have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from logitless.models.kernels.row_adapters import add_rows_own
from logitless.models.lm_head import backbone, causal_lm
from logitless.models.row_invariant.coverage import GATE_UP, dense_mlp, inputs_of, mlp_of, modules_of, output_of
from logitless.models.row_invariant.linear import Projection, RowsOwn, Span, project
from logitless.types import LMHead


@dataclass(frozen=True)
class Lora:
    """One adapter: A [R, K] and B [N, R] of the linear modules that it adapts, and the scale of their product."""

    factors: Mapping[nn.Module, tuple[Tensor, Tensor]]
    scale: float

    def head(self, head: LMHead, module: nn.Module) -> LMHead:
        """The LM head under this adapter; ``module`` is its linear layer."""
        if module not in self.factors:
            return head
        lora_a, lora_b = self.factors[module]
        return replace(head, lora_a=lora_a, lora_b=lora_b, lora_scale=self.scale)


@dataclass(frozen=True)
class SpanAdapters:
    """Adapters of consecutive rows in training; ``lengths`` are the rows of each."""

    lengths: tuple[int, ...]
    adapters: tuple[Lora, ...]

    def projections(self, modules: Sequence[Any]) -> list[Projection]:
        """Projections of linear modules that share their input, with ``spans``."""
        found = []
        for module in modules:
            spans, start = [], 0
            for length, lora in zip(self.lengths, self.adapters, strict=True):
                lora_a, lora_b = lora.factors.get(module, (None, None))
                spans.append(Span(start, start + length, lora_a, lora_b, lora.scale))
                start += length
            found.append(Projection(module.weight, module.bias, spans=tuple(spans)))
        return found


class _Maps(NamedTuple):
    """Stacked factors of linear modules that share their input, as ``add_rows_own`` reads them."""

    modules: tuple[Any, ...]
    a: Tensor
    b: Tensor
    scale: Tensor

    def factors(self, place: int, rank: int) -> list[tuple[Tensor, Tensor]]:
        """A and B of each module."""
        widths = [module.weight.shape[0] for module in self.modules]
        return list(zip(self.a[place].split(rank), self.b[place].split(widths), strict=True))  # type: ignore[no-untyped-call]


class AdapterStack:
    """Places for adapters in decoding. Place 0 is the base model without an adapter.

    Args:
        model: with row-invariant layers and without PEFT's wrappers.
        num_places: number of adapters, besides the base.
        rank: the largest that fits.
    """

    def __init__(self, model: nn.Module, *, num_places: int, rank: int) -> None:
        self.num_places, self.rank = num_places, rank
        self.head: Any = causal_lm(model).get_output_embeddings()
        like = backbone(model).norm.weight
        self.maps = {group[0]: _maps(group, num_places + 1, rank, like) for group in [*groups_of(model), (self.head,)]}
        self.held: list[Lora] = [Lora({}, 1.0)] * (num_places + 1)

    @staticmethod
    def bytes_of(model: nn.Module, *, num_places: int, rank: int) -> int:
        """Device bytes of such a stack."""
        head: Any = causal_lm(model).get_output_embeddings()
        modules: list[Any] = [module for group in [*groups_of(model), (head,)] for module in group]
        numbers = sum(sum(module.weight.shape) for module in modules) * rank * (num_places + 1)
        return numbers * int(backbone(model).norm.weight.itemsize)

    @property
    def num_bytes(self) -> int:
        """Device bytes of this stack."""
        return sum(each.numel() * each.itemsize for maps in self.maps.values() for each in (maps.a, maps.b))

    @torch.no_grad()
    def keeps_bits(self) -> bool:
        """Whether a batch of several adapters is bitwise ``project`` with each alone; call it while the stack is
        empty.
        """
        generator = torch.Generator(self.maps[self.head].a.device).manual_seed(0)
        for maps in {tuple(m.weight.shape for m in maps.modules): maps for maps in self.maps.values()}.values():
            if maps.modules == (self.head,):  # the head's log-probs are not from here
                continue
            maps.a.normal_(generator=generator)
            maps.b.normal_(generator=generator)
            maps.scale[1:] = 0.5
            for place in range(1, len(maps.a), 2):  # of half the rank, filled up with zeros
                for lora_a, lora_b in maps.factors(place, self.rank):
                    lora_a[self.rank // 2 :], lora_b[:, self.rank // 2 :] = 0, 0
            for num_rows in (1, 16, 200, 700):
                x = torch.empty(num_rows, maps.a.shape[2], dtype=maps.a.dtype, device=maps.a.device)
                x.normal_(generator=generator)
                index = torch.randint(len(maps.a), (num_rows,), generator=generator, device=x.device).sort()[0]
                mixed = project(x, StackedRows({maps.modules[0]: maps}, index.int()).projections(maps.modules))
                for place in sorted(set(index.tolist())):
                    own, rank = index == place, self.rank // 2 if place % 2 else self.rank
                    pairs = [(a[:rank], b[:, :rank].contiguous()) for a, b in maps.factors(place, self.rank)]
                    lora = Lora(dict(zip(maps.modules, pairs, strict=True)) if place else {}, 0.5)
                    alone = project(x[own], SpanAdapters((int(own.sum()),), (lora,)).projections(maps.modules))
                    if not all(torch.equal(a, b[own]) for a, b in zip(alone, mixed, strict=True)):
                        return False
            for each in maps[1:]:
                each.zero_()
        return True

    def put(self, place: int, lora: Lora) -> None:
        """Copy an adapter, which may be in host memory, to a place, in the model's dtype."""
        cleared, targets, sources = [], [], []
        for maps in self.maps.values():
            maps.scale[place] = lora.scale if any(module in lora.factors for module in maps.modules) else 0.0
            cleared += [maps.a[place], maps.b[place]]
            for module, (a, b) in zip(maps.modules, maps.factors(place, self.rank), strict=True):
                if module in lora.factors:
                    lora_a, lora_b = lora.factors[module]
                    targets += [a[: len(lora_a)], b[:, : len(lora_a)]]
                    sources += [lora_a.detach(), lora_b.detach()]
        with torch.no_grad():
            torch._foreach_zero_(cleared)
            if targets:
                torch._foreach_copy_(targets, sources)
        of_head = lora.factors.get(self.head)
        kept = (
            {} if of_head is None else {self.head: tuple(t.detach().to(self.maps[self.head].a.device) for t in of_head)}
        )
        self.held[place] = Lora(kept, lora.scale)  # type: ignore[arg-type]

    def rows(self, index: Int[Tensor, "T"]) -> "StackedRows":
        """The adapters of rows, from the int32 place of each on the device."""
        return StackedRows(self.maps, index)

    def head_of(self, place: int, head: LMHead) -> LMHead:
        """The LM head under the adapter of a place."""
        return self.held[place].head(head, self.head)

    def add_to_logits(self, hidden: Tensor, index: Int[Tensor, "R"], logits: Tensor) -> None:
        """Add the heads' adapters to the base's float32 logits [R, V]."""
        _, a, b, scale = self.maps[self.head]
        add_rows_own(hidden, a, b, scale, index, [logits], [logits.shape[1]])

    @property
    def facts(self) -> tuple[int, int, int]:
        """Equal as long as captured graphs stay valid."""
        return self.maps[self.head].a.data_ptr(), self.num_places, self.rank


@dataclass(frozen=True)
class StackedRows:
    """An adapter for each row in decoding."""

    maps: Mapping[Any, _Maps]
    index: Int[Tensor, "T"]

    def projections(self, modules: Sequence[Any]) -> list[Projection]:
        """Projections of linear modules that share their input, with ``own``."""
        first, *further = [Projection(module.weight, module.bias) for module in modules]
        maps = self.maps[modules[0]]
        return [first._replace(own=RowsOwn(maps.a, maps.b, maps.scale, self.index)), *further]


RowAdapters = SpanAdapters | StackedRows
"""The adapters of a pass's rows."""


def spans_keep_bits(model: nn.Module) -> bool:
    """Whether this machine's products give each span the bits of its rows alone.

    The shapes of the products are the same; only the place in memory where a span begins differs.
    """
    generator, lengths, ranks = torch.Generator().manual_seed(0), (37, 300, 101), (16, 40, 16)
    starts = [0, *accumulate(lengths)]
    for group in {tuple(module.weight.shape for module in group): group for group in groups_of(model)}.values():
        like = group[0].weight

        def filled(*shape: int, like: Tensor = like, dtype: torch.dtype | None = None) -> Tensor:
            return torch.randn(*shape, generator=generator).to(like.device, dtype or like.dtype)

        x, grads = filled(starts[-1], like.shape[1]), [filled(starts[-1], len(m.weight)) for m in group]
        loras = []
        for rank in ranks:
            shapes = [((rank, m.weight.shape[1]), (len(m.weight), rank)) for m in group]
            pairs = [tuple(filled(*shape, dtype=torch.float32).requires_grad_() for shape in both) for both in shapes]
            loras.append(Lora(dict(zip(group, pairs, strict=True)), 0.5))  # type: ignore[arg-type]

        def gradients(first: int, last: int, group: Any = group, x: Tensor = x, grads: Any = grads) -> list[Tensor]:
            """Of the factors and rows of these spans."""
            rows, own = slice(starts[first], starts[last]), loras[first:last]  # noqa: B023
            given = x[rows].clone().requires_grad_()
            # Times 1, for a kernel gives the backward's thread its CUDA context; torch warns if cuBLAS comes first.
            outs = [
                each * 1.0 for each in project(given, SpanAdapters(lengths[first:last], tuple(own)).projections(group))
            ]
            leaves = [factor for lora in own for pair in lora.factors.values() for factor in pair]
            of_leaves = torch.autograd.grad(outs, [*leaves, given], [grad[rows] for grad in grads])
            return [*of_leaves[:-1], *of_leaves[-1].split(lengths[first:last])]  # type: ignore[no-untyped-call]

        each = [gradients(number, number + 1) for number in range(len(lengths))]
        alone = [*(g for of in each for g in of[:-1]), *(of[-1] for of in each)]
        if not all(torch.equal(a, b) for a, b in zip(alone, gradients(0, len(lengths)), strict=True)):
            return False
    return True


def groups_of(model: nn.Module) -> list[tuple[Any, ...]]:
    """The decoder's linear modules that can be adapted, grouped by the input that they share."""
    found: list[tuple[Any, ...]] = []
    decoder: Any = backbone(model)
    for layer in decoder.layers:
        dense = dense_mlp(mlp_of(layer))
        found += [tuple(inputs_of(layer)), (output_of(layer),)]
        found += [] if dense is None else [tuple(modules_of(dense, GATE_UP)), (dense.down_proj,)]
    return found


def _maps(modules: tuple[Any, ...], num_places: int, rank: int, like: Tensor) -> _Maps:
    columns, length = sum(module.weight.shape[0] for module in modules), modules[0].weight.shape[1]
    options: Any = {"dtype": like.dtype, "device": like.device}
    a = torch.zeros(num_places, len(modules) * rank, length, **options)
    b = torch.zeros(num_places, columns, rank, **options)
    return _Maps(modules, a, b, torch.zeros(num_places, dtype=torch.float32, device=like.device))
