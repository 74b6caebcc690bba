"""What recipes promise of a CPU, at three seeds, and that the committed results keep it; their scripts run it again."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROMISES = {"quickstart": (0.4, 0.85), "ifeval-tiny": (0.3, 0.8), "calculator": (0.4, 0.8)}
"""Held-out accuracy below which a recipe begins, and above which it ends."""

SECONDS = {"ifeval-tiny": ("wall_clock_seconds", 600), "calculator": ("processor_seconds", 300)}


@pytest.mark.parametrize("recipe", PROMISES)
def test_the_committed_result_keeps_the_promise(recipe: str) -> None:
    below, above = PROMISES[recipe]
    runs = json.loads((ROOT / f"benchmarks/results/{recipe}.json").read_text())["runs"]
    assert len({run["seed"] for run in runs}) >= 3
    for run in runs:
        assert run["accuracy_before"] < below, run
        assert run["accuracy_after"] > above, run
        for clock, most in [SECONDS[recipe]] if recipe in SECONDS else []:
            assert run[clock] < most, run
        if recipe == "calculator":
            assert run["two_turns_first_block"] < run["two_turns_last_block"], run
