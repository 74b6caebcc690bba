"""Pretrained weights on a CPU: what the committed result shows."""

import json

from script import RESULTS

RESULT = json.loads((RESULTS / "smollm2-cpu.json").read_text())


def test_each_run_learned_within_ten_minutes_of_two_processors() -> None:
    for run in RESULT["runs"]:
        assert run["accuracy_after"] > run["accuracy_before"] + 0.1
        assert run["processor_seconds"] < 2 * 600
