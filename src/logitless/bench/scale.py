"""``logitless bench scale``: training steps on several GPUs of this machine, each with as many tokens as one has alone.

Every row is a run of ``torchrun`` on so many GPUs: a model with random weights in bfloat16 with float32 masters (or
LoRA over a frozen base) takes the same step again and again: forward and backward through backbone and head, sums,
clipping and AdamW. Efficiency is tokens a second and GPU over those of one GPU alone. Beside the peak of memory stand
the shards that ``logitless plan`` counts, and beside the step how fast a large collective is, which its forecast needs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from logitless.bench.machine import environment, write_result
from logitless.bench.step_contenders import SHAPES, TINY, Shape
from logitless.data.packing import pack
from logitless.distributed.arrangement import Arrangement
from logitless.distributed.ranks import Ranks, ranks_of_environment
from logitless.distributed.sharding import local_part
from logitless.errors import ConfigurationError, UnavailableError
from logitless.train.config import OptimizerSection
from logitless.train.masters import lower_to
from logitless.train.optimizer import adamw, take_step
from logitless.train.policy import Policy
from logitless.types import Completion, PackedBatch, Prompt

PACKAGES = ("triton", "transformers", "peft")
LAYOUTS = ("shard", "replicate", "sequence")
"""Which dimension of ``parallel`` has all the GPUs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``logitless bench scale``."""
    names = ",".join(shape.name for shape in SHAPES if shape is not TINY)
    parser.add_argument("--models", default=names, help=f"by commas, of {names},{TINY.name}")
    parser.add_argument("--gpus", default="1,2,4", help="numbers of GPUs, by commas; begin with 1")
    parser.add_argument("--layouts", default="shard,replicate", help=f"by commas, of {','.join(LAYOUTS)}")
    parser.add_argument("--tokens", type=int, default=16384, help="read by each GPU in a step (by all, under sequence)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after one that is not")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder of the JSON files")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the tool itself with --models tiny")


def run(args: argparse.Namespace) -> int:
    """Measure every model on every number of GPUs and write ``scale-<model>.json``; 0 when all is well."""
    counts = [int(n) for n in args.gpus.split(",")]
    if args.device == "cuda" and torch.cuda.device_count() < max(counts):
        raise UnavailableError(
            needed=f"{max(counts)} CUDA devices",
            given=str(torch.cuda.device_count()),
            remedy="Name fewer with --gpus, or use --device cpu --models tiny to try the tool itself.",
        )
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.models.split(","):
        shape = _shape(name)
        rows: list[dict[str, Any]] = []
        for gpus in counts:
            for layout in args.layouts.split(",") if gpus > 1 else ["shard"]:
                rows.append(_launched(args, shape, gpus, layout))
                alone = next((row["tokens_per_second"] for row in rows if row["gpus"] == 1), None)
                rows[-1]["efficiency"] = None if alone is None else rows[-1]["tokens_per_second"] / (alone * gpus)
                print(json.dumps(rows[-1]), flush=True)
                document = {"environment": environment(args.device, PACKAGES), "model": shape.name, "rows": rows}
                write_result(args.output / f"scale-{shape.name}.json", document)
    return 0


def _launched(args: argparse.Namespace, shape: Shape, gpus: int, layout: str) -> dict[str, Any]:
    """One row, measured by processes that torchrun starts."""
    options = [shape.name, layout, args.tokens, args.length, args.steps, args.device]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", gpus]
    command += ["-m", "logitless.bench.scale", *options]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not said:
        raise UnavailableError(
            needed=f"{gpus} processes that train {shape.name}",
            given=(done.stderr.strip().splitlines() or ["nothing"])[-1],
            remedy="Give fewer --tokens, or a smaller model.",
        )
    return json.loads(said[-1])


def measured(
    ranks: Ranks, shape: Shape, layout: str, *, tokens: int, length: int, steps: int, device: str
) -> dict[str, Any]:
    """The row of this process's run.

    Args:
        ranks: all of them.
        shape: of the model.
        layout: of ``LAYOUTS``.
        tokens: read by each rank in a step, or by all where they share sequences.
        length: of a sequence.
        steps: timed.
        device: ``cuda`` or ``cpu``.
    """
    arrangement = _arrangement(ranks.world, layout)
    ranks = ranks.arranged(arrangement)
    model = shape.build(device)
    if shape.lora_rank is None:
        lower_to(torch.bfloat16, model.parameters())
    policy = Policy(model)
    if arrangement.is_sharded:
        policy.shard(arrangement.mesh(device))
    if ranks.sequence is not None:
        policy.share_sequences(ranks.sequence)
    optimizer = adamw(policy.model.parameters(), OptimizerSection(), policy.device)
    batch = _batch(shape, tokens, length, seed=ranks.data_rank)
    seconds = []
    for step in range(steps + 1):
        ranks.barrier()
        _wait(device)
        began = time.perf_counter()
        scores = policy.scores(batch, temperature=1.0, backend="auto")
        (scores.logp.sum() / tokens).backward()  # type: ignore[no-untyped-call]
        ranks.sum_gradients(policy.named_parameters().values())
        take_step(optimizer, rate=0.0, max_grad_norm=1.0, ranks=ranks)
        _wait(device)
        if step:
            seconds.append(float(ranks.max(time.perf_counter() - began)))
    parts = ranks.world // arrangement.sequence
    shards = [local_part(parameter) for parameter in policy.named_parameters().values()]
    return {
        "gpus": ranks.world,
        "model": shape.name,
        "parallel": {
            "replicate": arrangement.replicate,
            "shard": arrangement.shard,
            "sequence": arrangement.sequence,
        },
        "tokens_per_second": parts * tokens / statistics.median(seconds),
        "seconds": seconds,
        "peak_bytes": ranks.max(torch.cuda.max_memory_allocated() if device == "cuda" else 0),
        "weight_bytes": ranks.max(sum(part.numel() * part.element_size() for part in shards)),
        "bytes_per_second": _bytes_per_second(ranks, device),
    }


def _arrangement(world: int, layout: str) -> Arrangement:
    if layout not in LAYOUTS:
        raise ConfigurationError(needed=f"a layout of {', '.join(LAYOUTS)}", given=layout, remedy="Name one of them.")
    return Arrangement(**{layout: world})


def _shape(name: str) -> Shape:
    found = next((shape for shape in SHAPES if shape.name == name), None)
    if found is None:
        known = ", ".join(shape.name for shape in SHAPES)
        raise ConfigurationError(needed=f"a model of {known}", given=name, remedy="Name one of them.")
    return found


def _batch(shape: Shape, tokens: int, length: int, *, seed: int) -> PackedBatch:
    """Sequences of one length whose tokens are all scored but the first."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for number in range(max(1, tokens // length)):
        ids = torch.randint(3, shape.vocabulary, (length + 1,), generator=generator).tolist()
        pairs.append((Prompt(str(number), "", (ids[0],)), Completion(str(number), tuple(ids[1:]), "", "length")))
    return pack(pairs)


def _bytes_per_second(ranks: Ranks, device: str) -> float | None:
    """That a rank sends while all gather a large tensor; None for one rank alone."""
    if ranks.world == 1:
        return None
    part = torch.zeros(2**26 if device == "cuda" else 2**16, dtype=torch.bfloat16, device=device)
    whole = part.new_empty(ranks.world * len(part))
    seconds = []
    for _ in range(6):
        ranks.barrier()
        _wait(device)
        began = time.perf_counter()
        dist.all_gather_into_tensor(whole, part)
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return part.numel() * part.element_size() * (ranks.world - 1) / statistics.median(seconds[1:])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _main(arguments: Sequence[str]) -> None:
    name, layout, tokens, length, steps, device = arguments
    with ranks_of_environment(device) as ranks:
        row = measured(
            ranks, _shape(name), layout, tokens=int(tokens), length=int(length), steps=int(steps), device=device
        )
        if ranks.is_first:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
