"""Runs a block of each 24 GB recipe under a limit of 24 GiB and records the peak beside the plan's.

    python benchmarks/recipe_memory.py

No weights are downloaded: the recipes' stand-ins under ``recipes/dry-run`` give shapes, tokenizer and prompts, and the
weights are random. Every completion is then as long as it may be and, with a constant reward and raw rewards as
advantages, every token has a gradient: the memory is a real run's at its worst, and nothing is learned. Fewer
completions than in the recipe, and never fewer than are decoded at once or make two micro-batches.
"""

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from logitless.bench.machine import environment, write_result
from logitless.errors import UnavailableError
from logitless.train.plan import GIB, plan_of
from logitless.train.recipe import load_recipe
from logitless.train.run import start

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "recipe-memory.json"
LIMIT = 24 * GIB

STAND_INS = {
    "qwen2.5-0.5b-gsm8k": [
        "model.source=recipes/dry-run/qwen2.5-0.5b",
        "data.train={name: file, path: recipes/dry-run/gsm8k.jsonl, columns: {prompt: question}}",
        "rollout.completions_per_prompt=32",
    ],
    "llama3.1-8b-ifeval-24gb": [
        "model.source=recipes/dry-run/llama3.1-8b",
        "data.train={name: file, path: recipes/dry-run/ifeval.jsonl, columns: {id: key}}",
        "rollout.completions_per_prompt=4",
    ],
}
EVERYTHING_AT_ITS_LONGEST = [
    "model.random_weights=true",
    "model.tokenizer=recipes/dry-run/tokenizer",
    "data.held_out=null",
    "rollout.prompts_per_block=8",
    "rollout.zero_signal=keep",
    "rewards=[{name: regex, pattern: '.*'}]",
    "algorithm.advantage={name: raw}",
    "train.blocks=1",
]


def measure(recipe: Path, overrides: list[str]) -> dict[str, Any]:
    """The plan and the peak of one run, which has this process to itself; no peak without a GPU."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_per_process_memory_fraction(min(1.0, LIMIT / torch.cuda.get_device_properties(0).total_memory))
    with tempfile.TemporaryDirectory() as output:
        checked = load_recipe(recipe, [*overrides, f"output={output}"])
        plan = plan_of(checked)
        began = time.perf_counter()
        folder, _ = start(checked)
        seconds = time.perf_counter() - began
        summary = json.loads(folder.summary.read_text())
    return {
        "recipe": checked.name,
        "overrides": overrides,
        "planned_bytes": dict(plan.memory_bytes),
        "planned_total_bytes": plan.total_bytes,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "wall_clock_seconds": seconds,
        "seconds": summary["seconds"],
    }


def main() -> None:
    """Both recipes, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=STAND_INS, default=list(STAND_INS))
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise UnavailableError(
            needed="a CUDA device", given="none", remedy="Use --dry-run of the recipes for the plan."
        )
    rows = []
    for name in options.recipes:
        overrides = [*EVERYTHING_AT_ITS_LONGEST, *STAND_INS[name]]
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
            rows.append(processes.submit(measure, Path(f"recipes/{name}.yaml"), overrides).result())
        found = rows[-1]
        print(f"{name}: planned {found['planned_total_bytes'] / GIB:.1f} GiB, peak", end=" ")
        print(
            f"{found['peak_allocated_bytes'] / GIB:.1f}, reserved {found['peak_reserved_bytes'] / GIB:.1f}", flush=True
        )
        machine = environment("cuda", ("triton", "transformers", "peft"))
        write_result(options.out, {"environment": machine, "limit_bytes": LIMIT, "rows": rows})


if __name__ == "__main__":
    main()
