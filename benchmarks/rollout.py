"""``benchmarks/rollout.py``: how fast completions are sampled, and what a whole block costs.

A workload is ``64x8-512-64:512``: prompts x samples, tokens of a prompt, and new tokens, whose number is drawn for each
sample from the range and forced, so that every engine samples the same lengths. The roofline is the least time that
this device's memory and matrix units allow (``roofline``). A block is sampled, scored, and trained on for its optimizer
steps. What a result file has already is not measured again, so a long run can be made of short ones (``--seconds``).
"""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import rollout_report
from logitless.bench.machine import environment, release
from rollout_workloads import Ceilings, Workload, roofline
from script import Rows, add_table_arguments, among, main, needs_gpu, short_name_of, update

PACKAGES = ("triton", "transformers", "peft")
MODELS = ("qwen2.5-0.5b", "qwen2.5-0.5b-lora", "qwen3-1.7b", "qwen3-4b", "llama-3.1-8b", "llama-3.1-8b-lora")
LAW_ALONE = (
    "qwen3-30b-a3b-8-layers", "glm-4.5-air-3-layers", "gpt-oss-20b-4-layers", "qwen3.5-9b-8-layers",
    "qwen3.5-35b-a3b-8-layers", "llama-4-scout-4-layers",
)  # fmt: skip
WORKLOADS = ("64x8-512-64:512", "8x8-512-128:2048", "256x1-512-512", "32x16-2048-128:1024")
ENGINES = ("gpu", "transformers", "generate")
BLOCK = "64x8-512-1:512"
"""131 thousand tokens."""

BLOCK_MODELS = ("qwen2.5-0.5b", "llama-3.1-8b-lora")
BLOCK_ENGINES = ("gpu", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``benchmarks/rollout.py``."""
    names = ", ".join((*MODELS, *LAW_ALONE))
    parser.add_argument(
        "--models", default="qwen2.5-0.5b,qwen3-1.7b,qwen3-4b,llama-3.1-8b-lora", help=f"by commas, of {names}"
    )
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="by commas; empty: none")
    parser.add_argument("--engines", default="gpu", help=f"by commas, of {','.join(ENGINES)}")
    parser.add_argument(
        "--blocks", default="", help=f"engines whose whole block to measure, of {','.join(BLOCK_ENGINES)}"
    )
    parser.add_argument(
        "--law",
        type=int,
        default=0,
        help="tokens of each model to compare with training, with their routes; 0: none",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after this time")
    parser.add_argument("--again", action="store_true", help="measure what the files have already")
    add_table_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measures what is missing; 0 where no token has other bits than training's, nor other experts."""
    if args.table is not None:
        return update(args.table, "rollout", rollout_report.tables(args.output), check=args.check)
    needs_gpu()
    models, engines = among("a model", args.models, (*MODELS, *LAW_ALONE)), among("an engine", args.engines, ENGINES)
    blocks = among("an engine", args.blocks, BLOCK_ENGINES)
    workloads = {name: Workload.parse(name) for name in args.workloads.split(",") if name}
    import rollout_contenders as contenders

    here = environment("cuda", PACKAGES)
    card = short_name_of(here["gpu"])
    rollouts = Rows(args.output / f"rollout-{card}.json", here, ("model", "workload", "engine"))
    whole = Rows(args.output / f"block-{card}.json", here, ("model", "engine"))
    laws = Rows(args.output / f"sampled-bits-{card}.json", here, ("model",))
    started, ceilings = time.perf_counter(), Ceilings.measured()
    release("cuda")

    def wanted(results: Rows, **identity: str) -> bool:
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
        line = (
            f"{row['model']:18} {row['mismatched_tokens']} of {row['tokens']:,} tokens have other bits than training's"
        )
        if "routes" in row:
            line += f", {row['mismatched_routes']} of {row['routes']:,} routes have other experts"
        print(line)
    return 1 if any(row["mismatched_tokens"] or row.get("mismatched_routes") for row in laws.rows) else 0


def _lines(rollouts: list[dict[str, Any]], blocks: list[dict[str, Any]]) -> Iterator[str]:
    for row in rollouts:
        yield (
            f"{row['model']:18} {row['workload']:20} {row['engine']:13}{row['tokens_per_second']:10,.0f} tokens/s"
            f"  {row['of_roofline']:4.0%} of the roofline  {row['peak_bytes'] / 2**30:6.1f} GiB"
        )
    for row in blocks:
        phases = ", ".join(f"{name} {row[name + '_seconds']:.2f} s" for name in ("rollout", "scoring", "training"))
        yield f"{row['model']:18} a block of {row['tokens']:,} tokens, {row['engine']}: {phases}"


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
