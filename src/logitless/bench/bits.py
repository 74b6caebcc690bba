"""``logitless bench bits``: laws and price of one set of bits, and the table of docs/bits.md.

Laws: log-probs, entropies and hidden states of the same tokens, computed in every way that training and sampling
compute them, compared in every bit. Price: the same model with row-invariant layers and with transformers' own, in the
forward pass, in a training step, and in a step of decoding against the same CUDA graph with plain cuBLAS. What a result
file has already is not measured again, so a long run can be made of short ones (``--seconds``).
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from logitless.bench import bits_report
from logitless.bench.bits_laws import LAWS, Laws
from logitless.bench.machine import environment, release
from logitless.errors import ConfigurationError, UnavailableError
from logitless.head.api import token_scores
from logitless.models.decoding import decode_step, empty_caches
from logitless.models.linear import everywhere, product
from logitless.models.lm_head import backbone_hidden, causal_lm, lm_head
from logitless.models.packed import PACKED
from logitless.models.paged_attention import PAGE, DecodeLayout
from logitless.models.row_invariant import install_row_invariant
from logitless.models.self_check import self_check
from logitless.types import PackedInputs

PACKAGES = ("triton", "transformers")
_COMMON = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
_QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e6}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _COMMON
    | {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "rope_parameters": _QWEN_ROPE},
    "qwen3-1.7b": _COMMON
    | {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rope_parameters": _QWEN_ROPE},
    "qwen3-4b": _COMMON
    | {"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_parameters": _QWEN_ROPE},
    "llama-3.1-8b": _COMMON
    | {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
    | {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
}
DECODED_ROWS = (1, 16, 64, 256, 512)
DECODED_POSITION = 256
PARTS = ("laws", "train_forward", "train_step", "decode")


def build(name: str, dtype: torch.dtype) -> nn.Module:
    """A model with random weights whose logits have a standard deviation of about 3; norms and biases that show."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(MODELS[name])
    with torch.random.fork_rng(), torch.device("cuda"):
        torch.manual_seed(0)
        config = AutoConfig.for_model(fields.pop("model_type"), **fields, tie_word_embeddings=False)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PACKED)
        with torch.no_grad():
            model.get_output_embeddings().weight.normal_(0, 3 / config.hidden_size**0.5)
            model.get_input_embeddings().weight.normal_(0, 1)
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name:
                    parameter.normal_(1, 0.1)
                elif parameter_name.endswith("bias"):
                    parameter.normal_(0, 0.5)
    return model.eval().requires_grad_(False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``logitless bench bits``."""
    names = ",".join(MODELS)
    parser.add_argument("--models", default=names, help=f"by commas, of {names}")
    parser.add_argument("--parts", default=",".join(PARTS), help="by commas: what to measure")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after this time")
    parser.add_argument("--thorough", action="store_true", help="try every tile of the products, not the usual ones")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder of the JSON file")
    parser.add_argument("--table", type=Path, nargs="*", help="documents whose table to rewrite; measures nothing")
    parser.add_argument("--check", action="store_true", help="with --table: fail if a document is out of date")


def run(args: argparse.Namespace) -> int:
    """Measures what is missing; 0 when every law held."""
    if args.table is not None:
        return bits_report.update(args.table, bits_report.load(args.output), check=args.check)
    if not torch.cuda.is_available():
        raise UnavailableError(
            needed="a CUDA device", given="none", remedy="Run it on a GPU; on a CPU the laws are tests of small models."
        )
    for name in args.models.split(","):
        if name not in MODELS:
            raise ConfigurationError(
                needed=f"a model among {', '.join(MODELS)}", given=repr(name), remedy="Name some of them by commas."
            )
    here = environment("cuda", PACKAGES)
    card = here["gpu"].removeprefix("NVIDIA ").split(" ")[0].lower()
    path = args.output / f"bits-{card}.json"
    results = Results(path, here)
    started = time.perf_counter()
    for name in args.models.split(","):
        missing = [part for part in args.parts.split(",") if not results.has(name, part)]
        if not missing or time.perf_counter() - started > args.seconds:
            continue
        measured = Measured(name, results, thorough=args.thorough)
        for part in missing:
            if time.perf_counter() - started > args.seconds:
                break
            for row in measured.part(part):
                results.add(row)
        del measured
        release("cuda")
    bits_report.plot(results.document, args.output / f"bits-{card}.png")
    print(bits_report.table(results.document), flush=True)
    return 1 if any(row.get("differ") and row.get("exact", True) for row in results.document["rows"]) else 0


class Results:
    """A result file that grows row by row.

    Args:
        path: of the file; begun anew where it is of another machine or other versions.
        here: machine and versions.
    """

    def __init__(self, path: Path, here: dict[str, str]) -> None:
        self.path = path
        found = json.loads(path.read_text()) if path.exists() else {}
        kept = found if found.get("environment") == here else {}
        self.document: dict[str, Any] = {"environment": here, "rows": [], "self_check": {}, "differences": {}} | kept

    def has(self, model: str, part: str) -> bool:
        """Whether a part of a model is complete."""
        rows = [row for row in self.document["rows"] if row["model"] == model]
        if part == "laws":
            return {row.get("comparison") for row in rows} >= set(LAWS)
        if part == "decode":
            return {row["num_rows"] for row in rows if row.get("kind") == part} >= set(DECODED_ROWS)
        return any(row.get("kind") == part for row in rows)

    def add(self, row: dict[str, Any]) -> None:
        """One more row, in place of the same one; written at once."""
        identity = ("model", "comparison", "kind", "num_rows", "workload")
        rows = self.document["rows"]
        rows[:] = [old for old in rows if any(old.get(name) != row.get(name) for name in identity)] + [row]
        print(json.dumps(row), flush=True)
        self.write()

    def write(self) -> None:
        """To the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.document, indent=1) + "\n")


class Measured:
    """A model on a device and what is measured of it."""

    def __init__(self, name: str, results: Results, *, thorough: bool) -> None:
        self.name, self.results = name, results
        self.model = build(name, torch.bfloat16)
        installation = install_row_invariant(self.model)
        report = self_check(self.model, thorough=thorough)
        results.document["self_check"][name] = {
            "seconds": report.seconds,
            "attention": report.attention,
            "linear": {
                shape: {"ways": _runs(found.ways), "failed": found.failed, "microseconds": found.microseconds}
                for shape, found in report.linear.items()
            },
        }
        print(f"self-check of {name}: {report.seconds:.1f} s, exact: {report.exact}", flush=True)
        installation.remove()

    def part(self, part: str) -> Iterator[dict[str, Any]]:
        """Rows of one part."""
        if part == "laws":
            laws = Laws(self.model, "cuda")
            for row in laws.rows():
                yield {"model": self.name, **row}
            if laws.differences:
                self.results.document["differences"][self.name] = laws.differences
        elif part == "decode":
            yield from self._decode()
        else:
            yield from self._training(part)

    def _training(self, kind: str) -> Iterator[dict[str, Any]]:
        """Packed rows of 80 to 460 tokens; log-probs' mean and its gradient in a training step."""
        backward = kind == "train_step"
        large = self.name == "llama-3.1-8b" and backward
        inputs = _packed(8192 if large else 16384, self.model)
        target = inputs.input_ids[(inputs.source + 1).clamp(max=len(inputs.input_ids) - 1)]
        self.model.requires_grad_(backward)

        def step() -> None:
            hidden = backbone_hidden(self.model, inputs)
            if backward:
                scores = token_scores(hidden.index_select(0, inputs.source), lm_head(self.model), target)
                scores.logp.mean().backward()
                for parameter in self.model.parameters():
                    parameter.grad = None

        with torch.set_grad_enabled(backward):
            reference = _milliseconds(step)
            installation = install_row_invariant(self.model)
            try:
                exact = _milliseconds(step)
            finally:
                installation.remove()
        self.model.requires_grad_(False)
        release("cuda")
        yield {
            "model": self.name,
            "kind": kind,
            "num_rows": len(inputs.input_ids),
            "ms": exact,
            "ms_reference": reference,
            "ratio": exact / reference,
        }

    def _decode(self) -> Iterator[dict[str, Any]]:
        """A step with its logits in a CUDA graph, against the same graph with plain cuBLAS."""
        installation, stream = install_row_invariant(self.model), torch.cuda.Stream()
        try:
            for count in DECODED_ROWS:
                pages = -(-(DECODED_POSITION + 1) // PAGE)
                table = torch.arange(count * pages, dtype=torch.int32, device="cuda").view(count, pages)
                position = torch.full((count,), DECODED_POSITION, dtype=torch.int32, device="cuda")
                layout = DecodeLayout(table, position)
                caches = empty_caches(self.model, count * pages)
                for cache in caches:
                    cache.key.normal_()
                    cache.value.normal_()
                tokens = torch.arange(count, device="cuda")
                head = causal_lm(self.model).get_output_embeddings().weight

                def step(
                    tokens: torch.Tensor = tokens, layout: DecodeLayout = layout, caches: Any = caches, head: Any = head
                ) -> None:
                    product(decode_step(self.model, tokens, layout, caches), head, out_dtype=torch.float32)

                ours = _graph(step, stream)
                with everywhere("cublas"):
                    plain = _graph(step, stream)
                exact, reference = _replays(ours, plain)
                yield {
                    "model": self.name,
                    "kind": "decode",
                    "num_rows": count,
                    "ms": exact,
                    "ms_reference": reference,
                    "ratio": exact / reference,
                }
                del ours, plain, caches
                release("cuda")
        finally:
            installation.remove()


def _runs(ways: dict[int, str]) -> dict[str, str]:
    """Counts that go the same way in a row, together: ``768-16384``."""
    runs: list[tuple[int, int, str]] = []
    for count, way in ways.items():
        if runs and runs[-1][2] == way and count > 512 and runs[-1][0] > 512:
            runs[-1] = (runs[-1][0], count, way)
        else:
            runs.append((count, count, way))
    return {(f"{a}-{b}" if a != b else str(a)): way for a, b, way in runs}


def _packed(num_tokens: int, model: nn.Module) -> PackedInputs:
    """Sequences of 80 to 460 tokens, every token but the last of each scored."""
    generator = torch.Generator().manual_seed(2)
    lengths: list[int] = []
    while sum(lengths) < num_tokens - 460:
        lengths.append(int(torch.randint(80, 461, (1,), generator=generator)))
    vocabulary = causal_lm(model).config.vocab_size
    ids = torch.randint(0, vocabulary, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    source = torch.arange(sum(lengths))[
        positions < torch.repeat_interleave(torch.tensor(lengths), torch.tensor(lengths)) - 1
    ]
    return PackedInputs(ids, positions, tuple(lengths), source, tuple(n - 1 for n in lengths)).to("cuda")


def _milliseconds(step: Callable[[], None], repeats: int = 5) -> float:
    """Median of some calls after two to warm up."""
    for _ in range(2):
        step()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[repeats // 2]


def _graph(step: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


def _replays(*graphs: torch.cuda.CUDAGraph, rounds: int = 7, repeats: int = 10) -> list[float]:
    """Median milliseconds of a replay of each, in turns."""
    times: list[list[float]] = [[] for _ in graphs]
    for turn in range(rounds + 1):
        for graph, found in zip(graphs, times, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            end.synchronize()
            if turn:
                found.append(begin.elapsed_time(end) / repeats)
    return [sorted(found)[len(found) // 2] for found in times]
