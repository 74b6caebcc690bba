"""Compares `logitless doctor`'s forecast of a block with blocks of a real run: seconds and peak memory.

    python benchmarks/forecast.py                          # the cases of this machine that its results lack
    python benchmarks/forecast.py --cases length-toy --again
    python benchmarks/forecast.py --keep-runs              # forecasts anew, beside the runs that were measured
    python benchmarks/forecast.py --table                  # writes the results into docs/doctor.md

Forecast and run each have a process of their own. The run's time is the median over all blocks but the first, which
compiles. Both are repeated in turn, because the machine's speed varies, and the medians are compared. The learning rate
is almost 0, so that completions do not change in length.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from logitless.bench.machine import environment, write_result
from logitless.doctor.forecast import Forecast, forecast_of
from logitless.train.plan.run_plan import plan_of
from logitless.train.recipe.loading import load_recipe
from logitless.train.record.memory import size_text
from logitless.train.run import run_recipe
from script import ROOT, command_line, parsed, short_name

STILL = ("train.optimizer.learning_rate=1e-12", "train.optimizer.warmup_steps=0")
WITHOUT_A_HUB = (
    "model.random_weights=true",
    "model.tokenizer=recipes/dry-run/tokenizer",
    "data.held_out=null",
    "rewards=[{name: regex, pattern: '.*'}]",
    "algorithm.advantage={name: raw}",
)
QUESTIONS = "data.train={name: file, path: recipes/dry-run/gsm8k.jsonl, columns: {prompt: question}}"
"""Eight of them."""
SMALL = (*WITHOUT_A_HUB, QUESTIONS, "model.source=recipes/dry-run/qwen2.5-0.5b", "rollout.prompts_per_block=8")


@dataclass(frozen=True)
class Case:
    """A recipe as it is measured.

    Args:
        recipe: name of a file of ``recipes/``.
        overrides: of its keys.
        blocks: of a run.
    """

    recipe: str
    overrides: tuple[str, ...] = ()
    blocks: int = 8


EVERYWHERE = {"length-toy": Case("length-toy")}
ON_A_CPU = {
    "calculator": Case("calculator", ("data.held_out=null", "warm_start=null"), 6),
    "length-toy, four rounds": Case("length-toy", ("rollout.max_rows=32", "train.tokens_per_step=640")),
}
ON_A_GPU = {
    "0.5b": Case("qwen2.5-0.5b-gsm8k", (*SMALL, "rollout.completions_per_prompt=64"), 3),
    "0.5b, transformers' layers": Case(
        "qwen2.5-0.5b-gsm8k",
        (
            *SMALL,
            "rollout.completions_per_prompt=64",
            "rollout.sampling={max_new_tokens: 64}",
            "model.trained_dtype=float32",
            "model.autocast=bfloat16",
            "model.gradient_checkpointing=true",
        ),
        3,
    ),
    "1.7b on 24 GB": Case(
        "qwen3-1.7b-gsm8k-24gb",
        (
            *SMALL[:-2],
            "model.source=recipes/dry-run/qwen3-1.7b",
            "rollout.prompts_per_block=8",
            "rollout.completions_per_prompt=12",
            "rollout.max_rows=48",
            "rollout.sampling={max_new_tokens: 256}",
            "train.tokens_per_step=12288",
        ),
        2,
    ),
}


def forecast(recipe: Path, overrides: list[str]) -> Forecast:
    """The forecast, in this process."""
    checked = load_recipe(recipe, overrides)
    return forecast_of(checked, plan_of(checked))


def real(recipe: Path, overrides: list[str], blocks: int) -> tuple[float, int, list[dict[str, Any]]]:
    """Median seconds of a block, peak memory, and the times of each record of a run."""
    with tempfile.TemporaryDirectory() as output:
        overrides = [*overrides, f"train.blocks={blocks}", f"output={output}", "writers=[]", "data.held_out=null"]
        folder = run_recipe(load_recipe(recipe, [*overrides, "rollout.zero_signal=keep"])).folder
        records = [record for record in folder.read_metrics() if record["step"]]
    seconds: dict[int, float] = {}
    for record in records:
        phases = (record.get(f"time/{phase}_seconds") or 0.0 for phase in ("rollout", "scoring", "training"))
        seconds[record["block"]] = seconds.get(record["block"], 0.0) + sum(phases)
    later = statistics.median([value for block, value in seconds.items() if block > 1])
    kept = [{key: v for key, v in record.items() if key.startswith(("time/", "block"))} for record in records]
    return later, records[-1]["memory/peak_bytes"], kept


def compared(name: str, case: Case, repeats: int, before: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Both, and how far the forecast is off, as a fraction of the run's; after each repeat.

    Args:
        name: of the case.
        case: to be measured.
        repeats: of each.
        before: a row of the case whose runs stand; only forecasts are made.
    """
    recipe, overrides = ROOT / "recipes" / f"{case.recipe}.yaml", [*STILL, *case.overrides]
    foretold, ran = list[Forecast](), list[tuple[float, int, list[dict[str, Any]]]]()
    spawn = get_context("spawn")
    for done in range(1, repeats + 1):
        with ProcessPoolExecutor(1, mp_context=spawn) as first, ProcessPoolExecutor(1, mp_context=spawn) as second:
            if before is None:
                second.submit(int).result()  # its imports are over: beside a forecast they would be measured with it
            foretold.append(first.submit(forecast, recipe, overrides).result())
            print(f"{name}, repeat {done}\n{foretold[-1]}", flush=True)  # there also where the run is cut off
            first.shutdown()
            if before is None:
                ran.append(second.submit(real, recipe, overrides, case.blocks).result())
        if before is None:
            of_runs = {
                "run_block_seconds": statistics.median(each for each, _, _ in ran),
                "run_seconds": [records for _, _, records in ran],
                "run_peak_bytes": statistics.median(peak for _, peak, _ in ran),
            }
        else:
            of_runs = {key: before[key] for key in ("run_block_seconds", "run_seconds", "run_peak_bytes")}
        expected = statistics.median(each.block_seconds for each in foretold)
        held = statistics.median(each.peak_bytes for each in foretold)
        yield {
            "case": name,
            "recipe": case.recipe,
            "overrides": overrides,
            "blocks": case.blocks,
            "repeats": done,
            "share": foretold[0].share,
            "forecast_block_seconds": expected,
            "seconds_off": expected / of_runs["run_block_seconds"] - 1,
            "forecast_seconds": [dict(each.seconds) for each in foretold],
            "measured_batches": [[dict(batch) for batch in each.batches] for each in foretold],
            "forecast_peak_bytes": held,
            "planned_bytes": foretold[0].planned_bytes,
            "peak_off": held / of_runs["run_peak_bytes"] - 1,
            **of_runs,
        }


def tables(results: Path) -> dict[str, str]:
    """Each case of each machine: the forecast beside the run."""
    lines = [
        "| Case | On | A block, forecast | in a run | off | Memory, forecast | in a run | off |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for path in sorted(results.glob("forecast-*.json")):
        document = json.loads(path.read_text())
        where = document["environment"]
        on = "a CPU" if where["gpu"] == "none" else where["gpu"]
        for row in document["rows"]:
            seconds = [f"{row[f'{name}_block_seconds']:.3g} s" for name in ("forecast", "run")]
            held = [size_text(row[f"{name}_peak_bytes"]) for name in ("forecast", "run")]
            times, sizes = " | ".join(seconds), " | ".join(held)
            off = f"{row['seconds_off']:+.1%}", f"{row['peak_off']:+.1%}"
            lines.append(f"| {row['case']} | {on} | {times} | {off[0]} | {sizes} | {off[1]} |")
    return {"": "\n".join(lines)}


def main() -> None:
    """Measure the cases and keep a row of each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = EVERYWHERE | (ON_A_GPU if device == "cuda" else ON_A_CPU)
    parser = command_line(__doc__)
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases), metavar="CASE")
    parser.add_argument("--again", action="store_true", help="measure cases that have a row, too")
    parser.add_argument("--keep-runs", action="store_true", help="only forecast anew, beside the runs that rows have")
    parser.add_argument("--repeats", type=int, default=3, help="forecasts and runs of each")
    options = parsed(parser, tables)
    options.output.mkdir(parents=True, exist_ok=True)
    machine = environment(device, ("triton", "transformers"))
    path, rows = options.output / f"forecast-{short_name(device)}.json", dict[str, dict[str, Any]]()
    if path.exists() and (before := json.loads(path.read_text()))["environment"] == machine:
        rows = {row["case"]: row for row in before["rows"]}
    for name in options.cases:
        before = rows.get(name) if options.keep_runs else None
        if name not in rows or options.again or before is not None:
            for row in compared(name, cases[name], options.repeats, before):
                rows[name] = row
                found = f"{row['forecast_block_seconds']:.3g} s forecast, {row['run_block_seconds']:.3g} s in a run"
                print(f"{name}: {found}, memory {row['peak_off']:+.1%}", flush=True)
                write_result(path, {"environment": machine, "rows": list(rows.values())})


if __name__ == "__main__":
    main()
