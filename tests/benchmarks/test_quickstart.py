"""The promise of the demo, at three seeds, and that the committed result keeps it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "quickstart.json"


def _assert_learnt(result: Path) -> None:
    runs = json.loads(result.read_text())["runs"]
    assert len({run["seed"] for run in runs}) >= 3
    for run in runs:
        assert run["accuracy_before"] < 0.4, run
        assert run["accuracy_after"] > 0.85, run


def test_the_committed_result_of_the_demo_keeps_its_promise():
    _assert_learnt(RESULT)


def test_the_readme_says_what_the_committed_result_says():
    spec = importlib.util.spec_from_file_location("quickstart_benchmark", ROOT / "benchmarks" / "quickstart.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    text = (ROOT / "README.md").read_text()
    assert benchmark.with_readme_lines(text, json.loads(RESULT.read_text())) == text


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_keeps_its_promise_at_three_seeds_within_five_minutes_each(tmp_path):
    result = tmp_path / "quickstart.json"
    subprocess.run([sys.executable, "benchmarks/quickstart.py", "--out", str(result)], cwd=ROOT, check=True)
    _assert_learnt(result)
    assert all(sum(run["seconds"].values()) < 300 for run in json.loads(result.read_text())["runs"])
