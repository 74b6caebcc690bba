"""``benchmarks/apart.py``: sampling on GPUs of its own beside training, against one GPU that does both in turns.

The parts of a run (collector, learner, engine, weights sent from rank to rank) sample and train on whole blocks of a
model with random weights, which are drawn on the GPU; the lengths of completions are forced. Blocks are timed from the
end of one to the end of the next, in the steady state: before them comes one with completions of an eighth, in which
kernels compile, and ``--warm-up`` whole ones. If kernels still compiled in a timed block, ``phases`` has
``compilation``, which ``over_one_gpu`` leaves out; ``one_gpu`` is what it is over, measured in the same call.
``same_weights`` says whether the weights after the last block are those of one GPU in turns at the
same staleness, in every bit: only with ``--turns`` where the staleness is above 0, and not in flight, where they depend
on time. ``mixed_fraction`` is the share of completions that weights of several versions sampled; ``push_seconds`` is
the median of the pushes of trained weights, ``most_push_seconds`` the longest (rows without it have the shortest as
``push_seconds``), ``whole_push_seconds`` one of every weight, after the last block.

    python benchmarks/apart.py --models qwen2.5-0.5b,qwen3-1.7b --arrangements 1+1 --staleness 0,1
    python benchmarks/apart.py --models llama-3.1-8b-lora --arrangements 2 --staleness 0    # two GPUs in turns
    python benchmarks/apart.py --models llama-3.1-8b-lora --staleness 1 --warm-up 0 --blocks 1
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import rollout_contenders as contenders
from logitless.bench.machine import environment, release
from logitless.distributed.ranks import Ranks, ranks_of_environment
from logitless.models.char_tokenizer import character_tokenizer
from logitless.rollout.sampling_ranks import SamplingRanks
from logitless.train.assembly.engines import Engines, engines_on
from logitless.train.assembly.process import set_process
from logitless.train.assembly.stages import assemble, load, read
from logitless.train.loop import next_block
from logitless.train.recipe.loading import parse_recipe
from logitless.train.record.journal import Journal
from logitless.train.record.live_view import LiveView
from logitless.train.record.run_folder import RunFolder
from logitless.train.record.wall_clock import WallClock, compilations_counted
from logitless.train.run import Division, sample_only
from rollout_workloads import Workload
from script import RESULTS, Rows, digest, main, rows_of_processes, short_name, weights_drawn_on
from shapes import SHAPES, TINY

LETTERS = "abcdefgh"
SHORTER = 8
"""The first block's completions are so many times shorter than the workload's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``benchmarks/apart.py``."""
    parser.add_argument("--models", default="qwen2.5-0.5b,qwen3-1.7b", help="of shapes.py, by commas")
    parser.add_argument("--arrangements", default="1+1", help="GPUs that train + GPUs that sample, or GPUs in turns")
    parser.add_argument("--staleness", default="0,1", help="by commas")
    parser.add_argument("--in-flight", default="", help="keep, recompute, by commas: beside none, at staleness above 0")
    parser.add_argument("--turns", action="store_true", help="one GPU in turns at each staleness, to compare weights")
    parser.add_argument("--workload", default="64x8-512-64:512", help="prompts x samples, prompt tokens, new tokens")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps a block, about")
    parser.add_argument("--blocks", type=int, default=3, help="timed")
    parser.add_argument("--warm-up", type=int, default=1, help="whole blocks before them; at least the staleness")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of apart-<GPU>.json")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the tool itself with --models tiny")
    parser.add_argument("--order", type=json.loads, help=argparse.SUPPRESS)  # of a process that torchrun started


def run(args: argparse.Namespace) -> int:
    """Measure every model in every arrangement; the rows go to ``apart-<GPU>.json``."""
    if args.order is not None:
        _rank(**args.order)
        return 0
    plans = [tuple(map(int, f"{each}+0".split("+")[:2])) for each in args.arrangements.split(",")]
    staleness = [int(each) for each in args.staleness.split(",")]
    ways = [None, *filter(None, args.in_flight.split(","))]
    alone = [(1, 0, each, None) for each in sorted({0, *(staleness if args.turns else ())})]
    order = {
        "models": args.models.split(","),
        "plans": [
            *alone,
            *((*plan, each, way) for plan in plans for each in staleness for way in ways if each or not way),
        ],
        "workload": args.workload,
        "steps": args.steps,
        "blocks": args.blocks,
        "warm_up": args.warm_up,
        "device": args.device,
    }
    here = environment(args.device, ("triton", "transformers"))
    path = args.output / f"apart-{short_name(args.device)}.json"
    rows = Rows(path, here, ("model", "arrangement", "staleness", "in_flight", "workload", "steps"))
    for row in rows_of_processes(__file__, max(map(sum, plans)), order):
        rows.add(_compared(row, rows.rows))
    return 0


def _compared(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A row beside those of one GPU in turns."""
    is_alike = [all(each[name] == row[name] for name in ("model", "workload", "steps")) for each in rows]
    alone = {r["staleness"]: r for r, alike in zip(rows, is_alike, strict=True) if alike and r["arrangement"] == "1"}
    if row["arrangement"] == "1":
        alone[row["staleness"]] = row
    one = _without_compilation(alone[min(alone)])
    over = _without_compilation(row) / one
    same = None if row.get("in_flight") else alone.get(row["staleness"])
    if same is not None and (same.get("whole_blocks") != row.get("whole_blocks") or "digest" not in same):
        same = None  # weights after another number of steps, or of a file that says "weights" in place of a digest
    return {
        **row,
        "over_one_gpu": over,
        "one_gpu": one,
        "same_weights": None if same is None else same["digest"] == row["digest"],
    }


def _without_compilation(row: dict[str, Any]) -> float:
    """Tokens a second."""
    seconds = row["block_seconds"]
    return float(row["tokens_per_second"] * seconds / (seconds - row["phases"].get("compilation", 0.0)))


def _rank(
    models: list[str], plans: list[list[Any]], workload: str, steps: int, blocks: int, warm_up: int, device: str
) -> None:
    """What each process does; the first one prints the rows."""
    work = Workload.parse(workload)
    with ranks_of_environment(device) as ranks, tempfile.TemporaryDirectory() as own, weights_drawn_on(device):
        folder = ranks.broadcast_object(own)
        for name in models:
            for training, sampling, staleness, in_flight in plans:
                members = ranks.subset(range(training + sampling))
                if members is not None:
                    # a sampler is ahead by as many blocks as the staleness: the first wait for a whole one is not timed
                    before = max(warm_up, staleness)
                    place = Path(folder) / f"{name}-{training}-{sampling}-{staleness}-{in_flight}"
                    recipe = _recipe(place, name, work, training, sampling, staleness, steps, 1 + before + blocks)
                    recipe["rollout"]["in_flight"] = in_flight
                    members.barrier()
                    row = _measured(recipe, place, members, work, before, blocks, device)
                    if row is not None:
                        arrangement = f"{training}+{sampling}" if sampling else str(training)
                        row = {"model": name, "arrangement": arrangement, "staleness": staleness, **row}
                        row["in_flight"] = in_flight
                        print(json.dumps({**row, "workload": workload, "steps": steps}), flush=True)
                release(device)
                ranks.barrier()


def _recipe(
    folder: Path, name: str, work: Workload, training: int, sampling: int, staleness: int, steps: int, blocks: int
) -> dict[str, Any]:
    """The recipe of a run; its tokenizer and prompts are written into the folder."""
    shape = next(each for each in (*SHAPES, TINY) if each.name == name)
    folder.mkdir(exist_ok=True)
    character_tokenizer(LETTERS).save_pretrained(str(folder / "tokenizer"))
    texts = ("".join(LETTERS[i % 8] for i in ids) for ids in work.prompt_ids(shape.vocabulary))
    rows = (json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate(texts))
    (folder / "train.jsonl").write_text("".join(rows))
    raw = contenders.block_recipe(work, lora=shape.lora_rank is not None, gpu=shape is not TINY)
    raw["model"] |= {
        "source": dict(shape.config),
        "tokenizer": str(folder / "tokenizer"),
        "gradient_checkpointing": shape is not TINY,
    }
    raw["data"]["train"]["path"] = str(folder / "train.jsonl")
    raw["rollout"] |= {"staleness": staleness, "max_rows": 2048}
    if shape is TINY:  # this engine's lengths are forced where it looks for a stop string
        raw["rollout"]["sampling"]["stop"] = [contenders.NEVER]
    raw["rewards"] = [{"name": "length", "cap": work.most}]
    raw["train"]["tokens_per_step"] = -(-work.tokens // steps)
    raw["train"]["blocks"] = blocks + staleness  # the sampler works until the last timed one
    return raw | {"parallel": {"sampling": sampling, "replicate": training}}


def _measured(
    raw: dict[str, Any], folder: Path, everyone: Ranks, work: Workload, before: int, blocks: int, device: str
) -> dict[str, Any] | None:
    """The row of this process's blocks, of which so many whole ones are not timed; None on all ranks but the first."""
    raw["model"]["device"] = device
    recipe = parse_recipe(raw)

    def open_engines(recipe: Any, model: Any, tokenizer: Any) -> Engines:
        kind = contenders.ForcedGpu if recipe.rollout.engine.bitwise else contenders.ForcedTransformers
        engine = kind(model, tokenizer, max_rows=recipe.rollout.max_rows)
        _sample_short_first(engine, work)
        return Engines(engine, engine)

    set_process(recipe.model, seed=0)
    inputs = read(recipe, everyone)
    division = Division.of(everyone, recipe.parallel)
    if (ranks := division.training) is None:
        sample_only(inputs, division, open_engines, WallClock())
        return None
    with ExitStack() as stack:
        loaded = load(inputs, ranks)
        engines = engines_on(
            ranks, open_engines(loaded.recipe, loaded.model, inputs.tokenizer), recipe, division.exchange
        )
        stack.callback(engines.close)
        parts = assemble(inputs, loaded, engines, ranks, folder=folder)
        stack.callback(parts.collector.close)
        learner, view = parts.learner, stack.enter_context(LiveView(1, title="apart", silent=True))
        clock, ended, pushes, mixed = WallClock(), [time.perf_counter()], list[float](), list[float]()
        tokens = list[int]()
        if device == "cuda":
            stack.enter_context(compilations_counted(clock))
        journal = Journal(RunFolder(folder), view, (), learner.policy.device, ranks, clock)
        for _ in range(1 + before + blocks):
            parts.collector.expect(learner.version)
            first = engines.load_all(learner.weights(), learner.version)
            pushes = pushes or list(first.values())
            judged, block, metrics = next_block(parts.collector, learner, journal)
            tokens.append(sum(each.length for group in judged.sampled for each in group.completions))
            mixed.append(float(metrics["rollout/mixed_fraction"]))
            assert block is not None
            with journal.phase("training"):
                learner.begin(block)
                while learner.in_training:
                    learner.step()
            if device == "cuda":
                torch.cuda.synchronize()
            ended.append(time.perf_counter())
            pushes += getattr(engines.training, "transfer_numbers", {}).values()  # of the last that is over
            if ranks.is_first:
                print(f"{folder.name}: a block in {ended[-1] - ended[-2]:.1f} s", file=sys.stderr, flush=True)
            if len(mixed) == 1 + before:
                at_first = clock.seconds()
        seconds = (ended[-1] - ended[-1 - blocks]) / blocks
        trained = [each for each in pushes if each != pushes[0]]  # the first sends every weight
        push = statistics.median(trained) if trained else 0.0
        after = clock.seconds()
        parts.collector.close()
        return (
            None
            if not ranks.is_first
            else {
                "tokens_per_second": sum(tokens[-blocks:]) / blocks / seconds,
                "push_seconds": push,
                "most_push_seconds": max(trained, default=0.0),
                "push_share": push / seconds,
                "whole_push_seconds": _whole_push(engines.training, learner),
                "block_seconds": seconds,
                "whole_blocks": before + blocks,
                "mixed_fraction": sum(mixed[-blocks:]) / blocks,
                "phases": {name: (value - at_first.get(name, 0.0)) / blocks for name, value in after.items()},
                "digest": digest(learner.policy.held()),
                "gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            }
        )


def _whole_push(engine: Any, learner: Any) -> float:
    """Seconds in which every weight goes to ranks that sample and wait; 0 for an engine of this process."""
    if not isinstance(engine, SamplingRanks) or engine._ranks is None:
        return 0.0
    with engine._lock:
        engine._send(learner.version, {name: p.detach() for name, p in learner.policy.model.named_parameters()})
    return engine.transfer_numbers["weights/push_seconds"]


def _sample_short_first(engine: Any, work: Workload) -> None:
    """Force the lengths of a workload, but shorter ones in the first call."""
    plain = engine.sample
    engine.work = replace(work, least=max(1, work.least // SHORTER), most=max(1, work.most // SHORTER))

    def sample(*arguments: Any, **named: Any) -> Any:
        sampled = plain(*arguments, **named)
        engine.work = work
        return sampled

    engine.sample = sample


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
