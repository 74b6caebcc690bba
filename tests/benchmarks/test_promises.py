"""What recipes promise of a CPU, at three seeds, and that the committed results keep it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import quickstart

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

PROMISES = {"quickstart": (0.4, 0.85), "ifeval-tiny": (0.3, 0.8), "calculator": (0.4, 0.8)}
"""Held-out accuracy below which a recipe begins, and above which it ends."""

SECONDS = {"ifeval-tiny": ("wall_clock_seconds", 600), "calculator": ("processor_seconds", 300)}


def assert_kept(recipe: str, result: Path) -> None:
    below, above = PROMISES[recipe]
    runs = json.loads(result.read_text())["runs"]
    assert len({run["seed"] for run in runs}) >= 3
    for run in runs:
        assert run["accuracy_before"] < below, run
        assert run["accuracy_after"] > above, run
        for clock, most in [SECONDS[recipe]] if recipe in SECONDS else []:
            assert run[clock] < most, run
        if recipe == "calculator":
            assert run["two_turns_first_block"] < run["two_turns_last_block"], run


@pytest.mark.parametrize("recipe", PROMISES)
def test_the_committed_result_keeps_the_promise(recipe: str) -> None:
    assert_kept(recipe, RESULTS / f"{recipe}.json")


def test_the_readme_says_what_the_committed_result_says() -> None:
    text = (ROOT / "README.md").read_text()
    assert quickstart.with_readme_lines(text, json.loads(quickstart.RESULT.read_text())) == text


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("recipe", ["quickstart", "ifeval-tiny"])
def test_the_recipe_keeps_its_promise_at_three_seeds(recipe: str, tmp_path: Path) -> None:
    result, script = tmp_path / "result.json", f"benchmarks/{recipe.replace('-', '_')}.py"
    subprocess.run([sys.executable, script, "--out", str(result)], cwd=ROOT, check=True)
    assert_kept(recipe, result)
    if recipe == "quickstart":
        assert all(sum(run["seconds"].values()) < 300 for run in json.loads(result.read_text())["runs"])
