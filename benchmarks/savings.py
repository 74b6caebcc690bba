"""Trains the quickstart with every saving of the training step on and off, and draws the curves on top of each other.

python benchmarks/savings.py --seeds 0 1

Each block is used once, by one step, and groups without a signal are kept, so that every saving has something to save.
"""

from pathlib import Path
from typing import Any

from logitless.train.report.plots import line_plot
from script import RESULTS, command_line, completed, metrics_of, reward_curve, summary_of, trained

RESULT = RESULTS / "savings.json"
SAVINGS = ("share_prompts", "pack_by_cost", "skip_zero_advantage", "reuse_logp")
WAYS = {"every saving on": "true", "every saving off": "false"}
SUMMED = ("optimizer/tokens", "optimizer/read_tokens", "saving/shared_tokens", "saving/zero_advantage_tokens")


def run(output: Path, way: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: its mean reward and entropy a step, held-out accuracy, seconds, and what was read and saved."""
    settings = [f"seed={seed}", f"train.blocks={steps}", "train.epochs_per_block=1", "rollout.zero_signal=keep"]
    settings += [f"evaluation.every_blocks={steps}", f"checkpoint.every_blocks={steps}", "writers=[]"]
    folder = trained("quickstart", "run", output, *settings, *(f"train.{saving}={WAYS[way]}" for saving in SAVINGS))
    steps_taken = [line for line in metrics_of(folder) if "loss/total" in line]
    summary = summary_of(folder)
    return {
        **{key: summary[key] for key in ("accuracy_before", "accuracy_after")},
        "seconds": {phase: round(summary["seconds"][phase], 1) for phase in ("scoring", "training")},
        **{key: sum(line[key] for line in steps_taken) for key in SUMMED},
        "reward": [line["reward/mean"] for line in steps_taken],
        "entropy": [round(line["entropy/mean"], 5) for line in steps_taken],
    }


def draw(runs: list[dict[str, Any]], out: Path) -> None:
    """The mean reward of each run, smoothed over ten steps."""
    lines = [reward_curve(f"{found['way']}, seed {found['seed']}", found["reward"]) for found in runs]
    out.write_text(line_plot(lines, x_label="step", y_label="mean reward, over ten steps"))


def main() -> None:
    """Both ways at every seed that the result file lacks, and the picture of all."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    wanted = [{"way": way, "seed": seed, "steps": options.steps} for seed in options.seeds for way in WAYS]
    runs = completed(options.out, wanted, run)
    draw(runs, options.out.with_suffix(".svg"))
    for found in runs:
        seconds = found["seconds"]
        print(
            f"{found['way']}, seed {found['seed']}: {found['accuracy_before']:.3f} -> {found['accuracy_after']:.3f}, "
            f"scoring {seconds['scoring']:.0f} s, training {seconds['training']:.0f} s"
        )


if __name__ == "__main__":
    main()
