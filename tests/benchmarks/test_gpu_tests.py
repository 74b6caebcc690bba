"""The counts of the tests that need GPUs are those of the report that pytest writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
import os

import pytest

@pytest.mark.multi_gpu
@pytest.mark.parametrize("outcome", ["passes", "fails", "skips", "breaks"])
def test_that(outcome, request):
    if outcome == "breaks":
        request.getfixturevalue("broken")
    if outcome == "skips":
        pytest.skip("needs 4 CUDA devices")
    assert outcome == "passes"
    assert not os.listdir(os.environ["TRITON_CACHE_DIR"])
    assert not os.listdir(os.environ["XDG_CACHE_HOME"])

@pytest.fixture
def broken():
    raise OSError

def test_without_the_marker():
    assert False
"""


def _run(folder, tests, *arguments, commit="abc"):
    (folder / "test_them.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    multi_gpu: x\nfilterwarnings = error\n")  # as here
    command = [sys.executable, ROOT / "benchmarks/gpu_tests.py", "--output", "found.json", *arguments, "."]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment["COMMIT"] = commit
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done, json.loads((folder / "found.json").read_text())


@pytest.mark.slow
def test_with_empty_caches_what_passed_failed_and_was_skipped_is_counted_with_reasons_and_names(tmp_path):
    done, found = _run(tmp_path, TESTS)
    assert done.returncode == 1
    assert (found["passed"], found["failed"], found["complete"]) == (1, 2, True)
    assert found["skipped"] == {"Skipped: needs 4 CUDA devices": 1}
    assert [name.rpartition("[")[2] for name in found["failures"]] == ["fails]", "breaks]"]
    assert found["environment"]["torch"]
    assert found["environment"]["caches"] == "empty"


@pytest.mark.slow
def test_what_fails_beside_others_runs_again_alone_and_is_named(tmp_path):
    beside = 'import os, pytest\n\n@pytest.mark.multi_gpu\n@pytest.mark.parametrize("way", ["beside", "always"])\n'
    beside += 'def test_that(way):\n    assert way == "beside" and "PYTEST_XDIST_WORKER" not in os.environ\n'
    done, found = _run(tmp_path, beside, "--workers", "2")
    assert done.returncode == 1
    assert (found["passed"], found["failed"]) == (1, 1)
    assert found["passed_alone"] == ["test_them.py::test_that[beside]"]
    assert found["failures"] == ["test_them.py::test_that[always]"]


INTERRUPTED = """
import os

import pytest

@pytest.fixture
def ends_badly(number):
    yield
    assert number != 0 or os.path.exists("again")

@pytest.mark.multi_gpu
@pytest.mark.parametrize("number", range(5))
def test_that(number, ends_badly):
    if number == 3 and not os.path.exists("again"):
        os._exit(1)
    if number == 2:
        pytest.skip("no such card")
    if number == 1:
        open("ran", "x").close()
"""


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_what_it_had_not_ended_well(tmp_path):
    _, found = _run(tmp_path, INTERRUPTED)
    assert (found["complete"], found["passed"], found["failed"], len(found["ended"])) == (False, 1, 1, 2)
    (tmp_path / "again").touch()
    done, _ = _run(tmp_path, INTERRUPTED, "--continue", commit="abd")
    assert done.returncode != 0
    assert "needed in found.json an interrupted run with" in done.stderr
    done, found = _run(tmp_path, INTERRUPTED, "--continue")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (found["complete"], found["passed"], found["failed"], found["parts"]) == (True, 4, 0, 2)
    assert found["skipped"] == {"Skipped: no such card": 1}
    assert "ended" not in found
    done, _ = _run(tmp_path, INTERRUPTED, "--continue")
    assert done.returncode != 0
    assert "given a complete one. Leave --continue out." in done.stderr
