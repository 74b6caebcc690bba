"""The comparison of float32 with the default dtype: what it writes, and what the page says once it was measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.train.tiny import tiny_raw

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_runs_both_ways_once_and_leaves_what_it_has(tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_raw(tmp_path)))
    command = [sys.executable, str(ROOT / "benchmarks" / "precision_default.py"), "--seeds", "3"]
    command += ["--recipe", str(tmp_path / "tiny.yaml"), "--output", str(tmp_path)]
    for _ in range(2):
        done = subprocess.run([*command, "--set", "train.blocks=1"], check=True, capture_output=True, text=True)
    rows = json.loads((tmp_path / "precision-default-cpu.json").read_text())["rows"]
    assert [(each["way"], each["trained_dtype"], each["seed"]) for each in rows] == [
        ("float32", "float32", 3),
        ("the default", "float32", 3),  # on a CPU
    ]
    assert rows[0]["reward"] == rows[1]["reward"]
    assert "| tiny | float32 | 1 | 1 |" in done.stdout
