"""``logitless bench attention | precision | optimizer | compile | layers | sampling``: the fastest settings here.

Each setting runs the same step of a small model (or of one attention, or of one optimizer). Reported are the median
time after a warm-up, tokens a second and, on a GPU, peak memory; settings that cannot run here are listed with the
reason. ``--quick`` uses a smaller model and fewer steps, and takes under two minutes on a CPU. JSON and a plot are
kept, by default where ``logitless doctor`` finds them, with the recipe lines of the fastest setting.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from logitless.bench.machine import environment, release, write_result
from logitless.bench.recommended import settings_folder
from logitless.errors import LogitlessError
from logitless.models.lm_head import backbone
from logitless.models.loading import compile_layers, load_model
from logitless.rollout.engine import Engine
from logitless.train.optim.optimizer import adamw
from logitless.train.recipe.training import OptimizerSection
from logitless.train.report.plots import bar_plot

PACKAGES = ("triton", "transformers", "torchao")


@dataclass(frozen=True)
class Scale:
    """How large and how long.

    Args:
        warmup, steps: of each contender.
        seconds: after which a contender's steps end.
        width, layers, heads: of the model.
        tokens: of a step.
        length: tokens of a sequence.
        lengths, head_dims: of attention.
        completions, new_tokens: that are sampled.
        rows: completions decoded at once.
    """

    warmup: int
    steps: int
    seconds: float
    width: int
    layers: int
    heads: int
    tokens: int
    length: int
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    completions: int
    new_tokens: int
    rows: tuple[int, ...]


QUICK = Scale(2, 8, 6.0, 128, 2, 2, 512, 128, (128, 512), (64,), 64, 16, (16, 64))
QUICK_ON_GPU = Scale(5, 20, 2.0, 896, 4, 14, 8192, 1024, (2048,), (64, 128), 256, 64, (256,))
FULL = Scale(50, 200, 120.0, 896, 12, 14, 8192, 1024, (512, 2048, 8192), (64, 128), 512, 64, (128, 256, 512))

Step = Callable[[], None]


@dataclass(frozen=True)
class Contender:
    """One setting.

    Args:
        step: makes the step to be timed; raises if the setting cannot run here.
        lines: of a recipe that choose it; empty if a recipe cannot.
        case: what it is measured on, such as a sequence length; contenders are compared within a case.
    """

    name: str
    step: Callable[[], Step]
    lines: tuple[str, ...] = ()
    case: str = ""


@dataclass(frozen=True)
class Timing:
    """A measurement, or why there is none."""

    name: str
    case: str
    seconds: float | None
    tokens_per_second: float | None
    peak_bytes: int | None
    failure: str | None
    lines: tuple[str, ...]


def measured(contender: Contender, scale: Scale, device: str, tokens: int | None) -> Timing:
    """Warm up, then time steps until their number or the seconds are reached.

    Args:
        tokens: of a step; None: no tokens a second.
    """
    release(device)
    try:
        step = contender.step()
        for _ in range(scale.warmup):
            step()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < scale.steps and (not times or time.perf_counter() - began < scale.seconds):
            times.append(_timed(step, device))
    except (RuntimeError, ImportError, LogitlessError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        return Timing(contender.name, contender.case, None, None, None, reason, contender.lines)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    seconds = statistics.median(times)
    rate = None if tokens is None else tokens / seconds
    return Timing(contender.name, contender.case, seconds, rate, peak, None, contender.lines)


def _timed(step: Step, device: str) -> float:
    _synchronize(device)
    began = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# --- what is measured


def _model(scale: Scale, device: str, attention: str = "sdpa") -> nn.Module:
    config = {
        "model_type": "qwen2",
        "vocab_size": 4096,
        "hidden_size": scale.width,
        "intermediate_size": 4 * scale.width,
        "num_hidden_layers": scale.layers,
        "num_attention_heads": scale.heads,
        "num_key_value_heads": scale.heads,
    }
    return load_model(config, random_weights=True, seed=0, device=torch.device(device), attention=attention).train()  # type: ignore[arg-type]


def _training(
    model: nn.Module,
    scale: Scale,
    device: str,
    *,
    autocast: torch.dtype | None = None,
    scaled: bool = False,
    precision: str = "highest",
) -> Step:
    """Forward and backward of the backbone, and AdamW."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4096, (scale.tokens // scale.length, scale.length), generator=generator).to(device)
    optimizer = adamw(model.parameters(), OptimizerSection(), torch.device(device))
    scaler = torch.amp.GradScaler(device, enabled=scaled)
    body: Any = backbone(model)

    def step() -> None:
        torch.set_float32_matmul_precision(precision)
        with torch.autocast(device, dtype=autocast) if autocast is not None else nullcontext():
            loss = body(input_ids=tokens, use_cache=False).last_hidden_state.float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def precision(scale: Scale, device: str) -> Iterator[Contender]:
    """Dtypes of the products."""

    def of(**options: Any) -> Callable[[], Step]:
        return lambda: _training(_model(scale, device), scale, device, **options)

    yield Contender("fp32", of(), ("model.matmul_precision: highest",))
    yield Contender("fp32 + TF32", of(precision="high"), ("model.matmul_precision: high",))
    lines = ("model.autocast: bfloat16", "model.matmul_precision: high")
    yield Contender("bf16 + TF32", of(autocast=torch.bfloat16, precision="high"), lines)
    yield Contender("fp16 + scaler", of(autocast=torch.float16, scaled=True))


def optimizer(scale: Scale, device: str) -> Iterator[Contender]:
    """Implementations of AdamW; the step is the optimizer's alone."""

    def of(make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[], Step]:
        def step() -> Step:
            parameters = list(_model(scale, device).parameters())
            for each in parameters:
                each.grad = torch.ones_like(each)
            return _stepping(make(parameters))

        return step

    def adamw_by(**options: Any) -> Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]:
        return lambda parameters: adamw(parameters, OptimizerSection(**options), torch.device(device))

    for name in ("loop", "foreach", "fused"):
        yield Contender(name, of(adamw_by(implementation=name)), (f"train.optimizer.implementation: {name}",))
    yield Contender("8-bit moments (torchao)", of(adamw_by(moments="8bit")))  # other numbers: not recommended for speed


def _stepping(optimizer: torch.optim.Optimizer) -> Step:
    def step() -> None:
        optimizer.step()

    return step


def compiled(scale: Scale, device: str) -> Iterator[Contender]:
    """Plain and compiled layers."""
    yield Contender("plain", partial(_changed, scale, device), ("model.compile: false",))
    yield Contender("compiled", partial(_changed, scale, device, compile_layers), ("model.compile: true",))


def _changed(scale: Scale, device: str, change: Callable[[nn.Module], object] | None = None) -> Step:
    """A training step of a model, after ``change`` was applied to it."""
    model = _model(scale, device)
    if change is not None:
        change(model)
    return _training(model, scale, device, autocast=_products(device))


def _products(device: str) -> torch.dtype | None:
    """Autocast dtype of benchmarks that compare something else than dtypes."""
    return torch.bfloat16 if device == "cuda" else None


def layers(scale: Scale, device: str) -> Iterator[Contender]:
    """Implementations of norm, rotary embedding and gate."""
    yield Contender("transformers", partial(_changed, scale, device), ("model.layers: transformers",))
    row_invariant = partial(_row_invariant, scale, device) if device == "cuda" else _needs_a_gpu
    yield Contender("row-invariant", row_invariant, ("model.layers: row_invariant",))


def _needs_a_gpu() -> Step:
    raise RuntimeError("its kernels need a CUDA device")


def _row_invariant(scale: Scale, device: str) -> Step:
    """The row-invariant layers, in bfloat16 as they run, over the same tokens packed."""
    from logitless.data.packing import pack
    from logitless.models.lm_head import backbone_hidden
    from logitless.models.row_invariant.layers import install_row_invariant
    from logitless.types import Completion, Prompt

    model = _model(scale, device, "packed").to(torch.bfloat16)
    install_row_invariant(model)
    tokens = torch.randint(4096, (scale.length - 1,), generator=torch.Generator().manual_seed(0)).numpy()
    pair = (Prompt("0", "", np.ones(1, np.int64)), Completion("0", tokens, "", "stop"))
    inputs = pack([pair] * (scale.tokens // scale.length)).to(torch.device(device)).inputs
    optimizer = adamw(model.parameters(), OptimizerSection(), torch.device(device))

    def step() -> None:
        torch.autograd.backward(backbone_hidden(model, inputs).float().square().mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def attention(scale: Scale, device: str) -> Iterator[Contender]:
    """Kernels of causal attention, by length and width of a head; forward and backward of eight heads.

    On a CPU nothing is recommended: there ``packed`` calls the same kernels, a sequence at a time.
    """
    kernels = {
        "sdpa flash": (SDPBackend.FLASH_ATTENTION, "flash"),
        "sdpa efficient": (SDPBackend.EFFICIENT_ATTENTION, "efficient"),
        "sdpa cudnn": (SDPBackend.CUDNN_ATTENTION, "cudnn"),
        "sdpa math": (SDPBackend.MATH, "math"),
    }
    for width in scale.head_dims:
        for length in scale.lengths:
            case = f"{length} tokens, width {width}"
            yield Contender("logitless", partial(_ours, length, width, device), ("model.attention: packed",), case)
            for name, (backend, word) in kernels.items():
                lines = ("model.attention: sdpa", f"model.sdpa_backends: [{word}]") if device == "cuda" else ()
                yield Contender(name, partial(_sdpa, backend, length, width, device), lines, case)
            yield Contender("flex", partial(_flex, length, width, device), ("model.attention: flex_attention",), case)


_HEADS = 8


def _operands(length: int, width: int, device: str, *, packed: bool) -> list[Tensor]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = (length, _HEADS, width) if packed else (1, _HEADS, length, width)
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, device=device, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def _sdpa(backend: SDPBackend, length: int, width: int, device: str) -> Step:
    if backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION) and device != "cuda":
        _needs_a_gpu()
    leaves = _operands(length, width, device, packed=False)
    query, key, value = leaves

    def step() -> None:
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out.sum(), leaves)

    return step


def _flex(length: int, width: int, device: str) -> Step:
    if device != "cuda":
        _needs_a_gpu()
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    leaves = _operands(length, width, device, packed=False)

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    mask = create_block_mask(seen, None, None, length, length, device=device)
    attend: Any = torch.compile(flex_attention, dynamic=False)
    query, key, value = leaves

    def step() -> None:
        torch.autograd.grad(attend(query, key, value, block_mask=mask).sum(), leaves)

    return step


def _ours(length: int, width: int, device: str) -> Step:
    if importlib.util.find_spec("triton") is None or device != "cuda":
        _needs_a_gpu()
    from logitless.models.attention import AttentionLayout, prefix_attention
    from logitless.types import PromptGroup

    leaves = _operands(length, width, device, packed=True)
    layout, _ = AttentionLayout([PromptGroup(0, (length,))], device).unshared()

    def step() -> None:
        out = prefix_attention(leaves[0], leaves[1], leaves[2], layout)[0]
        torch.autograd.grad(out.float().sum(), leaves)

    return step


def sampling(scale: Scale, device: str) -> Iterator[Contender]:
    """Engines, and how many completions each decodes at once; a step samples completions of one length.

    ``auto`` already chooses the engine, so only ``rollout.max_rows`` is recommended, for that engine.
    """
    for name, make, chosen in (("transformers", _transformers, device != "cuda"), ("gpu", _gpu, device == "cuda")):
        for rows in scale.rows:
            lines = (f"rollout.max_rows: {rows}",) if chosen else ()
            yield Contender(f"{name}, {rows} rows", partial(make, rows, scale, device), lines)


def _gpu(rows: int, scale: Scale, device: str) -> Step:
    if device != "cuda":
        _needs_a_gpu()
    from logitless.rollout.gpu.engine import GpuEngine

    model = _model(scale, device, "packed").to(torch.bfloat16)
    return _drawing(GpuEngine(model, _tokenizer(), max_rows=rows), scale)


def _transformers(rows: int, scale: Scale, device: str) -> Step:
    from logitless.rollout.transformers import TransformersEngine

    model = _model(scale, device).to(_products(device) or torch.float32)
    return _drawing(TransformersEngine(model, _tokenizer(), max_rows=rows), scale)


def _tokenizer() -> Any:
    from logitless.models.char_tokenizer import character_tokenizer

    return character_tokenizer("abcdefgh")


def _drawing(engine: Engine, scale: Scale) -> Step:
    """Eight completions of each prompt, all of ``scale.new_tokens`` tokens."""
    from logitless.rollout.sampling import SamplingOptions
    from logitless.types import Prompt

    options = SamplingOptions(max_new_tokens=scale.new_tokens, min_new_tokens=scale.new_tokens)
    prompts = [Prompt(str(number), "", np.full(64, 3)) for number in range(scale.completions // 8)]

    def step() -> None:
        engine.sample(prompts, 8, options, seed=0)

    return step


# --- the command


@dataclass(frozen=True)
class SettingBenchmark:
    """A benchmark as a subcommand.

    Args:
        tokens: of a step; None for an optimizer's.
        steps: forward passes in one timed step, by which warm-up and number of steps are divided.
        only: recipes that the fastest lines are for, if not for each.
    """

    name: str
    contenders: Callable[[Scale, str], Iterator[Contender]]
    only: str = ""
    tokens: Callable[[Scale], int | None] = field(default=lambda scale: scale.tokens)
    steps: Callable[[Scale], int] = field(default=lambda _: 1)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of every benchmark."""
        parser.add_argument("--quick", action="store_true", help="a small model and few steps, for a look")
        parser.add_argument("--warmup", type=int, help="steps before the timed ones")
        parser.add_argument("--steps", type=int, help="timed steps of each contender")
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
        parser.add_argument("--out", type=Path, default=settings_folder(), help="folder of the results")

    def run(self, options: argparse.Namespace) -> int:
        """Measure every contender, print the table, keep JSON and plot."""
        given = {key: value for key in ("warmup", "steps") if (value := getattr(options, key)) is not None}
        quick = QUICK_ON_GPU if options.device == "cuda" else QUICK
        scale = Scale(**{**asdict(quick if options.quick else FULL), **given})
        whole = self.steps(scale)
        scale = replace(scale, warmup=-(-scale.warmup // whole), steps=max(1, -(-scale.steps // whole)))
        before, rows = torch.get_float32_matmul_precision(), []
        try:
            for contender in self.contenders(scale, options.device):
                tokens = int(contender.case.split()[0]) if contender.case else self.tokens(scale)
                rows.append(measured(contender, scale, options.device, tokens))
                print(_line(rows[-1]), flush=True)
        finally:
            torch.set_float32_matmul_precision(before)
        recommended = best_lines(rows)
        options.out.mkdir(parents=True, exist_ok=True)
        document = {
            "environment": environment(options.device, PACKAGES),
            "quick": options.quick,
            "scale": asdict(scale),
            "rows": [asdict(row) for row in rows],
            "recommended": recommended,
        }
        write_result(options.out / f"{self.name}.json", document)
        times = {_label(row): 1000 * row.seconds for row in rows if row.seconds is not None}
        (options.out / f"{self.name}.svg").write_text(bar_plot(times, x_label="milliseconds a step"))
        print(f"\nin a recipe on this machine{self.only}:", *(recommended or ["nothing to choose"]), sep="\n  ")
        print(f"kept: {options.out / self.name}.json, .svg")
        return 0


NEAR = 0.05
"""Times that differ by less count as equal: medians of repeated runs differ as much."""


def best_lines(rows: Sequence[Timing]) -> list[str]:
    """Recipe lines of the fastest setting, of the last case with several to choose from.

    Of the settings within ``NEAR`` of the fastest, the first one is taken: contenders are listed from the simplest on.

    Example:
        >>> row = Timing("a", "", 1.0, 10.0, None, None, ("model.compile: true",))
        >>> best_lines([row, Timing("b", "", 2.0, 5.0, None, None, ("model.compile: false",))])
        ['model.compile: true']
    """
    lines: tuple[str, ...] = ()
    for case in dict.fromkeys(row.case for row in rows):
        there = [row for row in rows if row.case == case and row.seconds is not None and row.lines]
        if len(there) > 1:  # else there is nothing to choose
            fastest = min(row.seconds or 0.0 for row in there)
            lines = next(row.lines for row in there if (row.seconds or 0.0) <= (1 + NEAR) * fastest)
    return list(lines)


def _label(row: Timing) -> str:
    return f"{row.case}: {row.name}" if row.case else row.name


def _line(row: Timing) -> str:
    if row.seconds is None:
        return f"{_label(row):44s} not run: {row.failure}"
    peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:8.2f} GiB"
    rate = "" if row.tokens_per_second is None else f"{row.tokens_per_second:12,.0f} tokens/s"
    return f"{_label(row):44s} {1000 * row.seconds:10.3f} ms {rate} {peak}".rstrip()


_OTHER_LAYERS = (
    " with model.layers: transformers (these lines rule out row-invariant layers; see `logitless bench layers`)"
)

ATTENTION = SettingBenchmark("attention", attention, _OTHER_LAYERS)
COMPILE = SettingBenchmark("compile", compiled, _OTHER_LAYERS)
LAYERS = SettingBenchmark("layers", layers)
OPTIMIZER = SettingBenchmark("optimizer", optimizer, tokens=lambda _: None)
PRECISION = SettingBenchmark("precision", precision, _OTHER_LAYERS)
SAMPLING = SettingBenchmark(
    "sampling",
    sampling,
    tokens=lambda scale: scale.completions * scale.new_tokens,
    steps=lambda scale: scale.new_tokens,
)
