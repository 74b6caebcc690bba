"""Teaches students of the quickstart's size by a trained quickstart, beside GRPO alone, and records held-out accuracy.

python benchmarks/distillation.py --seeds 1 2 3
python benchmarks/distillation.py --table      # the table of docs/distillation.md
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from script import command_line, metrics_of, parsed, record, summary_of, trained

RESULT = "distillation-cpu.json"
TEACHER_BLOCKS, BLOCKS, EVERY = 240, 20, 5
_ALONE = ["rollout.zero_signal=keep", "teacher.alone=true"]
WAYS = {
    "GRPO, without a teacher": ["teacher=null", "rollout.zero_signal=drop"],
    "`teacher.divergence: reverse_kl`": [*_ALONE, "teacher.divergence=reverse_kl"],
    "`teacher.advantage: true`": [*_ALONE, "teacher.divergence=null", "teacher.advantage=1"],
}


def run(output: Path, teacher: Path, way: str, seed: int) -> dict[str, Any]:
    """One student: tokens sampled and held-out accuracy at each evaluation. Students of a seed share a warm start."""
    begun = output / f"0-{seed}" / "warm_start"
    sizes = [f"train.blocks={BLOCKS}", f"evaluation.every_blocks={EVERY}", f"checkpoint.every_blocks={BLOCKS}"]
    settings = [f"teacher.source={teacher}", *WAYS[way], *sizes, "writers=[]", f"seed={seed}"]
    if begun.exists():
        settings += ["warm_start=null", "model.random_weights=false", f"model.source={begun}"]
    folder = trained("distillation", f"{list(WAYS).index(way)}-{seed}", output, *settings)
    tokens, points = 0.0, []
    for line in metrics_of(folder):
        tokens += 512 * line.get("length/mean", 0.0)  # of 32 prompts with 16 completions
        if "evaluation/accuracy" in line:
            points.append({"tokens": round(tokens), "accuracy": line["evaluation/accuracy"]})
    seconds = {phase: round(took, 1) for phase, took in summary_of(folder)["seconds"].items()}
    return {"way": way, "seed": seed, "points": points, "seconds": seconds}


def tables(results: Path) -> dict[str, str]:
    """The table of docs/distillation.md: means over seeds."""
    found = json.loads((results / RESULT).read_text())
    machine = found["machine"]
    count = len(found["runs"][0]["points"])
    of_way = {way: [each["points"] for each in found["runs"] if each["way"] == way] for way in WAYS}
    tokens = [
        statistics.fmean(points[i]["tokens"] for runs in of_way.values() for points in runs) for i in range(count)
    ]
    head = ["Held-out accuracy after", *("0 tokens" if not n else f"{n / 1000:.0f} thousand" for n in tokens)]
    lines = [f"| {' | '.join(head)} |", "|---|" + "--:|" * count]
    for way, runs in of_way.items():
        means = [statistics.fmean(points[i]["accuracy"] for points in runs) for i in range(count)]
        lines.append(f"| {way} | {' | '.join(f'{mean:.2f}' for mean in means)} |")
    seeds = len({each["seed"] for each in found["runs"]})
    lines += [
        "",
        f"Students of the quickstart's size, {seeds} seeds, sampled at temperature 1; the teacher's accuracy is "
        f"{found['teacher']['accuracy']:.2f}",
        f"({machine['processor']}, {machine['threads']} threads, torch {machine['torch']}; "
        f"[{RESULT}](../benchmarks/results/{RESULT})).",
    ]
    return {"": "\n".join(lines)}


def main() -> None:
    """The teacher, then every student."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--teacher", type=Path, help="folder of a finished quickstart run; default: trained here")
    options = parsed(parser, tables)
    with tempfile.TemporaryDirectory() as folder:
        output, taught_by = Path(folder), options.teacher
        if taught_by is None:
            rare = [f"{key}.every_blocks={TEACHER_BLOCKS}" for key in ("evaluation", "checkpoint")]
            taught_by = trained("quickstart", "teacher", output, f"train.blocks={TEACHER_BLOCKS}", *rare, "writers=[]")
        summary = summary_of(taught_by)
        teacher = {"blocks": summary["blocks"], "accuracy": summary["accuracy_after"]}
        runs = []
        for seed in options.seeds:
            for way in WAYS:
                runs.append(run(output, taught_by / "model", way, seed))
                print(f"{way}, seed {seed}: {[point['accuracy'] for point in runs[-1]['points']]}", flush=True)
                record(runs, options.output / RESULT, teacher=teacher)


if __name__ == "__main__":
    main()
