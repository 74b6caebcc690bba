"""Held-out results of float32 and of the dtype that a recipe has by default on this machine, at three seeds each.

    python benchmarks/precision_default.py                                            # on a GPU
    python benchmarks/precision_default.py --recipe recipes/smollm2-addition.yaml     # adds its rows
    python benchmarks/precision_default.py --table                                    # writes docs/numerics.md's table

Both ways are the recipe as it stands, but for the dtypes of its weights; layers and sampler follow from them. Each run
is a process of its own, and a run that the file has already is not repeated.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from logitless.bench.machine import environment, write_result
from script import command_line, parsed, short_name

ROOT = Path(__file__).parents[1]
WAYS = {"float32": ["model.trained_dtype=float32", "model.dtype=float32"], "the default": []}
RESULT = "precision-default-H200.json"
"""What the page shows."""


def run(recipe: Path, way: str, seed: int, settings: Sequence[str], output: Path) -> dict[str, Any]:
    """One run in a process of its own: held-out accuracy before and after, reward a block, seconds by phase."""
    given = [f"seed={seed}", "name=run", f"output={output}", "writers=[]", *WAYS[way], *settings]
    command = [sys.executable, "-m", "logitless", "train", str(recipe)]
    began = time.perf_counter()
    subprocess.run([*command, *(word for each in given for word in ("--set", each))], cwd=ROOT, check=True)
    took = time.perf_counter() - began
    folder = output / "run"
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "recipe": recipe.stem,
        "way": way,
        "trained_dtype": yaml.safe_load((folder / "config.yaml").read_text())["model"]["trained_dtype"],
        "seed": seed,
        "settings": list(settings),
        "blocks": summary["blocks"],
        "held_out_before": summary["accuracy_before"],
        "held_out_after": summary["accuracy_after"],
        "reward": [line["reward/mean"] for line in lines if "reward/mean" in line],
        "seconds": {phase: round(value, 2) for phase, value in summary["seconds"].items()},
        "process_seconds": round(took, 2),
    }


def table(found: Mapping[str, Any]) -> str:
    """Mean and standard deviation over seeds of each way, by recipe.

    Args:
        found: what this script wrote.
    """
    machine = found["machine"]
    lines = [
        f"**{machine['gpu']}**, driver {machine['driver']}, torch {machine['torch']}, Triton {machine['triton']}; "
        "mean ± standard deviation over seeds",
        "",
        "| recipe | dtype | seeds | blocks | held-out before | held-out after | reward, last ten blocks |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for recipe in dict.fromkeys(row["recipe"] for row in found["rows"]):
        for way in WAYS:
            rows = [row for row in found["rows"] if (row["recipe"], row["way"]) == (recipe, way)]
            if rows:
                dtypes = ", ".join(dict.fromkeys(row["trained_dtype"] for row in rows))
                named = way if way == dtypes else f"{way}: {dtypes}"
                columns = [[row["held_out_before"] for row in rows], [row["held_out_after"] for row in rows]]
                columns.append([statistics.fmean(row["reward"][-10:]) for row in rows])
                cells = [_spread(column) for column in columns]
                lines.append(f"| {recipe} | {named} | {len(rows)} | {rows[0]['blocks']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{deviation}"


def tables(results: Path) -> dict[str, str]:
    """The table of the H200; none before it was measured."""
    path = results / RESULT
    return {"": table(json.loads(path.read_text()))} if path.exists() else {}


def main() -> None:
    """Every way at every seed that the file lacks, or the table of the file."""
    parser = command_line(__doc__)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options = parsed(parser, tables)
    import torch  # here: the table needs none

    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = environment(device, ("triton", "transformers"))
    path = options.output / f"precision-default-{short_name(device)}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for seed in options.seeds:
        for way in WAYS:
            wanted = (options.recipe.stem, way, seed, options.settings)
            if any((row["recipe"], row["way"], row["seed"], row["settings"]) == wanted for row in rows):
                continue
            with tempfile.TemporaryDirectory() as folder:
                rows.append(run(options.recipe.absolute(), way, seed, options.settings, Path(folder)))
            options.output.mkdir(parents=True, exist_ok=True)
            write_result(path, {"machine": machine, "rows": rows})
    print(table({"machine": machine, "rows": rows}))


if __name__ == "__main__":
    main()
