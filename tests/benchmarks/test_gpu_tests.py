"""The counts of the tests that need GPUs are those of the report that pytest writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_tests

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
    assert not os.path.exists(os.environ["TRITON_CACHE_DIR"])
    assert not os.path.exists(os.environ["XDG_CACHE_HOME"])

@pytest.fixture
def broken():
    raise OSError

def test_without_the_marker():
    assert False
"""


def _run(folder, tests):
    (folder / "test_them.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    multi_gpu: x\n")
    command = [sys.executable, ROOT / "benchmarks/gpu_tests.py", "--output", folder / "found.json", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
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


@pytest.mark.parametrize(("name", "gpus"), [("multi-gpu.json", 4), ("multi-gpu-2.json", 2)])
def test_every_failure_on_several_gpus_has_a_line(name, gpus):
    found = json.loads((gpu_tests.RESULTS / name).read_text())
    assert found["environment"]["gpus"] == gpus
    assert found["complete"]
    assert len(found["failures"]) == found["failed"]
    assert found["passed"] > 60


def test_what_needs_one_gpu_has_passed_on_one():
    found = json.loads((gpu_tests.RESULTS / "gpu.json").read_text())
    assert (found["complete"], found["failed"]) == (True, 0)
    assert found["skipped"].keys() <= {"Skipped: factors are float32 already"}  # the case beside it is the same
    assert f"{found['passed']} tests on one H200" in (ROOT / "docs/scale.md").read_text()


def test_the_run_that_was_cut_off_failed_in_nothing():
    found = json.loads((gpu_tests.RESULTS / "multi-gpu-again.json").read_text())
    assert not found["complete"]
    assert found["failures"] == []
    page = (ROOT / "docs/scale.md").read_text()
    assert f"after {found['passed']} of" in page
