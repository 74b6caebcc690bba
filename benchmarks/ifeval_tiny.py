"""Runs the ifeval-tiny recipe at several seeds and records what came of it.

python benchmarks/ifeval_tiny.py --seeds 0 1 2 --out benchmarks/results/ifeval-tiny.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quickstart import ROOT, record


def run(seed: int, output: Path) -> dict[str, Any]:
    """The summary of one run, with the pass rate of every constraint in its first and last block."""
    command = [sys.executable, "-m", "logitless.cli.main", "train", "recipes/ifeval-tiny.yaml"]
    settings = [f"seed={seed}", f"name=seed-{seed}", f"output={output}", "model.device=cpu"]
    start = time.perf_counter()
    subprocess.run([*command, *(word for s in settings for word in ("--set", s))], cwd=ROOT, check=True)
    wall_clock_seconds = time.perf_counter() - start
    folder = output / f"seed-{seed}"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [_pass_rates(record) for record in records if _pass_rates(record)]
    return {
        "seed": seed,
        **json.loads((folder / "summary.json").read_text()),
        "wall_clock_seconds": wall_clock_seconds,
        "pass_rates_first_block": rates[0],
        "pass_rates_last_block": rates[-1],
    }


def _pass_rates(record: dict[str, float]) -> dict[str, float]:
    kept = {name.split("/")[1]: rate for name, rate in record.items() if name.endswith("/pass_rate")}
    return {name: rate for name, rate in kept.items() if ":" in name}


def main() -> None:
    """One run a seed, one after the other, and a file with all summaries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "ifeval-tiny.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(seed, Path(folder)) for seed in options.seeds]
    record(runs, options.out)
    for found in runs:
        print(
            f"seed {found['seed']}: prompt-level strict accuracy {found['accuracy_before']:.3f} -> "
            f"{found['accuracy_after']:.3f} in {found['wall_clock_seconds']:.0f} s"
        )


if __name__ == "__main__":
    main()
