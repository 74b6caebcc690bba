"""The promise of the demo, at three seeds, and that the committed result keeps it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _assert_kept(result: Path) -> None:
    runs = json.loads(result.read_text())["runs"]
    assert len({run["seed"] for run in runs}) >= 3
    for run in runs:
        assert run["accuracy_before"] < 0.4, run
        assert run["accuracy_after"] > 0.85, run
        assert sum(run["seconds"].values()) < 300, run


def test_the_committed_result_of_the_demo_keeps_its_promise():
    _assert_kept(ROOT / "benchmarks" / "results" / "quickstart.json")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_keeps_its_promise_at_three_seeds(tmp_path):
    result = tmp_path / "quickstart.json"
    subprocess.run([sys.executable, "benchmarks/quickstart.py", "--out", str(result)], cwd=ROOT, check=True)
    _assert_kept(result)
