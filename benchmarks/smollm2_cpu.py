"""Runs the recipe of pretrained weights for a CPU and records what came of it: the README's second example.

python recipes/smollm2/prepare.py
python benchmarks/smollm2_cpu.py --seeds 0
python benchmarks/smollm2_cpu.py --table     # its lines in the README
"""

import json
from pathlib import Path

from script import main_at_seeds


def tables(results: Path) -> dict[str, str]:
    """Lines of the README."""
    result = json.loads((results / "smollm2-cpu.json").read_text())
    runs, machine = result["runs"], result["machine"]
    accuracies = "; ".join(f"{each['accuracy_before']:.2f} to {each['accuracy_after']:.2f}" for each in runs)
    seconds = max(each["wall_clock_seconds"] for each in runs)
    seeds = f"{len(runs)} seed{'s' * (len(runs) > 1)}"
    lines = (
        f"Held-out accuracy, greedy, at {seeds}: {accuracies}, in {runs[0]['blocks']} blocks and "
        f"{seconds:.0f} s\n({machine['processor']}, {machine['threads']} threads, torch "
        f"{machine['torch']}; [benchmarks/results/smollm2-cpu.json](benchmarks/results/smollm2-cpu.json), by\n"
        "`benchmarks/smollm2_cpu.py`)."
    )
    return {"": lines}


if __name__ == "__main__":
    main_at_seeds(__doc__, "smollm2-cpu", seeds=[0], tables=tables)
