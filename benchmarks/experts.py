"""One layer's mixture of experts: bits of its rows, and its time beside transformers' grouped products.

    python benchmarks/experts.py                                  # results/experts-GPU.json, on a GPU
    python benchmarks/experts.py --models tiny --device cpu       # tries the script itself
    python benchmarks/experts.py --search                         # times other tiles, and writes nothing
    python benchmarks/experts.py --table [--check]                # the tables of docs/bits.md

Bits: router logits, chosen experts and outputs of tokens in a packed row, against the same tokens in other numbers of
rows and another order. Time: the forward pass and forward and backward of a packed row; a decoding step, in a CUDA
graph, against the time that the memory takes to deliver the experts that the step's rows are sent to.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from logitless.bench.machine import environment, write_result
from logitless.models.kernels import experts as kernels
from logitless.models.row_invariant.experts import MixtureForm, MixtureWeights, mixture, mixture_form
from script import command_line, milliseconds, parsed, short_name, short_name_of

_REST = {"num_hidden_layers": 1, "vocab_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}
_REST |= {"eos_token_id": 1, "pad_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe",
        "hidden_size": 4096,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "intermediate_size": 64,
    },
    "tiny": {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}
ROWS = {"tiny": 40}
DECODED = (1, 8, 16, 32, 64, 128, 256, 512)
COUNTS = (1, 2, 7, 16, 33, 64, 100, 256, 512, 1000, 4096)


def layer(name: str, device: str) -> tuple[Any, MixtureForm]:
    """The mixture of a model's only layer, random weights, and its form; transformers' grouped products."""
    config = AutoConfig.for_model(**MODELS[name], **_REST)
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        implementation = "grouped_mm" if device == "cuda" else "eager"
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=implementation)
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        for weight in mlp.parameters():
            weight.normal_().mul_(weight.shape[-1] ** -0.5)
    return mlp, mixture_form(mlp, config)


def differing(mlp: Any, form: MixtureForm, x: Tensor) -> Iterator[dict[str, Any]]:
    """How many tokens have other router logits, experts or outputs among so many rows, in random order."""
    weights = MixtureWeights.of(mlp, form)

    def run(rows: Tensor) -> tuple[Tensor, ...]:
        mixed = mixture(rows, weights)
        return mixed.logits, mixed.chosen, mixed.out

    whole = run(x)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1)).to(x.device)
    for count in (each for each in COUNTS if each < len(x)):
        parts = order.split(count)[:64]
        differ = torch.zeros(3, dtype=torch.int64, device=x.device)
        for part in parts:
            found = zip(run(x[part]), whole, strict=True)
            differ += torch.stack([(a != b[part]).any(-1).sum() for a, b in found])
        router, chosen, out = differ.tolist()
        tokens = sum(map(len, parts))
        yield {"rows": count, "tokens": tokens, "router": router, "experts": chosen, "output": out}


def median_milliseconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Of a few calls, after three that warm up."""
    for _ in range(3):
        call()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return median(milliseconds(call, device, pause=0) for _ in range(repeats))


def packed(mlp: Any, form: MixtureForm, x: Tensor) -> Iterator[dict[str, Any]]:
    """Milliseconds of a packed row here and in transformers, without and with gradients."""
    shared = getattr(mlp, "shared_experts", None)
    grad = torch.randn_like(x)

    def ours(rows: Tensor) -> Tensor:
        return mixture(rows, MixtureWeights.of(mlp, form), None if shared is None else shared(rows)).out

    def theirs(rows: Tensor) -> Tensor:
        return mlp(rows[None])[0]

    def step(run: Callable[[Tensor], Tensor], trained: bool) -> Callable[[], None]:
        mlp.requires_grad_(trained)
        rows = x.detach().requires_grad_()

        def call() -> None:
            run(rows).backward(grad)
            rows.grad = None
            mlp.zero_grad()

        return call

    with torch.no_grad():
        yield {"pass": "forward", **_both(lambda: ours(x), lambda: theirs(x))}
    for trained, name in ((False, "forward and backward, frozen"), (True, "forward and backward, every weight")):
        yield {"pass": name, **_both(step(ours, trained), step(theirs, trained))}
    mlp.requires_grad_(False)


def _both(ours: Callable[[], object], theirs: Callable[[], object]) -> dict[str, float]:
    mine, other = median_milliseconds(ours), median_milliseconds(theirs)
    return {"ms": mine, "transformers_ms": other, "ratio": mine / other if other else 0.0}


def in_a_graph(call: Callable[[], object], calls: int = 4) -> float:
    """Milliseconds of a call in a CUDA graph of several."""
    if not torch.cuda.is_available():
        call()
        return 0.0
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return median_milliseconds(graph.replay, 5) / calls


@torch.no_grad()
def decoded(mlp: Any, form: MixtureForm, x: Tensor) -> Iterator[dict[str, Any]]:
    """Milliseconds of a decoding step's mixture, and those that memory needs for its experts."""
    bandwidth = 1.0
    if x.is_cuda:
        big = torch.empty(2**30, device=x.device, dtype=torch.uint8)
        copy = torch.empty_like(big)
        bandwidth = 2 * 2**30 / median_milliseconds(lambda: copy.copy_(big))  # bytes a millisecond
        del big, copy
    weights = MixtureWeights.of(mlp, form)
    chosen = mixture(x, weights).chosen
    of_expert = sum(weight[0].nbytes for weight in (weights.gate_up, weights.down))
    for rows in (each for each in DECODED if each <= len(x)):
        part = x[:rows].contiguous()
        touched = chosen[:rows].unique().numel()
        row = _both_in_graphs(part, weights, mlp)
        least = touched * of_expert / bandwidth
        yield {"rows": rows, "experts": touched, **row, "memory_ms": least, "over_memory": row["ms"] / least}


def _both_in_graphs(x: Tensor, weights: MixtureWeights, mlp: Any) -> dict[str, float]:
    mine = in_a_graph(lambda: mixture(x, weights))
    routed = mlp.gate(x[None])[1:] if x.is_cuda else None
    other = in_a_graph(lambda: mlp.experts(x, routed[1], routed[0])) if routed else 0.0
    return {"ms": mine, "transformers_experts_ms": other}


_FEW_TILES = ((64, 64, 4, 4), (64, 128, 4, 3), (32, 128, 4, 4), (64, 256, 4, 2), (128, 64, 4, 4), (128, 128, 4, 3))
_MANY_TILES = (
    (64, 64, 8, 3), (64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 4), (64, 128, 8, 2), (128, 64, 4, 3),
    (256, 64, 8, 3), (128, 128, 8, 2), (256, 32, 8, 4), (64, 64, 4, 4), (64, 64, 8, 4),
)  # fmt: skip


def trials(mlp: Any, form: MixtureForm, x: Tensor) -> Iterator[tuple[str, str, Any, Callable[[], object], bool]]:
    """What tiles are tried on: name of the task, what of ``kernels`` is replaced, by what, call, in a graph or not."""
    weights, grad, rows = MixtureWeights.of(mlp, form), torch.randn_like(x), x.detach().requires_grad_()

    def trained() -> None:
        with torch.enable_grad():
            mixture(rows, weights).out.backward(grad)
        rows.grad = None
        mlp.zero_grad()

    def forward(part: Tensor) -> Callable[[], object]:
        return lambda: mixture(part, weights)

    for count in (16, 128, 512, 2048, len(x)):
        size = kernels.rows_of_tile(count * form.routing.experts_per_token / weights.router.shape[0])
        for name in ("_LARGE_GATED", "_LARGE_GROUPED"):
            for each in _FEW_TILES if size <= 32 else _MANY_TILES:
                value = getattr(kernels, name) | {size: kernels._Tile(*each)}
                call = forward(x[:count].contiguous())
                yield f"{name} {count} rows, tile {size}", name, value, call, count <= 512
    for each in _MANY_TILES:
        yield (
            "_LARGE_GROUPED forward, backward",
            "_LARGE_GROUPED",
            kernels._LARGE_GROUPED | {128: kernels._Tile(*each)},
            trained,
            False,
        )
    mlp.experts.requires_grad_(True)
    for each in _MANY_TILES:
        yield "_OUTER", "_OUTER", kernels._Tile(*each), trained, False


def search(name: str, device: str, part: slice = slice(None), *, timed: bool = True) -> None:
    """Times of tiles; without ``timed`` each is compiled only."""
    mlp, form = layer(name, device)
    x = rows_of(name, mlp)
    mlp.requires_grad_(False)
    found = dict[str, list[tuple[float, str]]]()
    with torch.no_grad():
        for task, what, value, call, graphed in [*trials(mlp, form, x)][part]:
            mlp.experts.requires_grad_(what == "_OUTER")
            with mock.patch.object(kernels, what, value):
                try:
                    ms = (
                        (in_a_graph(call) if graphed else median_milliseconds(call, 5))
                        if timed
                        else float(call() is None)
                    )
                    found.setdefault(task, []).append((round(ms, 3), str(value)))
                except Exception as error:  # more shared memory or registers than there are
                    torch.cuda.synchronize()
                    print(task, repr(error)[:80])
    if timed:
        for task, times in found.items():
            print(task, [ms for ms, _ in times], "best", min(times), flush=True)


def compile_all(name: str, device: str, processes: int) -> None:
    """Fill Triton's cache with the kernels of ``search``."""
    context = get_context("spawn")
    workers = [
        context.Process(target=search, args=(name, device, slice(i, None, processes)), kwargs={"timed": False})
        for i in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def rows_of(name: str, mlp: Any) -> Tensor:
    """Inputs [T, D] of a layer."""
    weight = next(mlp.parameters())
    torch.manual_seed(1)
    return torch.randn(ROWS.get(name, 16384), MODELS[name]["hidden_size"], device=weight.device).to(weight.dtype)


def table(documents: Iterable[Mapping[str, Any]]) -> str:
    """What was measured, as Markdown."""
    lines = [
        "| | tokens that differ | forward | and backward, weights frozen | trained | decoding, 16 to 512 rows |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for found in documents:
        card = short_name_of(found["machine"]["gpu"])
        for name, rows in found["models"].items():
            tokens = sum(row["tokens"] for row in rows["bits"])
            differ = sum(row[kind] for row in rows["bits"] for kind in ("router", "experts", "output"))
            ratios = " | ".join(f"{row['ratio']:.2f}" for row in rows["packed"])
            over = [row["over_memory"] for row in rows["decoded"] if row["rows"] >= 16]
            lines.append(f"| {name}, {card} | {differ} of {tokens:,} | {ratios} | {min(over):.2f} to {max(over):.2f} |")
    return "\n".join(lines)


def tables(results: Path) -> dict[str, str]:
    """The table of the GPUs that were measured."""
    files = sorted(path for path in results.glob("experts-*.json") if path.stem != "experts-cpu")
    return {"": table(json.loads(path.read_text()) for path in files)} if files else {}


def main() -> None:
    """Measures, prints and writes."""
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3-30b-a3b", "glm-4.5-air"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--search", action="store_true", help="time other tiles")
    parser.add_argument("--compile", type=int, default=0, metavar="PROCESSES", help="compile other tiles")
    options: argparse.Namespace = parsed(parser, tables)
    found: dict[str, Any] = {}
    for name in options.models:
        if options.compile:
            compile_all(name, options.device, options.compile)
        if options.search:
            search(name, options.device)
        if options.search or options.compile:
            continue
        mlp, form = layer(name, options.device)
        x = rows_of(name, mlp)
        mlp.requires_grad_(False)
        with torch.no_grad():
            bits = list(differing(mlp, form, x))
        found[name] = {"bits": bits, "packed": list(packed(mlp, form, x)), "decoded": list(decoded(mlp, form, x))}
        print(name, json.dumps(found[name]), flush=True)
        del mlp
    if found:
        card = environment(options.device, ("triton", "transformers"))
        options.output.mkdir(parents=True, exist_ok=True)
        write_result(options.output / f"experts-{short_name(options.device)}.json", {"machine": card, "models": found})
        if options.device == "cuda":
            print(table([{"machine": card, "models": found}]))


if __name__ == "__main__":
    main()
