"""Find the kernels to use on this machine: the fastest that are bitwise identical to the fixed-order kernel.

It is an observation that tensor cores sum in the same order for every tile, and that a library does not split K at some
number of rows. A new GPU, driver or library may break it, so it is checked bit for bit on the shapes of a model:

- cuBLAS and tiles against the fixed-order kernel, at every checked number of rows;
- tiles of a mixture's experts against each other;
- decoded and prefilled attention and gated delta nets against the packed row's; of attention also the float32
  log-sum-exp, which shows a difference a thousand times as often.

Kernels that differ are not used. Findings are cached on disk by device, driver and versions.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import triton
from pydantic import TypeAdapter
from torch import Tensor, nn

from logitless.float32_sums import end_to_end
from logitless.graph_capture import captured, side_stream
from logitless.installed import gpu_driver
from logitless.models import attention
from logitless.models.kernels.compiling import Compiling
from logitless.models.kernels.gate import gated
from logitless.models.kernels.linear import REFERENCE, Tile, asks_ahead, fixed_order_product, gated_product
from logitless.models.kernels.rotary import Heads
from logitless.models.kernels.rows import CHECKED_ROWS, FEW_ROWS
from logitless.models.kernels.window import Chunks
from logitless.models.lm_head import _split_lora, backbone, causal_lm
from logitless.models.row_invariant import (
    attention_check,
    delta_check,
    delta_net,
    experts_check,
    linear,
    paged_attention,
)
from logitless.models.row_invariant.attention_check import AttentionProblem
from logitless.models.row_invariant.coverage import (
    GATE_UP,
    dense_mlp,
    gates_of_shared,
    inputs_of,
    linear_of,
    mlp_of,
    modules_of,
    output_of,
)
from logitless.models.row_invariant.delta_check import DeltaProblem, delta_name
from logitless.models.row_invariant.delta_net import DeltaForm
from logitless.models.row_invariant.experts import experts_of, router_of
from logitless.models.row_invariant.experts_check import ExpertsProblem
from logitless.models.row_invariant.layers import AttentionForm
from logitless.models.row_invariant.linear import (
    LIBRARIES,
    NARROW,
    Library,
    Plan,
    Shape,
    Way,
    default_tiles,
    library_product,
    product,
    set_plan,
)

_GATED = {  # by rows: gate and up in one kernel
    32: Tile(16, 32, 128, 2, 3, tma=True),
    64: Tile(64, 32, 64, 4, 4, tma=True),
}
_WORTH = 0.98  # another kernel must take less than this fraction of cuBLAS's time


@dataclass
class LinearFinding:
    """Findings for one shape.

    Args:
        ways: name of the kernel used, by number of rows.
        failed: row counts at which a kernel differs, by its name.
        microseconds: by number of rows and name, if times were compared.
    """

    ways: dict[int, str] = field(default_factory=dict)
    failed: dict[str, list[int]] = field(default_factory=dict)
    microseconds: dict[int, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """Cached results for one shape."""

    plan: Plan
    finding: LinearFinding


_KNOWN = TypeAdapter(Known)


@dataclass
class Report:
    """Findings for a model on a machine.

    Args:
        machine: device, driver and versions.
        linear: by shape, in words.
        attention: count of numbers that differ from the packed row's, by form and kernel, in words, of attention and
            gated delta nets; unless all are 0, they are not row-invariant here.
        experts: count of numbers that differ between tiles, likewise.
        seconds: duration; about 0 if everything was cached.
    """

    machine: dict[str, str]
    linear: dict[str, LinearFinding] = field(default_factory=dict)
    attention: dict[str, dict[str, int]] = field(default_factory=dict)
    experts: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether attention and experts are row-invariant here; products are by construction."""
        found = (*self.attention.values(), *self.experts.values())
        return not any(count for counts in found for count in counts.values())


def self_check(model: nn.Module, *, folder: Path | None = None, beside: Callable[[], object] | None = None) -> Report:
    """Check the kernels that a model with row-invariant layers will run on its GPU, and plan its products.

    Args:
        model: on CUDA, after ``install_row_invariant``.
        folder: of cached findings; default ``logitless`` in the user's cache.
        beside: launches further kernels to be compiled at the same time (as inside ``compiled_together``).

    Returns:
        The findings; the plans are set.
    """
    decoder: Any = backbone(model)
    weight = decoder.norm.weight
    shapes, forms, experts = product_shapes(model), _forms(decoder), _experts(decoder)
    return check_shapes(shapes, forms, weight.dtype, weight.device, experts=experts, folder=folder, beside=beside)


def check_layer(device: torch.device) -> Report:
    """``self_check`` of one layer of Llama-3.1-8B in bfloat16, to test a machine without a model."""
    columns_and_lengths = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    dtype = torch.bfloat16
    shapes = [(Shape(n, k, dtype, dtype, False, device), False) for n, k in columns_and_lengths]
    form = AttentionForm(Heads(32, 8, 128, 128), 128**-0.5, None, None, "")
    return check_shapes(shapes, [form], dtype, device)


def rows_in_words(counts: Sequence[int]) -> str:
    """The first few of some row counts.

    Example:
        >>> rows_in_words([1, 16]), rows_in_words(range(8))
        ('1, 16', '0, 1, 2, 3, 4, 5 and 2 more')
    """
    shown = ", ".join(map(str, counts[:6]))
    return shown if len(counts) <= 6 else f"{shown} and {len(counts) - 6} more"


def check_shapes(
    shapes: Sequence[tuple[Shape, bool]], forms: Sequence[AttentionForm | DeltaForm], dtype: torch.dtype,
    device: torch.device, *, experts: Sequence[ExpertsProblem] = (), folder: Path | None = None,
    beside: Callable[[], object] | None = None,
) -> Report:  # fmt: skip
    """``self_check`` of (product shape, whether it only has few rows) pairs, forms of layers, and experts."""
    path = _known_path(folder, device)
    known, report, start = _read(path), Report(machine(device)), time.perf_counter()
    plans, attended, mixed = (known.setdefault(kind, {}) for kind in ("linear", "attention", "experts"))
    named_forms = {form_name(form, dtype): form for form in forms}
    problems = {name: _problem(form, dtype, device) for name, form in named_forms.items() if name not in attended}
    mixtures = {each.name: each for each in experts if each.name not in mixed}
    unknown = [shape for shape, _ in shapes if shape_name(shape) not in plans]
    launches = [each.launched for each in (*problems.values(), *mixtures.values())]
    groups = launches, compilations(unknown), [] if beside is None else [beside]
    current = torch.cuda.device(device if device.type == "cuda" else -1)
    with current, _compiled(device, *groups) as (problems_compiled, products_compiled, _):
        products_compiled()  # attention compiles longest: products are checked meanwhile
        for shape, few_only in shapes:
            name = shape_name(shape)
            if name not in plans:
                found = check_gated(shape) if shape.gate else check_linear(shape, few_only=few_only)
                plans[name] = _KNOWN.dump_python(Known(*found))
            known_shape = _KNOWN.validate_python(plans[name])
            set_plan(shape, known_shape.plan)
            report.linear[name] = known_shape.finding
        problems_compiled()
        attended.update({name: problem.differences() for name, problem in problems.items()})
        mixed.update({name: problem.differences() for name, problem in mixtures.items()})
    report.attention = {name: attended[name] for name in named_forms}
    report.experts = {each.name: mixed[each.name] for each in experts}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    report.seconds = time.perf_counter() - start
    _write(path, known)
    return report


@contextmanager
def _compiled(device: torch.device, *groups: Sequence[Callable[[], object]]) -> Iterator[list[Callable[[], None]]]:
    """Compile what groups of calls launch, in threads; yields for each group a function that waits for its kernels.

    Waits for all at the end. Does nothing on a CPU, whose interpreter compiles nothing.
    """
    if device.type != "cuda" or not any(groups):
        yield [lambda: None] * len(groups)
        return
    with Compiling(device) as compiling:
        yield [compiling.begin(calls) for calls in groups]


def _problem(
    form: AttentionForm | DeltaForm, dtype: torch.dtype, device: torch.device
) -> AttentionProblem | DeltaProblem:
    if isinstance(form, DeltaForm):
        return DeltaProblem.of(form, dtype, device)
    return AttentionProblem.of(form, dtype, device)


def _forms(decoder: Any) -> list[AttentionForm | DeltaForm]:
    return list(dict.fromkeys(layer.row_invariant_form for layer in decoder.layers))


def _experts(decoder: Any) -> list[ExpertsProblem]:
    found = dict[ExpertsProblem, None]()
    for layer in decoder.layers:
        form = layer.row_invariant_mixture
        if form is not None:
            down = experts_of(mlp_of(layer))[0].down_proj
            inner, width = down.shape[1:] if form.transposed else reversed(down.shape[1:])
            found[ExpertsProblem(width, inner, form.act, form.transposed, down.dtype, down.device)] = None
    return list(found)


def machine(device: torch.device) -> dict[str, str]:
    """The device, driver and versions that cached findings depend on."""
    sources = b"".join(
        Path(m.__file__ or "").read_bytes()
        for m in (linear, attention, paged_attention, attention_check, experts_check, delta_net, delta_check)
    )
    kernels = Path(__file__).parents[1] / "kernels"
    sources += b"".join(path.read_bytes() for path in sorted(kernels.glob("*.py"))) + Path(__file__).read_bytes()
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": str(gpu_driver()),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        "source": hashlib.sha256(sources).hexdigest()[:12],
    }


def product_shapes(model: nn.Module) -> list[tuple[Shape, bool]]:
    """Distinct shapes of a model's products, and whether each only has few rows (logits while decoding)."""
    decoder: Any = backbone(model)
    found: dict[Shape, bool] = {}
    for layer in decoder.layers:
        for modules in (inputs_of(layer), [output_of(layer)]):
            _add_shapes(found, modules)
        mlp = mlp_of(layer)
        if (router := router_of(mlp)) is not None:
            out_dtype = torch.float32 if layer.row_invariant_mixture.float32_router else None
            found.setdefault(Shape.of(router.weight, getattr(router, "bias", None), out_dtype), False)
        if (dense := dense_mlp(mlp)) is not None:
            for modules in (
                modules_of(dense, GATE_UP),
                [dense.down_proj],
                *([each] for each in gates_of_shared(mlp)),
            ):
                _add_shapes(found, modules)
            _add_gated_shape(found, dense, gelu=layer.row_invariant_gelu)
    head = causal_lm(model).get_output_embeddings()
    weight = getattr(getattr(head, "base_layer", head), "weight", None)
    if weight is not None:
        found[Shape.of(weight, None, torch.float32)] = True
    return list(found.items())


def _add_shapes(found: dict[Shape, bool], modules: Sequence[Any]) -> None:
    """Add the shapes of the products of one input."""
    linears = [linear_of(module) for module in modules]
    weight, bias = end_to_end([m.weight for m in linears]), end_to_end([m.bias for m in linears])
    whole = weight is not None and (bias is not None) == any(m.bias is not None for m in linears)
    for w, b in [(weight, bias)] if whole and weight is not None else [(m.weight, m.bias) for m in linears]:
        found.setdefault(Shape.of(w, b), False)
    factors = [None if lora is None else lora[0] for _, lora in map(_split_lora, modules)]
    ranks = [factor.shape[0] for factor in factors if factor is not None]
    for columns in dict.fromkeys((sum(ranks), *ranks)) if ranks else ():  # together, and each by itself
        base = linears[0].weight
        found.setdefault(Shape(columns, base.shape[1], base.dtype, base.dtype, False, base.device), True)


def _add_gated_shape(found: dict[Shape, bool], mlp: Any, *, gelu: bool) -> None:
    """Add the shape of gate and up in one kernel, if there is neither a bias nor an adapter."""
    modules = modules_of(mlp, GATE_UP)
    if all(type(module) is nn.Linear and module.bias is None for module in modules):
        weight = end_to_end([module.weight for module in modules])
        shape = None if weight is None else Shape.of(weight, None)
        if shape is not None and shape in found and shape.columns % 2 == 0:
            found.setdefault(shape._replace(gate="gelu" if gelu else "silu"), True)


# --- products ---------------------------------------------------------------------------------------------------------


def check_linear(shape: Shape, *, few_only: bool = False) -> tuple[Plan, LinearFinding]:
    """The fastest kernels that equal the reference bit for bit, by checked number of rows.

    Args:
        shape: of the product.
        few_only: use tiles for counts above 512.
    """
    finding = LinearFinding()
    plan = Plan(default_tiles(shape))
    if shape.device.type != "cuda" or shape.dtype == torch.float32:
        return plan, finding  # one tile, whatever the number of rows
    counts = FEW_ROWS if few_only else CHECKED_ROWS
    rows, weight, bias = cancelling_operands(shape, counts[-1])
    reference = fixed_order_product(rows, weight, REFERENCE, bias=bias, dtype=shape.out_dtype)
    plan.tiles = {
        most: tile if _tile_serves(tile, rows, weight, bias, reference, min(most, 512), finding) else REFERENCE
        for most, tile in plan.tiles.items()
    }
    if shape.columns <= NARROW:
        finding.ways = {count: way_name(plan.tile(count)) for count in counts}
        return plan, finding
    out = torch.empty_like(reference)
    libraries = LIBRARIES if shape.out_dtype == shape.dtype else LIBRARIES[:1]
    for library in libraries:
        _look_at(library, counts, rows, weight, bias, out, reference, plan, finding)
    weights = _copies(weight)
    for count in FEW_ROWS:
        candidates: list[Way] = [library for library in libraries if count not in finding.failed.get(library, ())]
        if _tile_serves(tile := plan.tile(count), rows, weight, bias, reference, count, finding):
            candidates.append(tile)
        times = {
            way: _microseconds(_call(way, rows[:count], bias, out[:count]), weights, 4 if few_only else 12)
            for way in candidates
        }
        finding.microseconds[count] = {way_name(way): round(us, 2) for way, us in times.items()}
        usual, best = next(iter(times)), min(times, key=lambda way: times[way])
        plan.ways[count] = best if times[best] < _WORTH * times[usual] else usual
    finding.ways = {count: way_name(plan.ways.get(count) or plan.tile(count)) for count in counts}
    return plan, finding


def cancelling_operands(shape: Shape, num_rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows, weight and bias whose products are 0 but for rounding, so that these show the order of the sums.

    Of random operands another order changes one 16-bit number in some ten thousand, and the product of one row with a
    small weight has a few hundred. Of these it changes nearly every number: what is left of the sums is their rounding,
    and a bias of that size does not hide it.

    Example:
        >>> shape = Shape(3, 8, torch.bfloat16, torch.bfloat16, False, torch.device("cpu"))
        >>> rows, weight, _ = cancelling_operands(shape, 2)
        >>> (rows.double() @ weight.double().T).abs().max().item()
        0.0
    """
    half, generator = shape.length // 2, torch.Generator(shape.device).manual_seed(shape.columns + shape.length)
    options: dict[str, Any] = {"device": shape.device, "generator": generator}
    order = torch.randperm(half, **options)
    powers = torch.tensor([2.0**n for n in range(-3, 4)], dtype=shape.dtype, device=shape.device)
    uneven = powers[torch.randint(len(powers), (half,), **options)]

    def in_halves(count: int, factors: Tensor | float, sign: int) -> Tensor:
        made = torch.zeros(count, shape.length, dtype=shape.dtype, device=shape.device)
        # times 64, so that the rounding of a sum is a normal number of float16 too
        made[:, :half] = torch.randn(count, half, dtype=shape.dtype, **options) * (64 * factors)
        made[:, half : 2 * half] = sign * made[:, order]
        return made

    rows, weight = in_halves(num_rows, uneven, -1), in_halves(shape.columns, 1.0, 1)
    bias = torch.randn(shape.columns, dtype=shape.dtype, **options) / 64 if shape.bias else None
    return rows, weight, bias


def check_gated(shape: Shape) -> tuple[Plan, LinearFinding]:
    """Numbers of rows at which one kernel for product and gate is faster than two, and bitwise equal to them.

    The plan of the shape without a gate must exist.
    """
    finding, plan = LinearFinding(), Plan({})
    if not shape.on_hopper or shape.dtype == torch.float32:
        return plan, finding
    generator = torch.Generator(shape.device).manual_seed(shape.columns + shape.length)
    options: dict[str, Any] = {"device": shape.device, "dtype": shape.dtype, "generator": generator}
    weight = torch.randn(shape.columns, shape.length, **options) * shape.length**-0.5
    rows, width, gelu = torch.randn(max(_GATED), shape.length, **options), shape.columns // 2, shape.gate == "gelu"
    weights = _copies(weight)

    def apart(rows: Tensor, weight: Tensor) -> Tensor:
        both = product(rows, weight)
        return gated(both[:, :width], both[:, width:], gelu=gelu)

    expected = apart(rows, weight)
    for count in (count for count in FEW_ROWS if count <= max(_GATED)):
        tile, some = next(tile for most, tile in _GATED.items() if count <= most), rows[:count]
        if bool(_differs(gated_product(some, weight, tile, gelu=gelu), expected[:count])):
            finding.failed.setdefault(way_name(tile), []).append(count)
            continue
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "apart": partial(apart, some),
            way_name(tile): partial(gated_product, some, tile=tile, gelu=gelu),
        }
        times = {name: _microseconds(call, weights, 12) for name, call in ways.items()}
        finding.microseconds[count] = {name: round(us, 2) for name, us in times.items()}
        if times[way_name(tile)] < times["apart"]:
            plan.ways[count] = tile
    finding.ways = {count: way_name(plan.ways[count]) if count in plan.ways else "apart" for count in FEW_ROWS}
    return plan, finding


def _look_at(
    library: Library, counts: Sequence[int], rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor,
    reference: Tensor, plan: Plan, finding: LinearFinding,
) -> None:  # fmt: skip
    """Record where a library differs from the reference; elsewhere plan it, if nothing is planned yet.

    With many rows no times are compared, so the first library that agrees is used.
    """
    wanted = [count for count in counts if count <= FEW_ROWS[-1] or count not in plan.ways]
    flags = []
    for count in wanted:
        library_product(library, rows[:count], weight, bias, out[:count])
        flags.append(_differs(out[:count], reference[:count]))
    differs = torch.stack(flags).tolist() if flags else []
    bad = [count for count, flag in zip(wanted, differs, strict=True) if flag]
    if bad:
        finding.failed[library] = bad
    for count in wanted:
        if count not in bad:
            plan.ways.setdefault(count, library)


def _tile_serves(
    tile: Tile, rows: Tensor, weight: Tensor, bias: Tensor | None, reference: Tensor, count: int,
    finding: LinearFinding,
) -> bool:  # fmt: skip
    """Whether a tile runs here and equals the reference bit for bit in the first ``count`` rows."""
    out = _try(tile, rows[:count], weight, bias, reference.dtype)
    if out is None:
        finding.failed.setdefault(f"{way_name(tile)} (does not fit)", []).append(count)
        return False
    if bool(_differs(out, reference[:count])):
        finding.failed.setdefault(way_name(tile), []).append(count)
        return False
    return True


def _try(
    tile: Tile, rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, ahead: bool | None = None
) -> Tensor | None:
    """The product by this tile; None if the tile needs more resources than this GPU has."""
    try:
        return fixed_order_product(rows, weight, tile, bias=bias, dtype=dtype, ahead=ahead)
    except Exception as error:
        if "out of resource" not in str(error).lower() and "OutOfResources" not in type(error).__name__:
            raise
        return None


def compilations(shapes: Sequence[Shape]) -> list[Callable[[], None]]:
    """For each kernel that a check of these shapes will run, a call that runs it once, and so compiles it."""
    found: dict[Any, Callable[[], None]] = {}
    for shape in shapes:
        if shape.dtype == torch.float32:
            continue  # has one tile, whatever the number of rows
        if shape.gate:
            if shape.on_hopper:
                for tile in _GATED.values():
                    kind = shape.gate, shape.columns % 32 == 0, shape.length % 16 == 0
                    found.setdefault((tile, shape.dtype, *kind, _asks(tile, shape)), partial(_run_gated, tile, shape))
            continue
        multiples = shape.columns % 16 == 0, shape.length % 16 == 0
        for tile in {REFERENCE, *default_tiles(shape).values()}:
            even = shape.length % tile.depth == 0
            specialized = (tile, shape.dtype, shape.out_dtype, shape.bias, *multiples, even, _asks(tile, shape))
            found.setdefault(specialized, partial(_run_once, tile, shape))
    return list(found.values())


def _asks(tile: Tile, shape: Shape) -> bool:
    return asks_ahead(tile, shape.columns, shape.length, shape.dtype.itemsize)


def _run_once(tile: Tile, shape: Shape) -> None:
    columns = min(shape.columns, 256 + shape.columns % 16)  # few of them run the same kernel
    weight = torch.empty(columns, shape.length, dtype=shape.dtype, device=shape.device)
    bias = weight.new_empty(columns) if shape.bias else None
    _try(tile, weight.new_empty(16, shape.length), weight, bias, shape.out_dtype, ahead=_asks(tile, shape))


def _run_gated(tile: Tile, shape: Shape) -> None:
    width = 128 + shape.columns // 2 % 16
    weight = torch.empty(2 * width, shape.length, dtype=shape.dtype, device=shape.device)
    gelu = shape.gate == "gelu"
    gated_product(weight[:16], weight, tile, gelu=gelu, ahead=_asks(tile, shape))
    both = weight.new_empty(16, shape.columns)
    gated(both[:, : shape.columns // 2], both[:, shape.columns // 2 :], gelu=gelu)


def _call(way: Way, rows: Tensor, bias: Tensor | None, out: Tensor) -> Callable[[Tensor], object]:
    if isinstance(way, Tile):
        return lambda weight: fixed_order_product(rows, weight, way, bias=bias, out=out)
    return lambda weight: library_product(way, rows, weight, bias, out)


def _copies(weight: Tensor) -> list[Tensor]:
    """As many copies as exceed the L2 cache, as a model's weights do."""
    return [weight, *(weight.clone() for _ in range(min(40, int(120e6 // weight.nbytes))))]


def _microseconds(call: Callable[[Tensor], object], weights: Sequence[Tensor], calls: int) -> float:
    """Time of one call: the minimum of three replays of a CUDA graph of several calls."""
    turn: Iterator[Tensor] = cycle(weights)
    stream, graph = side_stream(weights[0].device), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call(next(turn))
        torch.cuda.synchronize()
        with captured(graph):
            for _ in range(calls):
                call(next(turn))
    best = float("inf")
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / calls * 1e3)
    return best


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Whether any bit differs, as a tensor on the device."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return (a.view(kind) != b.view(kind)).any()


# --- names and the file of findings -----------------------------------------------------------------------------------


def way_name(way: Way) -> str:
    """The name of a kernel in reports.

    Example:
        >>> way_name(Tile(16, 64, 128, 4, 6, swapped=True, tma=True)), way_name("cublas")
        ('16x64x128 w4 s6 swapped tma', 'cublas')
    """
    if isinstance(way, str):
        return way
    words = [f"{way.rows}x{way.columns}x{way.depth} w{way.warps} s{way.stages}"]
    return " ".join(words + ["swapped"] * way.swapped + ["tma"] * way.tma)


def shape_name(shape: Shape) -> str:
    """The name of a shape in reports.

    Example:
        >>> shape_name(Shape(1152, 896, torch.bfloat16, torch.bfloat16, True, torch.device("cpu")))
        '896 -> 1152 bfloat16, bias'
    """
    name = f"{shape.length} -> {shape.columns} {str(shape.dtype).removeprefix('torch.')}"
    if shape.out_dtype != shape.dtype:
        name += f" to {str(shape.out_dtype).removeprefix('torch.')}"
    if shape.gate:
        name += f", {shape.gate} gate"
    return name + (", bias" if shape.bias else "")


def form_name(form: AttentionForm | DeltaForm, dtype: torch.dtype) -> str:
    if isinstance(form, DeltaForm):
        return delta_name(form, dtype)
    heads = form.heads
    name = f"{heads.query} heads, {heads.key} of keys, {heads.width} wide, {str(dtype).removeprefix('torch.')}"
    if form.window is not None:
        name += f", chunks of {form.window.length}" if isinstance(form.window, Chunks) else f", window {form.window}"
    return name if form.softcap is None else f"{name}, softcap {form.softcap:g}"


def _known_path(folder: Path | None, device: torch.device) -> Path:
    if folder is None:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "logitless"
    facts = machine(device)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"self-check-{digest}.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _write(path: Path, known: Mapping[str, Any]) -> None:
    """Write atomically; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.tmp")
        part.write_text(json.dumps(known, indent=1))
        part.replace(path)
    except OSError:
        return
