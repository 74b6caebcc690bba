"""Runs the calculator recipe at several seeds and records what came of it.

python benchmarks/calculator.py --seeds 0 1 2 --out benchmarks/results/calculator.json
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quickstart import ROOT, record

from logitless.train.run_folder import open_run_folder


def run(seed: int, output: Path) -> dict[str, Any]:
    """The summary of one run, what it took, and how often it asked the calculator in its first and last block."""
    command = [sys.executable, "-m", "logitless.cli.main", "train", "recipes/calculator.yaml"]
    settings = [f"seed={seed}", f"name=seed-{seed}", f"output={output}", "model.device=cpu"]
    start, used = time.perf_counter(), _processor_seconds()
    subprocess.run([*command, *(word for s in settings for word in ("--set", s))], cwd=ROOT, check=True)
    folder = output / f"seed-{seed}"
    blocks = open_run_folder(folder).rollout_blocks()
    return {
        "seed": seed,
        **json.loads((folder / "summary.json").read_text()),
        "wall_clock_seconds": time.perf_counter() - start,
        "processor_seconds": _processor_seconds() - used,
        "two_turns_first_block": _share_with_two_turns(folder, blocks[0]),
        "two_turns_last_block": _share_with_two_turns(folder, blocks[-1]),
    }


def _processor_seconds() -> float:
    """Of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _share_with_two_turns(folder: Path, block: int) -> float:
    turns = [row["num_turns"] for row in open_run_folder(folder).read_block(block)]
    return sum(number == 2 for number in turns) / len(turns)


def main() -> None:
    """One run a seed, one after the other, and a file with all summaries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "calculator.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(seed, Path(folder)) for seed in options.seeds]
    record(runs, options.out)
    for found in runs:
        print(
            f"seed {found['seed']}: held-out accuracy {found['accuracy_before']:.3f} -> {found['accuracy_after']:.3f} "
            f"in {found['processor_seconds']:.0f} s of the processor"
        )


if __name__ == "__main__":
    main()
