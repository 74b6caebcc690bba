"""Trains the quickstart with every saving of the training step on and off, and draws the curves on top of each other.

python benchmarks/savings.py --seeds 0 1

Each block is used once, by one step, and groups without a signal are kept, so that every saving has something to save.
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

RESULT = ROOT / "benchmarks" / "results" / "savings.json"
SAVINGS = ("share_prompts", "pack_by_cost", "leave_out_dead", "reuse_logp")
WAYS = {"every saving on": "true", "every saving off": "false"}
SUMMED = ("optimizer/tokens", "optimizer/read_tokens", "saving/shared_tokens", "saving/dead_tokens")


def run(way: str, seed: int, steps: int, output: Path) -> dict[str, Any]:
    """One run: its mean reward and entropy a step, held-out accuracy, seconds, and what was read and saved."""
    name = f"{list(WAYS).index(way)}-{seed}"
    settings = [f"seed={seed}", f"name={name}", f"output={output}", f"train.blocks={steps}", "model.device=cpu"]
    settings += [f"evaluation.every_blocks={steps}", f"checkpoint.every_blocks={steps}", "writers=[]"]
    settings += ["train.epochs_per_block=1", "rollout.zero_signal=keep"]
    settings += [f"train.{saving}={WAYS[way]}" for saving in SAVINGS]
    command = [sys.executable, "-m", "logitless.cli.main", "train", "recipes/quickstart.yaml"]
    subprocess.run([*command, *(word for s in settings for word in ("--set", s))], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in (output / name / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "loss/total" in line]
    summary = json.loads((output / name / "summary.json").read_text())
    return {
        "way": way,
        "seed": seed,
        "steps": steps,
        **{key: summary[key] for key in ("accuracy_before", "accuracy_after")},
        "seconds": {phase: round(summary["seconds"][phase], 1) for phase in ("scoring", "training")},
        **{key: sum(line[key] for line in trained) for key in SUMMED},
        "reward": [line["reward/mean"] for line in trained],
        "entropy": [round(line["entropy/mean"], 5) for line in trained],
    }


def draw(runs: list[dict[str, Any]], out: Path) -> None:
    """The mean reward of each run, smoothed over ten steps."""
    lines = [reward_curve(f"{found['way']}, seed {found['seed']}", found["reward"]) for found in runs]
    out.write_text(line_plot(lines, x_label="step", y_label="mean reward, over ten steps"))


def main() -> None:
    """Both ways at every seed that the result file lacks, and the picture of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    runs = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    for seed in options.seeds:
        for way in WAYS:
            if any((found["way"], found["seed"], found["steps"]) == (way, seed, options.steps) for found in runs):
                continue
            with tempfile.TemporaryDirectory() as folder:
                runs.append(run(way, seed, options.steps, Path(folder)))
            record(runs, options.out)
    draw(runs, options.out.with_suffix(".svg"))
    for found in runs:
        seconds = found["seconds"]
        print(
            f"{found['way']}, seed {found['seed']}: {found['accuracy_before']:.3f} -> {found['accuracy_after']:.3f}, "
            f"scoring {seconds['scoring']:.0f} s, training {seconds['training']:.0f} s"
        )


if __name__ == "__main__":
    main()
