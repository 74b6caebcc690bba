"""Trains the quickstart in float32, in float32 under autocast and in bfloat16 weights, and draws the three curves.

python benchmarks/trained_dtype.py --seeds 0 1 2
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from curves import reward_curve
from quickstart import ROOT, record

from logitless.train.plots import line_plot

RESULT = ROOT / "benchmarks" / "results" / "trained-dtype.json"
WAYS = {
    "float32": [],
    "float32, bfloat16 autocast": ["model.autocast=bfloat16"],
    "bfloat16, float32 masters": ["model.trained_dtype=bfloat16"],
}


def run(way: str, seed: int, blocks: int, output: Path) -> dict[str, Any]:
    """One run: its mean reward a block, and held-out accuracy before and after."""
    name = f"{list(WAYS).index(way)}-{seed}"
    settings = [f"seed={seed}", f"name={name}", f"output={output}", f"train.blocks={blocks}", "model.device=cpu"]
    settings += [f"evaluation.every_blocks={blocks}", f"checkpoint.every_blocks={blocks}", "writers=[]", *WAYS[way]]
    command = [sys.executable, "-m", "logitless.cli.main", "train", "recipes/quickstart.yaml"]
    subprocess.run([*command, *(word for s in settings for word in ("--set", s))], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in (output / name / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    summary = json.loads((output / name / "summary.json").read_text())
    kept = {key: summary[key] for key in ("accuracy_before", "accuracy_after")}
    return {"way": way, "seed": seed, "blocks": blocks, **kept, "reward": rewards}


def draw(runs: list[dict[str, Any]], out: Path) -> None:
    """The mean reward of each way over its seeds, smoothed over ten blocks."""
    lines = []
    for way in WAYS:
        curves = [found["reward"] for found in runs if found["way"] == way]
        mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
        lines.append(reward_curve(way, mean))
    out.write_text(line_plot(lines, x_label="block", y_label="mean reward, three seeds"))


def main() -> None:
    """Every way at every seed that the result file lacks, and the picture of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    runs = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    for seed in options.seeds:
        for way in WAYS:
            if any((found["way"], found["seed"], found["blocks"]) == (way, seed, options.blocks) for found in runs):
                continue
            with tempfile.TemporaryDirectory() as folder:
                runs.append(run(way, seed, options.blocks, Path(folder)))
            record(runs, options.out)
    draw(runs, options.out.with_suffix(".svg"))
    for found in runs:
        print(f"{found['way']}, seed {found['seed']}: {found['accuracy_before']:.3f} -> {found['accuracy_after']:.3f}")


if __name__ == "__main__":
    main()
