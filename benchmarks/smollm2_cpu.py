"""Runs the recipe of pretrained weights for a CPU and records what came of it: the README's second example.

python recipes/smollm2/prepare.py
python benchmarks/smollm2_cpu.py --seeds 0
python benchmarks/smollm2_cpu.py --readme    # its lines in the README
"""

from typing import Any

from script import RESULTS, between, main_at_seeds

RESULT = RESULTS / "smollm2-cpu.json"


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
    return between(text, "<!-- smollm2 result: begin -->\n", "<!-- smollm2 result: end -->", lines)


if __name__ == "__main__":
    main_at_seeds(__doc__, "smollm2-cpu", seeds=[0], readme=with_readme_lines)
