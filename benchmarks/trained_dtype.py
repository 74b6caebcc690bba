"""Trains the quickstart in float32, in float32 under autocast and in bfloat16 weights, and draws the three curves.

python benchmarks/trained_dtype.py --seeds 0 1 2
"""

from pathlib import Path
from typing import Any

from logitless.train.report.plots import line_plot
from script import RESULTS, command_line, completed, metrics_of, reward_curve, summary_of, trained

RESULT = RESULTS / "trained-dtype.json"
WAYS = {
    "float32": [],
    "float32, bfloat16 autocast": ["model.autocast=bfloat16"],
    "bfloat16, float32 masters": ["model.trained_dtype=bfloat16"],
}


def run(output: Path, way: str, seed: int, blocks: int) -> dict[str, Any]:
    """One run: its mean reward a block, and held-out accuracy before and after."""
    settings = [f"seed={seed}", f"train.blocks={blocks}", f"evaluation.every_blocks={blocks}", "writers=[]", *WAYS[way]]
    folder = trained("quickstart", "run", output, *settings, f"checkpoint.every_blocks={blocks}")
    summary = summary_of(folder)
    return {
        **{key: summary[key] for key in ("accuracy_before", "accuracy_after")},
        "reward": [line["reward/mean"] for line in metrics_of(folder) if "reward/mean" in line],
    }


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
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    wanted = [{"way": way, "seed": seed, "blocks": options.blocks} for seed in options.seeds for way in WAYS]
    runs = completed(options.out, wanted, run)
    draw(runs, options.out.with_suffix(".svg"))
    for found in runs:
        print(f"{found['way']}, seed {found['seed']}: {found['accuracy_before']:.3f} -> {found['accuracy_after']:.3f}")


if __name__ == "__main__":
    main()
