"""Runs the quickstart recipe at several seeds and records what came of it.

python benchmarks/quickstart.py --seeds 0 1 2 --out benchmarks/results/quickstart.json
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from logitless.bench.machine import write_result

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "quickstart.json"
BEGIN, END = "<!-- demo result: begin -->", "<!-- demo result: end -->"


def run(seed: int, output: Path) -> dict[str, Any]:
    """The summary of one run."""
    command = [sys.executable, "-m", "logitless.cli.main", "train", "recipes/quickstart.yaml"]
    settings = [f"seed={seed}", f"name=seed-{seed}", f"output={output}", "model.device=cpu"]
    subprocess.run([*command, *(word for s in settings for word in ("--set", s))], cwd=ROOT, check=True)
    return {"seed": seed, **json.loads((output / f"seed-{seed}" / "summary.json").read_text())}


def processor() -> str:
    """The name of the processor, where the system tells it."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def record(runs: list[dict[str, Any]], out: Path, **more: Any) -> None:
    """Write the summaries of runs, the machine they were made on, and more by name."""
    machine = {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    write_result(out, {"machine": machine, "runs": runs, **more}, indent=2)


def readme_lines(result: dict[str, Any]) -> str:
    """What the README says of the demo."""
    runs = result["runs"]
    accuracies = "; ".join(f"{run['accuracy_before']:.2f} to {run['accuracy_after']:.2f}" for run in runs)
    machine = result["machine"]
    return (
        f"\nHeld-out accuracy under GRPO alone, sampled at temperature 1, at {len(runs)} seeds:\n{accuracies}\n"
        f"({machine['processor']}, {machine['threads']} thread(s) a run, torch {machine['torch']};\n"
        "[benchmarks/results/quickstart.json](benchmarks/results/quickstart.json), by `benchmarks/quickstart.py`).\n"
    )


def with_readme_lines(text: str, result: dict[str, Any]) -> str:
    """The README with the lines between their marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{readme_lines(result)}{END}{after}"


def main() -> None:
    """One run a seed, one after the other, and a file with all summaries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--merge", type=Path, nargs="+")
    parser.add_argument("--readme", action="store_true")
    options = parser.parse_args()
    if options.readme:
        page = ROOT / "README.md"
        page.write_text(with_readme_lines(page.read_text(), json.loads(RESULT.read_text())))
        return
    if options.merge:
        parts = [json.loads(path.read_text()) for path in options.merge]
        runs = sorted((run for part in parts for run in part["runs"]), key=lambda run: run["seed"])
        write_result(options.out, {"machine": parts[0]["machine"], "runs": runs}, indent=2)
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(seed, Path(folder)) for seed in options.seeds]
    record(runs, options.out)
    for found in runs:
        print(f"seed {found['seed']}: accuracy {found['accuracy_before']:.3f} -> {found['accuracy_after']:.3f}")


if __name__ == "__main__":
    main()
