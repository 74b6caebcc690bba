"""Runs the demo at several seeds and records what came of it.

python benchmarks/quickstart.py --seeds 0 1 2
python benchmarks/quickstart.py --table      # the README's lines about it
"""

import json
from pathlib import Path

from script import main_at_seeds


def tables(results: Path) -> dict[str, str]:
    """Lines of the README."""
    result = json.loads((results / "quickstart.json").read_text())
    runs, machine = result["runs"], result["machine"]
    accuracies = "; ".join(f"{run['accuracy_before']:.2f} to {run['accuracy_after']:.2f}" for run in runs)
    lines = (
        f"Held-out accuracy under GRPO alone, sampled at temperature 1, at {len(runs)} seeds:\n{accuracies}\n"
        f"({machine['processor']}, {machine['threads']} threads a run, torch {machine['torch']};\n"
        "[benchmarks/results/quickstart.json](benchmarks/results/quickstart.json), by `benchmarks/quickstart.py`)."
    )
    return {"": lines}


if __name__ == "__main__":
    main_at_seeds(__doc__, "quickstart", tables=tables)
