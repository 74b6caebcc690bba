"""The README's lines about pretrained weights on a CPU are those of the committed result."""

import json
from pathlib import Path

import smollm2_cpu

ROOT = Path(__file__).parents[2]

RESULT = json.loads(smollm2_cpu.RESULT.read_text())


def test_the_readme_says_what_the_result_says() -> None:
    page = (ROOT / "README.md").read_text()
    assert smollm2_cpu.with_readme_lines(page, RESULT) == page


def test_each_run_learned_within_ten_minutes_of_two_processors() -> None:
    for run in RESULT["runs"]:
        assert run["accuracy_after"] > run["accuracy_before"] + 0.1
        assert run["processor_seconds"] < 2 * 600
