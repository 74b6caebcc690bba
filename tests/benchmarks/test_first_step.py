"""The time to the first step, as the script measures it at toy size."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_tells_the_seconds_to_the_first_step_and_where_they_went(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "first_step.py"), "--toy", "--runs", "1"]
    command += ["--set", "train.blocks=1", "--set", "rollout.prompts_per_block=2"]
    subprocess.run([*command, "--out", str(tmp_path / "found.json")], check=True, capture_output=True)
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["caches"] for row in rows] == ["empty", "full"]
    for row in rows:
        assert row["seconds"]["imports"] < row["first_step_seconds"] < row["process_seconds"]
        assert math.fsum(row["seconds"].values()) < row["process_seconds"]
