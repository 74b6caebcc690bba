"""Runs the recipe of pretrained weights for a CPU and records what came of it: the README's second example.

python recipes/smollm2/prepare.py
python benchmarks/smollm2_cpu.py --seeds 0
python benchmarks/smollm2_cpu.py --readme    # its lines in the README
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

RESULT = ROOT / "benchmarks" / "results" / "smollm2-cpu.json"
BEGIN, END = "<!-- smollm2 result: begin -->\n", "<!-- smollm2 result: end -->"


def run(seed: int, output: Path) -> dict[str, Any]:
    """The summary of one run, and what it took."""
    command = [sys.executable, "-m", "logitless.cli.main", "train", "recipes/smollm2-cpu.yaml"]
    settings = [f"seed={seed}", f"name=seed-{seed}", f"output={output}", "model.device=cpu"]
    start, used = time.perf_counter(), processor_seconds()
    subprocess.run([*command, *(word for s in settings for word in ("--set", s))], cwd=ROOT, check=True)
    return {
        "seed": seed,
        **json.loads((output / f"seed-{seed}" / "summary.json").read_text()),
        "wall_clock_seconds": time.perf_counter() - start,
        "processor_seconds": processor_seconds() - used,
    }


def processor_seconds() -> float:
    """Of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def with_readme_lines(text: str, result: dict[str, Any]) -> str:
    """The README with what the runs came to between their marks."""
    runs, machine = result["runs"], result["machine"]
    accuracies = "; ".join(f"{each['accuracy_before']:.2f} to {each['accuracy_after']:.2f}" for each in runs)
    seconds = max(each["processor_seconds"] for each in runs)
    seeds = f"{len(runs)} seed{'s' * (len(runs) > 1)}"
    lines = (
        f"Held-out accuracy, greedy, at {seeds}: {accuracies}, in {runs[0]['blocks']} blocks and "
        f"{seconds:.0f} s of the processor\n({machine['processor']}, {machine['threads']} threads, torch "
        f"{machine['torch']}; [benchmarks/results/smollm2-cpu.json](benchmarks/results/smollm2-cpu.json), by\n"
        "`benchmarks/smollm2_cpu.py`).\n"
    )
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{lines}{END}{rest.partition(END)[2]}"


def main() -> None:
    """One run a seed, one after the other, and a file with all summaries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--readme", action="store_true")
    options = parser.parse_args()
    if options.readme:
        page = ROOT / "README.md"
        page.write_text(with_readme_lines(page.read_text(), json.loads(RESULT.read_text())))
        return
    with tempfile.TemporaryDirectory() as folder:
        record([run(seed, Path(folder)) for seed in options.seeds], RESULT)


if __name__ == "__main__":
    main()
