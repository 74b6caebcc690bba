"""What ``benchmarks/bits.py`` measures of one model."""

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from bits_cases import DECODED_POSITION, DECODED_ROWS, HYBRIDS, LAWS, MIXTURES, MODELS, Results
from bits_laws import Laws, decode_step, empty_caches
from logitless.bench.machine import release
from logitless.head.api import token_scores
from logitless.models.lm_head import backbone_hidden, causal_lm, lm_head
from logitless.models.packed import PACKED
from logitless.models.row_invariant import linear
from logitless.models.row_invariant.coverage import ONE_PLUS
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.models.row_invariant.linear import Plan, product
from logitless.models.row_invariant.paged_attention import PAGE, DecodeLayout, PagedCache
from logitless.models.row_invariant.self_check import self_check
from logitless.models.seeded import seeded
from logitless.types import PackedInputs
from script import milliseconds


def build(name: str, dtype: torch.dtype) -> nn.Module:
    """A model with random weights whose logits have a standard deviation of about 3; norms and biases that show."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = (MODELS | MIXTURES | HYBRIDS)[name] | {"tie_word_embeddings": False}
    with seeded(0, "cuda"), torch.device("cuda"):
        model_type = fields.pop("model_type")
        config = AutoConfig.for_model(model_type, **fields)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PACKED)
        with torch.no_grad():
            model.get_output_embeddings().weight.normal_(0, 3 / config.hidden_size**0.5)
            model.get_input_embeddings().weight.normal_(0, 1)
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name:
                    around = 0 if model_type in ONE_PLUS and not parameter_name.endswith("attn.norm.weight") else 1
                    parameter.normal_(around, 0.1)
                elif parameter_name.endswith("bias"):
                    parameter.normal_(0, 0.5)
            for buffer_name, buffer in model.named_buffers():  # 0 at first, which would change no choice
                if buffer_name.endswith("correction_bias"):
                    buffer.normal_(0, 0.1)
    return model.eval().requires_grad_(False)


class Measured:
    """A model on a device and what is measured of it."""

    def __init__(self, name: str, results: Results) -> None:
        self.name, self.results = name, results
        self.model = build(name, torch.bfloat16)
        installation = install_row_invariant(self.model)
        report = self_check(self.model)
        results.more["self_check"][name] = {
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
            for row in laws.rows(LAWS) if self.name in HYBRIDS else laws.rows():  # transformers' chunks take minutes
                yield {"model": self.name, **row}
            if laws.differences:
                self.results.more["differences"][self.name] = laws.differences
        elif part == "second_gpu":
            for row in Laws(self.model, "cuda").on_another_device(torch.device("cuda", 1)):
                yield {"model": self.name, **row}
            release("cuda")
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
        gc.collect()
        gc.freeze()  # a collection amid a step would be measured as its own

        def step() -> None:
            hidden = backbone_hidden(self.model, inputs)
            if backward:
                scores = token_scores(hidden.index_select(0, inputs.source), lm_head(self.model), target)
                scores.logp.mean().backward()  # type: ignore[no-untyped-call]
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
        installation, stream = install_row_invariant(self.model), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        try:
            for count in DECODED_ROWS:
                pages = -(-(DECODED_POSITION + 1) // PAGE)
                table = torch.arange(count * pages, dtype=torch.int32, device="cuda").view(count, pages)
                position = torch.full((count,), DECODED_POSITION, dtype=torch.int32, device="cuda")
                layout = DecodeLayout(table, position)
                caches = empty_caches(self.model, count * pages, count)
                for cache in caches:
                    if isinstance(cache, PagedCache):
                        cache.key.normal_()
                        cache.value.normal_()
                tokens = torch.arange(count, device="cuda")
                head = causal_lm(self.model).get_output_embeddings().weight

                def step(
                    tokens: torch.Tensor = tokens, layout: DecodeLayout = layout, caches: Any = caches, head: Any = head
                ) -> None:
                    hidden = decode_step(self.model, tokens, layout, caches, tokens)
                    product(hidden, head, out_dtype=torch.float32)

                ours = _graph(step, stream)
                with plain_cublas():
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


@contextmanager
def plain_cublas() -> Iterator[None]:
    """Every product is cuBLAS's inside, whatever its bits, and no activation is part of one."""
    with (
        mock.patch.object(Plan, "library", return_value="cublas"),
        mock.patch.object(linear, "gated_product_or_none", return_value=None),
    ):
        yield


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


def _milliseconds(step: Callable[[], None], rounds: int = 5, calls: int = 4) -> float:
    """Of a call among others that follow each other, as micro-batches do: median of rounds after one to warm up."""

    def together() -> None:
        for _ in range(calls):
            step()

    torch.cuda.synchronize()
    times = [milliseconds(together, "cuda", pause=0) / calls for _ in range(rounds + 1)]
    return statistics.median(times[1:])


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

    def replayed(graph: torch.cuda.CUDAGraph) -> None:
        for _ in range(repeats):
            graph.replay()

    times = [
        [milliseconds(partial(replayed, graph), "cuda", pause=0) / repeats for graph in graphs]
        for _ in range(rounds + 1)
    ]
    return [statistics.median(found) for found in zip(*times[1:], strict=True)]
