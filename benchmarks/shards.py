"""``benchmarks/shards.py``: sampling with a model whose layers are sharded over GPUs, against a whole copy on each.

Each process samples its part of the prompts with the GPU engine and random weights, which it draws one tensor at a
time, so that no model is whole where it does not fit; the lengths of completions are forced. A row is a model, a number
of processes that share a copy (1: whole) and an artificial limit of memory; ``fits`` is false where that was too
little. ``completions`` is a digest of all tokens and log-probs: rows of one model and workload have the same.
``forecast_gib`` is what ``CopyBytes`` says of weights, ``weights_gib`` what is allocated after they are loaded;
``gather_seconds`` is a pass that gathers all layers and computes nothing.

    python benchmarks/shards.py --models llama-3.1-8b --limit-gib 14
    python benchmarks/shards.py --models qwen3-32b
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from logitless.bench.machine import environment, release
from logitless.distributed.ranks import Ranks, ranks_of_environment
from logitless.models.char_tokenizer import character_tokenizer
from logitless.models.loading import load_model
from logitless.rollout.gpu.sharded import ShardedGpuEngine
from logitless.rollout.sampling import SamplingOptions
from logitless.train.assembly.engines import sharing
from logitless.types import Prompt
from rollout_workloads import Workload
from script import RESULTS, Rows, main, rows_of_processes, short_name
from shapes import SHAPES, TINY

QWEN3_32B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, Mapping[str, Any]] = {shape.name.removesuffix("-lora"): shape.config for shape in (*SHAPES, TINY)}
CONFIGS["qwen3-32b"] = QWEN3_32B
GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``benchmarks/shards.py``."""
    parser.add_argument("--models", default="llama-3.1-8b,qwen3-32b", help=f"by commas, of {', '.join(CONFIGS)}")
    parser.add_argument("--processes", type=int, default=2, help="that sample, each on a GPU")
    parser.add_argument("--shards", default="all,1", help="processes that share a copy, by commas: all, or a number")
    parser.add_argument("--limit-gib", type=float, help="memory that each may use; besides, rows without it")
    parser.add_argument("--workload", default="64x8-512-64:512", help="prompts x samples, prompt tokens, new tokens")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of shards-<GPU>.json")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the tool itself with --models tiny")
    parser.add_argument("--order", type=json.loads, help=argparse.SUPPRESS)  # of a process that torchrun started


def run(args: argparse.Namespace) -> int:
    """Measure every model; the rows go to ``shards-<GPU>.json``."""
    if args.order is not None:
        _rank(**args.order)
        return 0
    shards = [args.processes if each == "all" else int(each) for each in args.shards.split(",")]
    limits = [None] if args.limit_gib is None else [args.limit_gib, None]
    order = {
        "models": args.models.split(","),
        "plans": [(number, limit) for limit in limits for number in shards],
        "workload": args.workload,
        "device": args.device,
    }
    identity = ("model", "processes", "shards", "limit_gib", "workload")
    here = environment(args.device, ("triton", "transformers"))
    rows = Rows(args.output / f"shards-{short_name(args.device)}.json", here, identity)
    for row in rows_of_processes(__file__, args.processes, order):
        rows.add(row)
    return 0


def _rank(models: list[str], plans: list[list[Any]], workload: str, device: str) -> None:
    """What each process does; the first one prints the rows."""
    with ranks_of_environment(device) as ranks:
        for row in rows_of(ranks, models, plans, workload, device):
            if ranks.is_first:
                print(json.dumps(row), flush=True)


def rows_of(
    ranks: Ranks, models: Sequence[str], plans: Sequence[Sequence[Any]], workload: str, device: str
) -> Iterator[dict[str, Any]]:
    """The rows, on every process.

    Args:
        ranks: that sample.
        models: of ``CONFIGS``.
        plans: (processes that share a copy, limit of memory in GiB or None).
        workload: of ``rollout_workloads``.
        device: cuda, or cpu under Triton's interpreter.
    """
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    for name in models:
        for shards, limit in plans:
            row = {"model": name, "processes": ranks.world, "shards": shards, "limit_gib": limit}
            row |= {"workload": workload, "gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
            together = sharing(ranks, range(ranks.world), shards)
            assert together is not None, "all sample"
            _limit_memory(place, limit)
            found: dict[str, Any] | None = None
            try:
                found = _measured(CONFIGS[name], together, ranks, Workload.parse(workload), place)
            except torch.OutOfMemoryError:
                if together.world > 1:  # the others are in a collective
                    raise
            parts = ranks.all_gather_object(found)
            release(device)
            _limit_memory(place, None)
            yield row | _of_all(parts)


def _limit_memory(device: torch.device, gib: float | None) -> None:
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else min(1.0, gib * GIB / total), device)


def _of_all(parts: list[dict[str, Any] | None]) -> dict[str, Any]:
    """The row of all processes."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return {"fits": False}
    return {
        "fits": True,
        "tokens_per_second": sum(each["tokens"] for each in known) / max(each["seconds"] for each in known),
        **{name: max(each[name] for each in known) for name in _LARGEST},
        "completions": hashlib.sha256("".join(each["completions"] for each in known).encode()).hexdigest()[:16],
    }


_LARGEST = ("seconds", "gather_seconds", "load_seconds", "peak_gib", "weights_gib", "forecast_gib")


def _measured(
    config: Mapping[str, Any], together: Ranks, everyone: Ranks, work: Workload, device: torch.device
) -> dict[str, Any]:
    """What this process measures of its part of the prompts."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    copy = load_model(config, dtype=dtype, random_weights=True, empty=True).eval()
    before, start = _allocated(device), time.perf_counter()
    engine = ShardedGpuEngine(copy, character_tokenizer("abcdefgh"), device=device, max_rows=2048)
    engine.share(together)
    engine.inner._limit = lambda prompt, sample, options: min(  # type: ignore[method-assign]
        work.lengths[int(prompt.id)][sample], options.max_new_tokens
    )
    engine.receive(_drawn(copy, device), 0)
    _wait(device)
    loaded, weights = time.perf_counter() - start, _allocated(device) - before
    shards = engine.shards
    ids = work.prompt_ids(int(config["vocab_size"]))
    mine = [Prompt(str(p), "", ids[p]) for p in range(everyone.rank, work.prompts, everyone.world)]
    sampled = []
    for options in (SamplingOptions(max_new_tokens=min(16, work.most)), SamplingOptions(max_new_tokens=work.most)):
        everyone.barrier()  # the first round compiles
        start = time.perf_counter()
        with engine.together():
            sampled = engine.sample(mine, work.samples, options, seed=0)
        _wait(device)
        seconds = time.perf_counter() - start
    with shards.a_pass():
        pass
    _wait(device)
    everyone.barrier()
    start = time.perf_counter()
    for _ in range(5):
        with shards.a_pass():
            pass
    _wait(device)
    gather = (time.perf_counter() - start) / 5
    digest = hashlib.sha256()
    for completion in (each for group in sampled for each in group):
        assert completion.logp_sampler is not None
        digest.update(completion.token_ids.tobytes() + completion.logp_sampler.tobytes())
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    engine.close()
    return {
        "tokens": sum(each.length for group in sampled for each in group),
        "seconds": seconds,
        "gather_seconds": gather,
        "load_seconds": loaded,
        "peak_gib": peak / GIB,
        "weights_gib": weights / GIB,
        "forecast_gib": shards.num_bytes.total / GIB,
        "completions": digest.hexdigest(),
    }


def _drawn(like: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Random weights for a model, each of which exists only while it is read; the same on every process."""
    for number, (name, p) in enumerate(like.named_parameters()):
        generator = torch.Generator(device).manual_seed(number)
        drawn = torch.randn(p.shape, dtype=p.dtype, device=device, generator=generator)
        yield name, 1 + 0.1 * drawn if drawn.ndim == 1 else drawn * (0.3 if p.shape[-1] < 64 else 0.02)


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
