"""Row-invariant linear maps: each row is bitwise the same in every product, by the fastest kernel that ensures it.

``project`` applies several maps to one input (query, key and value; gate and up), each with its bias and its unmerged
LoRA factors. If their weights are adjacent in memory (``lay_end_to_end``), they are one product, and so are their
gradients.

A ``Plan`` for a shape and a device names the kernel for each checked number of rows: cuBLAS, cuBLASLt without split-K,
or a tile of the fixed-order kernel. ``self_check`` picks the fastest of those whose results equal the fixed-order
kernel's bit for bit. Without a self-check a plan has tiles only. Gradients use torch's products.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from logitless.float32_sums import add_product, end_to_end, float32_product, gradient_dtype, sums_in_float32
from logitless.models.kernels.linear import (
    INTERPRETED,
    MOST_RANK,
    Tile,
    add_low_rank,
    fixed_order_product,
    gated_product,
    whole_tiles,
)
from logitless.models.kernels.row_adapters import add_rows_own
from logitless.models.kernels.rows import (
    FEW_ROWS,
    MOST_ROWS,
    checked_count,
    checked_count_below,
    empty_rows,
    power_of_two,
    widened,
)
from logitless.models.one_node import apply, gradients_wanted, refuse_twice

Library = Literal["cublas", "cublaslt"]
Way = Tile | Library
LIBRARIES: tuple[Library, ...] = ("cublas", "cublaslt")

_PLAIN = {  # for any GPU: less than 99 KiB of shared memory each
    16: Tile(16, 32, 128, 4, 4),
    64: Tile(32, 32, 128, 4, 4),
    256: Tile(64, 64, 64, 4, 4),
    MOST_ROWS: Tile(128, 128, 32, 8, 4),
}
_HOPPER = {
    32: Tile(16, 64, 256, 4, 4, swapped=True, tma=True),
    64: Tile(64, 16, 256, 4, 4, tma=True),
    128: Tile(64, 64, 128, 4, 5, tma=True),
    256: Tile(64, 128, 64, 4, 6, tma=True),
    MOST_ROWS: Tile(128, 128, 64, 8, 4, tma=True),
}

NARROW = 64
"""Up to this many columns of a weight, such as LoRA's first factor, one tile takes all."""

_LOW_RANK = Tile(64, 64, 32, 4, 2)
"""For products over a LoRA rank: masked loads, for any length."""

_FLOAT32 = Tile(32, 32, 32, 4, 2)
"""For tests: no tensor core multiplies float32."""


class Shape(NamedTuple):
    """Key of a plan: a product of rows [M, K] with a weight [N, K] on a device.

    With ``gate``, the activation's name, the same kernel turns the halves of the product into ``act(gate) * up``.
    """

    columns: int
    length: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    bias: bool
    device: torch.device
    gate: Literal["", "silu", "gelu"] = ""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> "Shape":
        columns, length = weight.shape
        return cls(columns, length, weight.dtype, out_dtype or weight.dtype, bias is not None, weight.device)

    @property
    def aligned(self) -> bool:
        """Whether rows are multiples of 16 bytes, as TMA needs."""
        return self.length * self.dtype.itemsize % 16 == 0

    @property
    def on_hopper(self) -> bool:
        """Whether Hopper's tiles can be used, which load through TMA."""
        return self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) == (9, 0) and self.aligned


@dataclass
class Plan:
    """The kernels for products of one shape.

    Args:
        tiles: by the largest number of rows they are for.
        ways: library or tile, by checked number of rows; without an entry, the tile of ``tiles``.
    """

    tiles: dict[int, Tile]
    ways: dict[int, Way] = field(default_factory=dict)

    def tile(self, num_rows: int) -> Tile:
        """The fixed-order kernel's tile for this number of rows."""
        way = self.ways.get(num_rows)
        if isinstance(way, Tile):
            return way
        return next(tile for most, tile in self.tiles.items() if num_rows <= most)

    def library(self, num_rows: int) -> Library | None:
        """The library for this checked number of rows, or None for a tile."""
        way = self.ways.get(num_rows)
        return None if isinstance(way, Tile) else way


_plans: dict[Shape, Plan] = {}


def default_tiles(shape: Shape) -> dict[int, Tile]:
    """Tiles for a shape without a self-check."""
    if shape.device.type != "cuda":
        return {MOST_ROWS: INTERPRETED}
    if shape.dtype == torch.float32:
        return {MOST_ROWS: _FLOAT32}
    if shape.columns <= NARROW:
        return {MOST_ROWS: _narrow_tile(shape.columns, shape.on_hopper)}
    return _HOPPER if shape.on_hopper else _PLAIN


def _narrow_tile(columns: int, hopper: bool) -> Tile:
    """A tile for weights of at most 64 columns: deep, because the loop over K takes most of the time."""
    columns = max(16, power_of_two(columns))
    if hopper:
        return Tile(64, columns, 256 if columns <= 32 else 128, 4, 4, tma=True)
    return Tile(16, columns, 128, 2 if columns <= 32 else 4, 4)


def plan_for(shape: Shape) -> Plan:
    """The plan of this shape; tiles only, unless a self-check has set another."""
    plan = _plans.get(shape)
    if plan is None:
        plan = _plans[shape] = Plan(default_tiles(shape))
    return plan


def set_plan(shape: Shape, plan: Plan) -> None:
    """Use this plan for products of this shape."""
    if "cublaslt" in plan.ways.values():
        _meet_the_libraries()  # in an autograd function torch's message would be a warning of Python's
    _plans[shape] = plan


@contextmanager
def _without_split_k() -> Iterator[None]:
    """Make torch use cuBLASLt without split-K inside, in all threads: these are settings of the process.

    A product that another thread launches meanwhile, such as a reward model's beside training, may get another kernel
    and other last bits. Two threads inside would restore each other's settings: one at a time may be.
    """
    # Torch has no setting for a call or a thread. Set for good, gradients and plans with cuBLAS would change too.
    _meet_the_libraries()  # for plans that are being tried
    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction_split_k
    half = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction_split_k
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        matmul.allow_bf16_reduced_precision_reduction = (False, False)
        matmul.allow_fp16_reduced_precision_reduction = (False, False)
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
        matmul.allow_fp16_reduced_precision_reduction = half
        torch.backends.cuda.preferred_blas_library(library)


@cache
def _meet_the_libraries() -> None:
    """Hide the message, which torch prints once a process, that choosing cuBLASLt is experimental."""
    library = torch.backends.cuda.preferred_blas_library()
    with _without_stderr():
        torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.preferred_blas_library(library)


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard what C++ writes to stderr, which Python's warning filters do not see."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def library_product(way: str, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out = rows @ weight.T + bias`` by cuBLAS or by cuBLASLt without a split of K."""
    if way == "cublaslt":
        with _without_split_k():
            library_product("cublas", rows, weight, bias, out)
    elif out.dtype != rows.dtype:
        torch.mm(rows, weight.t(), out_dtype=out.dtype, out=out)
        if bias is not None:
            out += bias
    elif bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def product(
    rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``rows @ weight.T + bias`` [M, N], each row bitwise the same whatever the other rows are.

    Args:
        rows: [M, K] with contiguous rows.
        weight: [N, K] contiguous.
        bias: [N].
        out_dtype: such as float32 for logits; default that of ``rows``.
    """
    num_rows = rows.shape[0]
    shape = Shape.of(weight, bias, out_dtype)
    out = empty_rows(num_rows, shape.columns, like=rows, dtype=shape.out_dtype)
    plan = plan_for(shape)
    start = 0
    while start < num_rows:
        rest = num_rows - start
        x, y = (rows[start:], out[start:]) if start else (rows, out)
        count = checked_count(min(rest, MOST_ROWS))
        wide = widened(x, count)
        if wide is None and rest > FEW_ROWS[-1]:  # no padding rows: the largest checked count, and a tile for the rest
            count = checked_count_below(rest)
            wide = x[:count]
        library = plan.library(count)
        if library is not None and wide is not None:
            wide_out = widened(y, count)
            assert wide_out is not None, "empty_rows allocates padding rows"
            library_product(library, wide, weight, bias, wide_out)
        else:
            count = min(rest, MOST_ROWS)
            fixed_order_product(x[:count], weight, plan.tile(checked_count(count)), bias=bias, out=y[:count])
        start += count
    return out


def gated_product_or_none(rows: Tensor, weight: Tensor, *, gelu: bool) -> Tensor | None:
    """``act(rows @ gate.T) * (rows @ up.T)`` in one kernel if a self-check found that faster, else None.

    Args:
        rows: [M, K] with contiguous rows.
        weight: [2 I, K] contiguous: gate and up end to end.
        gelu: the activation, else SiLU.
    """
    num_rows = rows.shape[0]
    plan = _plans.get(Shape.of(weight, None)._replace(gate="gelu" if gelu else "silu"))
    if plan is None or not 0 < num_rows <= max(plan.ways, default=0):
        return None
    tile = plan.ways.get(checked_count(num_rows))
    return gated_product(rows, weight, tile, gelu=gelu) if isinstance(tile, Tile) else None


class Span(NamedTuple):
    """LoRA of the rows from ``start`` to ``stop``; factors as in ``Projection``, or None without LoRA."""

    start: int
    stop: int
    lora_a: Tensor | None
    lora_b: Tensor | None
    lora_scale: float


class RowsOwn(NamedTuple):
    """LoRA with an adapter for each row, for maps that share their input; see ``row_adapters.add_rows_own``."""

    a: Tensor
    b: Tensor
    scale: Tensor
    adapter: Tensor


class Projection(NamedTuple):
    """One linear map: ``x @ weight.T + bias + lora_scale * (x @ lora_a.T) @ lora_b.T``.

    Args:
        weight: [N, K].
        bias: [N].
        lora_a, lora_b: [R, K] and [N, R]; rounded to the dtype of x, as autocast does.
        lora_scale: a number.
        spans: factors for each span of rows, in place of ``lora_a`` and ``lora_b``; spans cover the rows in order, and
            are the same in all maps of an input.
        own: an adapter for each row, in place of both, without gradients; the first of several maps has it for all.
    """

    weight: Tensor
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    lora_scale: float = 1.0
    spans: tuple[Span, ...] = ()
    own: RowsOwn | None = None

    def spans_of(self, num_rows: int) -> tuple[Span, ...]:
        """``spans``, or one span of all rows."""
        return self.spans or (Span(0, num_rows, self.lora_a, self.lora_b, self.lora_scale),)

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that may need a gradient."""
        of_spans = (each for span in self.spans for each in (span.lora_a, span.lora_b))
        return [each for each in (*self[:4], *of_spans) if each is not None]


def project(x: Tensor, projections: Sequence[Projection], columns: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    """Several projections of the same rows.

    Gradient: to x, weights, biases and LoRA factors, by torch's products; float32 gradients of bfloat16 weights are
        added to ``weight.grad`` by the product (``float32_sums``). With spans these products are of a span each, so
        that its gradients are bitwise those of its rows alone.

    Args:
        x: [T, K].
        projections: in the dtype of x.
        columns: widths into which the output of a single projection is split; default: not split.

    Returns:
        [T, N] each; columns of one tensor if the weights are adjacent in memory.
    """
    tensors, places = [t for projection in projections for t in projection[:2]], list[_Place]()
    if any(projection.spans or projection.lora_a is not None for projection in projections):
        for spans in zip(*(projection.spans_of(len(x)) for projection in projections), strict=True):
            tensors += [t for span in spans for t in (span.lora_a, span.lora_b)]
            places.append((spans[0].start, spans[0].stop, tuple([span.lora_scale for span in spans])))
    outs = apply(_Project, x, len(projections), tuple(places), tuple(columns or ()), *tensors)
    if (own := projections[0].own) is not None:
        assert not gradients_wanted(), "training has spans"
        whole, widths = side_by_side(outs), [projection.weight.shape[0] for projection in projections]
        together = whole is not None and whole_tiles(widths)
        add_rows_own(
            x, own.a, own.b, own.scale, own.adapter, [whole] if whole is not None and together else outs, widths
        )
    return cast(tuple[Tensor, ...], outs)


def project_gated(x: Tensor, projections: Sequence[Projection], *, gelu: bool) -> Tensor | None:
    """``act(gate) * up`` of projections without bias and LoRA, in one kernel; None if that cannot be used.

    Never used with gradients, for which that kernel saves nothing.

    Equals: ``project``, then ``gated``, bit for bit.

    Args:
        x: [T, K].
        projections: gate and up, or one of both.
        gelu: the activation, else SiLU.
    """
    if gradients_wanted() or any(p.bias is not None or p.lora_a is not None or p.spans or p.own for p in projections):
        return None
    weight = end_to_end([projection.weight for projection in projections])
    return None if weight is None else gated_product_or_none(x, weight, gelu=gelu)


def lay_end_to_end(tensors: Sequence[Tensor]) -> None:
    """Move parameters in memory so that they are consecutive rows of one tensor; the parameter objects stay."""
    if len(tensors) < 2 or end_to_end(tensors) is not None:
        return
    whole = torch.cat([t.detach() for t in tensors])
    for tensor, part in zip(tensors, whole.split([len(t) for t in tensors]), strict=True):  # type: ignore[no-untyped-call]
        tensor.data = part


def side_by_side(columns: Sequence[Tensor]) -> Tensor | None:
    """The [T, N] tensor whose consecutive columns these are, or None."""
    first = columns[0]
    if len(columns) == 1:
        return first if first.is_contiguous() else None
    place, width, strides = first.data_ptr(), 0, first.stride()
    if strides[1] != 1:
        return None
    for part in columns:
        if part.data_ptr() != place or part.stride() != strides:
            return None
        place += part.shape[1] * part.itemsize
        width += part.shape[1]
    if width != strides[0]:
        return None
    storage, num_rows = first.untyped_storage(), first.shape[0]
    if first.data_ptr() + num_rows * width * first.itemsize > storage.data_ptr() + storage.nbytes():
        return None
    return first.as_strided((num_rows, width), (width, 1))


_Place = tuple[int, int, tuple[float, ...]]
"""First row of a span, the row behind its last, and the scale of each map."""


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, count: int, spans: tuple[_Place, ...], columns: tuple[int, ...], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = [w for w in tensors[0 : 2 * count : 2] if w is not None], tensors[1 : 2 * count : 2]
        weight, bias = end_to_end(weights), end_to_end(biases)
        outs: tuple[Tensor, ...]
        if weight is not None and (bias is not None or not any(b is not None for b in biases)):
            whole = product(x, weight, bias)
            outs = (whole,) if len(weights) == 1 else whole.split_with_sizes([w.shape[0] for w in weights], 1)
        else:
            outs = tuple(product(x, w, b) for w, b in zip(weights, biases, strict=True))
        low_ranks: list[Tensor | None] = []
        for number, (start, stop, scales) in enumerate(spans, 1):
            factors = tensors[2 * count * number : 2 * count * (number + 1)]
            rows, into = _part(x, start, stop), [_part(out, start, stop) for out in outs]
            low_ranks += _add_low_ranks(into, rows, factors[0::2], factors[1::2], scales)
        ctx.save_for_backward(x, *tensors, *low_ranks)
        ctx.count, ctx.spans = count, spans
        ctx.summed = [w for w in weights if sums_in_float32(w)]
        ctx.bias_dtypes = [None if b is None else gradient_dtype(b) for b in biases]
        ctx.lora_dtypes = [None if t is None else gradient_dtype(t) for t in tensors[2 * count :]]
        return outs[0].split_with_sizes(columns, 1) if columns else outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_twice()
        x, *saved = ctx.saved_tensors
        count, spans = ctx.count, ctx.spans
        weights, factors = saved[0 : 2 * count : 2], saved[2 * count : 2 * count * (len(spans) + 1)]
        low_ranks, needed = saved[2 * count * (len(spans) + 1) :], ctx.needs_input_grad[4:]
        weight, grad = end_to_end(weights), side_by_side(grads)
        if len(grads) > count:  # columns of a single projection
            grad = torch.cat(grads, 1) if grad is None else grad
            grads = (grad,)
        whole = None if weight is None or grad is None else (grad, weight)
        pairs = list(zip(grads, weights, strict=True)) if whole is None else [whole]
        grad_x = _of_input(pairs, spans or ((0, len(x), ()),)) if ctx.needs_input_grad[0] else None
        out: list[Tensor | None] = [None] * len(needed)
        summed = len(ctx.summed) == count
        sizes = [w.shape[0] for w in weights]
        if summed and grad is not None:
            add_product(ctx.summed, grad, x)
        elif whole is not None and all(needed[0 : 2 * count : 2]):
            out[0 : 2 * count : 2] = (whole[0].t() @ x).split_with_sizes(sizes)
        biases, bias_dtype = needed[1 : 2 * count : 2], ctx.bias_dtypes[0]
        if grad is not None and all(biases) and all(dtype == bias_dtype for dtype in ctx.bias_dtypes):
            out[1 : 2 * count : 2] = grad.sum(0, dtype=bias_dtype).split_with_sizes(sizes)
        for i, g in enumerate(grads):
            if summed and grad is None:
                add_product([ctx.summed[i]], g, x)
            elif needed[2 * i] and not summed and out[2 * i] is None:
                out[2 * i] = g.t() @ x
            if biases[i] and out[2 * i + 1] is None:
                out[2 * i + 1] = g.sum(0, dtype=ctx.bias_dtypes[i])
        for i, (a, b, low_rank) in enumerate(zip(factors[0::2], factors[1::2], low_ranks, strict=True)):
            if a is None:
                continue
            start, stop, scales = spans[i // count]
            g, rows = _part(grads[i % count], start, stop), _part(x, start, stop)
            place, scale = 2 * (count + i), scales[i % count]
            back = (g @ b.to(x.dtype)) * scale  # [T, R]
            if grad_x is not None:
                _part(grad_x, start, stop).addmm_(back, a.to(x.dtype))
            if needed[place]:
                out[place] = float32_product(back.t(), rows).to(ctx.lora_dtypes[2 * i])
            if needed[place + 1]:
                out[place + 1] = float32_product(g.t(), low_rank).to(ctx.lora_dtypes[2 * i + 1]) * scale
        return grad_x, None, None, None, *out


def _of_input(pairs: Sequence[tuple[Tensor, Tensor]], spans: Sequence[_Place]) -> Tensor:
    """``sum grad @ weight`` over the pairs, by one product for each span."""
    (grad, weight), *further = pairs
    found = grad.new_empty(len(grad), weight.shape[1])
    for start, stop, _ in spans:
        into = _part(found, start, stop)
        torch.mm(_part(grad, start, stop), weight, out=into)
        for g, w in further:
            into.addmm_(_part(g, start, stop), w)
    return found


def _part(rows: Tensor, start: int, stop: int) -> Tensor:
    """``rows[start:stop]``, without a view of all."""
    return rows if stop - start == rows.shape[0] else rows[start:stop]


def _add_low_ranks(
    outs: Sequence[Tensor], x: Tensor, lora_as: Sequence[Tensor | None], lora_bs: Sequence[Tensor | None],
    scales: Sequence[float],
) -> Sequence[Tensor | None]:  # fmt: skip
    """``out += scale * (x @ lora_a.T) @ lora_b.T`` for projections with LoRA; returns ``x @ lora_a.T`` of each.

    Two products for all if factors and outputs are adjacent in memory, else two for each.
    """
    whole, lora_a, lora_b = side_by_side(outs), end_to_end(lora_as), end_to_end(lora_bs)
    widths = [out.shape[1] for out in outs]
    if whole is not None and lora_a is not None and lora_b is not None:
        rank = lora_b.shape[1]
        if lora_a.shape[0] == rank * len(outs) and rank <= MOST_RANK and len(set(scales)) == 1 and whole_tiles(widths):
            low = product(x, lora_a.to(x.dtype))
            add_low_rank(low, lora_b.to(x.dtype), whole, widths, scales[0])
            return low.split_with_sizes([rank] * len(outs), 1)
    return [
        None if a is None or b is None else _add_low_rank(out, x, a.to(x.dtype), b.to(x.dtype), scale)
        for out, a, b, scale in zip(outs, lora_as, lora_bs, scales, strict=True)
    ]


def _add_low_rank(out: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    low_rank = product(x, lora_a)
    if lora_b.shape[1] <= MOST_RANK:
        add_low_rank(low_rank, lora_b, out, [out.shape[1]], scale)
    else:
        fixed_order_product(low_rank, lora_b, _tile_of_any_length(x), out=out, add_to_out=scale)
    return low_rank


def _tile_of_any_length(x: Tensor) -> Tile:
    return _LOW_RANK if x.is_cuda else INTERPRETED
