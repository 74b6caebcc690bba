"""``benchmarks/scale.py``: training steps on several GPUs of this machine, each with as many tokens as one has alone.

One run of ``torchrun`` for each number of GPUs measures all models in all layouts: a model with random weights in
bfloat16 with float32 masters (or LoRA over a frozen base) takes the same step again and again: forward and backward
through backbone and head, sums, clipping and AdamW. Efficiency is tokens a second and GPU over those of one GPU alone.
Beside the peak of memory stands what ``logitless plan`` forecasts, and beside the step how fast a large collective is,
which the forecast of its time needs. ``--head`` times the LM head over shards, where the next one travels while one is
multiplied and where it is waited for.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import mixture
import scale_report
from logitless.bench.machine import environment, release, write_result
from logitless.data.packing import pack
from logitless.distributed.arrangement import Arrangement
from logitless.distributed.ranks import Ranks, ranks_of_environment
from logitless.distributed.sharding import local_part
from logitless.distributed.tree import TreeSum
from logitless.errors import UnavailableError
from logitless.head import sharded, token_scores
from logitless.train.learn.policy import Policy
from logitless.train.optim.master_weights import lower_to
from logitless.train.optim.optimizer import adamw, take_step
from logitless.train.plan.scaling import traffic_of_rank
from logitless.train.plan.training_memory import training_memory
from logitless.train.recipe.training import OptimizerSection
from logitless.types import Completion, LMHead, PackedBatch, Prompt
from rollout_workloads import Workload
from script import add_table_arguments, among, main, update
from shapes import SHAPES, TINY, Shape

PACKAGES = ("triton", "transformers", "peft")
LAYOUTS = ("shard", "all_rows", "replicate", "sequence", "in_order")
"""Which dimension of ``parallel`` has all the GPUs; all_rows: shards, and an LM head that scores all GPUs' tokens
together (``parallel.vocabulary``); in_order: copies whose gradients are summed in one fixed order."""

_WHOLE = replace(next(shape for shape in SHAPES if shape.lora_rank), name="llama-3.1-8b", title="8B", lora_rank=None)
_WHOLE_MIXTURES = tuple(mixture.SHAPES[name] for name in ("qwen3-30b-a3b", "gpt-oss-20b"))
MIXTURES = (*_WHOLE_MIXTURES, *(mixture.with_layers(shape, 12) for shape in _WHOLE_MIXTURES))
"""In their own number of layers and in 12, as ``gpt-oss-20b-12-layers``; trained in row-invariant layers."""
MODELS = (*SHAPES, _WHOLE, *MIXTURES)
"""Also every weight of Llama-3.1-8B."""


@dataclass(frozen=True)
class Work:
    """What each row does.

    Args:
        tokens: read by a rank in a micro-batch, or by all ranks where they share sequences.
        length: of a sequence.
        micro_batches: of a rank in a step.
        steps: timed.
        warm_up_tokens: of the step before them; None: as many as in the others.
        head_budget: bytes for kept exponentials; None: the head's own choice.
        device: ``cuda`` or ``cpu``.
    """

    tokens: int = 16384
    length: int = 2048
    micro_batches: int = 1
    steps: int = 5
    warm_up_tokens: int | None = None
    head_budget: int | None = None
    device: str = "cuda"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``benchmarks/scale.py``."""
    names = ",".join(shape.name for shape in MODELS if shape is not TINY and shape not in MIXTURES)
    others = ",".join(shape.name for shape in (TINY, *MIXTURES))
    parser.add_argument("--models", default=names, help=f"by commas, of {names},{others}")
    parser.add_argument("--gpus", default="1,2,4", help="numbers of GPUs, by commas; begin with 1")
    parser.add_argument("--layouts", default="shard,replicate", help=f"by commas, of {','.join(LAYOUTS)}")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch of each GPU (of all, if sequence)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each GPU in a step")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after one that is not")
    parser.add_argument("--warm-up-tokens", type=int, help="of the step that is not timed, where others take minutes")
    parser.add_argument("--head-budget", type=int, help="bytes that the head may keep; default: its own")
    parser.add_argument("--head", action="store_true", help="time the head over shards as well")
    parser.add_argument("--block", help="a whole block instead of steps, of so much work a GPU, as 64x8-512-1:512")
    add_table_arguments(parser)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the tool itself with --models tiny")
    parser.add_argument("--order", type=json.loads, help=argparse.SUPPRESS)  # of a process that torchrun started


def run(args: argparse.Namespace) -> int:
    """Measure every model on every number of GPUs and add the rows to ``scale-<model>.json``; 0 when all is well."""
    if args.table is not None:
        return update(args.table, "scale", scale_report.tables(args.output), check=args.check)
    if args.order is not None:
        _rank(args.order)
        return 0
    counts = [int(n) for n in args.gpus.split(",")]
    if args.device == "cuda" and torch.cuda.device_count() < max(counts):
        raise UnavailableError(
            needed=f"{max(counts)} CUDA devices",
            given=str(torch.cuda.device_count()),
            remedy="Name fewer with --gpus, or use --device cpu --models tiny to try the tool itself.",
        )
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.models.split(","):
        _shape(name)
    for gpus in counts:
        _launched(args, gpus)
    return 0


def _launched(args: argparse.Namespace, gpus: int) -> None:
    """Measure by processes that torchrun starts; each row is kept as it comes."""
    work = Work(
        args.tokens,
        args.length,
        args.micro_batches,
        args.steps,
        args.warm_up_tokens,
        args.head_budget,
        args.device,
    )
    layouts = [each for each in args.layouts.split(",") if gpus > 1 or each == "in_order"] or ["shard"]
    if gpus == 1 and "shard" not in layouts:
        layouts.insert(0, "shard")
    order = {"models": args.models.split(","), "layouts": layouts, "head": args.head and gpus > 1, "work": asdict(work)}
    if args.block is not None:
        order |= {"layouts": args.layouts.split(","), "head": False, "block": args.block}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(gpus), __file__, "--order", json.dumps(order)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as running,
    ):
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith("{"):
                print(line, end="", flush=True)
                _keep(args, json.loads(line))
        if running.wait():
            errors.seek(0)
            said = [line for line in errors.read().splitlines() if "Error" in line]
            raise UnavailableError(
                needed=f"{gpus} processes that train {args.models}",
                given=(said or ["nothing"])[0],
                remedy="Give fewer --tokens, or a smaller model.",
            )


def _keep(args: argparse.Namespace, row: dict[str, Any]) -> None:
    """Add a row to its model's file, in the place of an older one of the same work."""
    path = args.output / f"scale-{row['model']}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [each for each in rows if _key(each) != _key(row)] + [row]
    of_one = {
        (_is_block(each) and each["layout"], *_work_of(each)): each["tokens_per_second"]
        for each in rows
        if each["gpus"] == 1 and (each["layout"] == "shard" or _is_block(each))
    }
    for each in rows:
        if "tokens_per_second" in each:
            alone = of_one.get((_is_block(each) and each["layout"], *_work_of(each)))
            each["efficiency"] = None if alone is None else each["tokens_per_second"] / (alone * each["gpus"])
    rows.sort(key=lambda each: (each["gpus"], _work_of(each)[:3], each["layout"]))
    write_result(path, {"environment": environment(args.device, PACKAGES), "model": row["model"], "rows": rows})


def _is_block(row: dict[str, Any]) -> bool:
    return str(row["layout"]).startswith("block")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is of."""
    return row["gpus"], row["layout"], _work_of(row)


def _work_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What each GPU does, or all of them where they share sequences."""
    return tuple(row[name] for name in ("tokens", "length", "micro_batches", "head_budget"))


def measured(ranks: Ranks, shape: Shape, layout: str, work: Work) -> dict[str, Any]:
    """The row of this process's run.

    Args:
        ranks: all of them.
        shape: of the model.
        layout: of ``LAYOUTS``.
        work: of each rank.
    """
    arrangement = _arrangement(ranks.world, layout)
    device = work.device
    ranks = ranks.arranged(arrangement)
    model = shape.build(device)
    if shape.lora_rank is None:
        lower_to(torch.bfloat16, model.parameters())
    if shape in MIXTURES and device == "cuda":
        from logitless.models.row_invariant.layers import install_row_invariant  # needs Triton

        install_row_invariant(model)
    forecast = training_memory(
        model,
        arrangement,
        tokens=work.tokens // arrangement.sequence,
        head_budget=work.head_budget,
        in_order=layout == "in_order",
        micro_batches=work.micro_batches,
    )
    sent = traffic_of_rank(
        model,
        arrangement,
        rows=work.micro_batches,
        tokens_per_row=work.tokens,
        in_order=layout == "in_order",
        all_rows=layout == "all_rows",
    )
    policy = Policy(model, memory_budget=work.head_budget)
    if arrangement.is_sharded:
        policy.shard(arrangement.mesh(device, ranks.timeout), all_rows=layout == "all_rows")
    if ranks.sequence is not None:
        policy.share_sequences(ranks.sequence)
    optimizer = adamw(policy.model.parameters(), OptimizerSection(), policy.device)
    batch = _batch(shape, work.tokens, work.length, seed=ranks.data_rank)
    first = batch
    if work.warm_up_tokens is not None:
        first = _batch(shape, work.warm_up_tokens, min(work.length, work.warm_up_tokens), seed=ranks.data_rank)
    seconds = []
    for step in range(work.steps + 1):
        ranks.barrier()
        _wait(device)
        began = time.perf_counter()
        _add_gradients(policy, batch if step else first, ranks, work, in_order=layout == "in_order")
        take_step(optimizer, rate=0.0, max_grad_norm=1.0, ranks=ranks, as_several=layout == "in_order")
        _wait(device)
        if step:
            seconds.append(float(ranks.max(time.perf_counter() - began)))
        elif device == "cuda":
            torch.cuda.reset_peak_memory_stats()
    parts = ranks.world // arrangement.sequence
    shards = [local_part(parameter) for parameter in policy.named_parameters().values()]
    return {
        "gpus": ranks.world,
        "model": shape.name,
        "layout": layout,
        "parallel": asdict(arrangement),
        "tokens": work.tokens,
        "length": work.length,
        "micro_batches": work.micro_batches,
        "head_budget": work.head_budget,
        "tokens_per_second": parts * work.tokens * work.micro_batches / statistics.median(seconds),
        "seconds": seconds,
        "peak_bytes": ranks.max(torch.cuda.max_memory_allocated() if device == "cuda" else 0),
        "forecast_bytes": forecast.peak_bytes,
        "weight_bytes": ranks.max(sum(part.numel() * part.element_size() for part in shards)),
        "sent_bytes": sum(sent.values()),
        "bytes_per_second": _bytes_per_second(ranks, device),
    }


def _add_gradients(policy: Policy, batch: PackedBatch, ranks: Ranks, work: Work, *, in_order: bool) -> None:
    """A step's gradients on this rank, the sums over all of them."""
    parameters = [p for p in policy.named_parameters().values() if p.requires_grad]
    total = TreeSum()
    for _ in range(work.micro_batches):
        scores = policy.scores(batch, temperature=1.0, backend="auto")
        (scores.logp.sum() / work.tokens).backward()  # type: ignore[no-untyped-call]
        if in_order:
            total.add([p.grad for p in parameters])
            for p in parameters:
                p.grad = None
    if not in_order:
        ranks.sum_gradients(parameters)
        return
    for p, gradient in zip(parameters, total.whole(), strict=True):
        p.grad = gradient
    ranks.sum_gradients_in_order(parameters)


def head_over_shards(ranks: Ranks, shape: Shape, work: Work) -> dict[str, Any]:
    """Seconds of the head's forward and backward where ranks have shards of its weight and tokens of their own.

    Args:
        ranks: all of them.
        shape: of the model whose head it is.
        work: ``tokens`` rows on each rank.

    Returns:
        A row with ``waits``, where every shard and sum is waited for, and ``overlaps``, where the next ones are under
        way meanwhile; and ``whole``, of a rank that has all of the weight and nobody to wait for.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    device, width = work.device, int(shape.config["hidden_size"])
    generator = torch.Generator(device).manual_seed(ranks.rank)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(work.tokens, width, device=device, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(0, shape.vocabulary, (work.tokens,), device=device, generator=generator)
    full = (torch.randn(shape.vocabulary, width, device=device, generator=generator) * width**-0.5).to(dtype)
    cut = distribute_tensor(full, Arrangement(1, ranks.world, 1).mesh(device), [Shard(0)])

    def timed(weight: torch.Tensor) -> float:
        weight = weight.detach().requires_grad_(shape.lora_rank is None)
        seconds = []
        for _ in range(work.steps + 1):
            ranks.barrier()
            _wait(device)
            began = time.perf_counter()
            token_scores(hidden, LMHead(weight), target, memory_budget=work.head_budget).logp.sum().backward()  # type: ignore[no-untyped-call]
            _wait(device)
            seconds.append(float(ranks.max(time.perf_counter() - began)))
            hidden.grad = weight.grad = None
        return statistics.median(seconds[1:])

    found = {"whole": timed(full)}
    for name, ahead in (("waits", 0), ("overlaps", sharded.AHEAD)):
        before, sharded.AHEAD = sharded.AHEAD, ahead
        try:
            found[name] = timed(cut)
        finally:
            sharded.AHEAD = before
    named = {"gpus": ranks.world, "model": shape.name, "layout": "head"}
    sizes = {"tokens": work.tokens, "length": 1, "micro_batches": 1, "head_budget": work.head_budget}
    return named | sizes | {"seconds": found}


def _arrangement(world: int, layout: str) -> Arrangement:
    [layout] = among("a layout", layout, LAYOUTS)
    return Arrangement(**{{"in_order": "replicate", "all_rows": "shard"}.get(layout, layout): world})


def _shape(name: str) -> Shape:
    known = {shape.name: shape for shape in MODELS}
    return known[among("a model", name, tuple(known))[0]]


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


def _rank(order: dict[str, Any]) -> None:
    """All rows of one number of GPUs, printed by the first rank as they come."""
    work = Work(**order["work"])
    with ranks_of_environment(work.device) as ranks:
        for name in order["models"]:
            rows: list[Callable[[], dict[str, Any]]] = [
                partial(measured, ranks, _shape(name), layout, work) for layout in order["layouts"]
            ]
            if "block" in order:
                from scale_block import block_over_ranks  # needs Triton

                drawn = Workload.parse(order["block"])
                rows = [
                    partial(block_over_ranks, ranks, _shape(name), layout, drawn, work.device)
                    for layout in order["layouts"]
                ]
            if order["head"]:
                rows.append(partial(head_over_shards, ranks, _shape(name), work))
            for row in rows:
                found = row()
                release(work.device)
                if ranks.is_first:
                    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
