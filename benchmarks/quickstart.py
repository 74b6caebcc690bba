"""Runs the demo at several seeds and records what came of it.

python benchmarks/quickstart.py --seeds 0 1 2
python benchmarks/quickstart.py --readme     # the README's lines about it
"""

from typing import Any

from script import RESULTS, between, main_at_seeds

RESULT = RESULTS / "quickstart.json"


def with_readme_lines(text: str, result: dict[str, Any]) -> str:
    """The README with the lines between their marks."""
    runs, machine = result["runs"], result["machine"]
    accuracies = "; ".join(f"{run['accuracy_before']:.2f} to {run['accuracy_after']:.2f}" for run in runs)
    lines = (
        f"\nHeld-out accuracy under GRPO alone, sampled at temperature 1, at {len(runs)} seeds:\n{accuracies}\n"
        f"({machine['processor']}, {machine['threads']} thread(s) a run, torch {machine['torch']};\n"
        "[benchmarks/results/quickstart.json](benchmarks/results/quickstart.json), by `benchmarks/quickstart.py`).\n"
    )
    return between(text, "<!-- demo result: begin -->", "<!-- demo result: end -->", lines)


if __name__ == "__main__":
    main_at_seeds(__doc__, "quickstart", readme=with_readme_lines)
