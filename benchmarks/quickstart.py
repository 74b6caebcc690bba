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

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]


def run(seed: int, output: Path) -> dict[str, object]:
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


def main() -> None:
    """One run a seed, one after the other, and a file with all summaries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "quickstart.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(seed, Path(folder)) for seed in options.seeds]
    machine = {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    options.out.write_text(json.dumps({"machine": machine, "runs": runs}, indent=2) + "\n")
    for found in runs:
        print(
            f"seed {found['seed']}: held-out accuracy {found['accuracy_before']:.3f} -> {found['accuracy_after']:.3f}"
        )


if __name__ == "__main__":
    main()
