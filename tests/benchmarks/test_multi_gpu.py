"""The counts of the tests that need several GPUs are those of the report that pytest writes."""

import json
from pathlib import Path

from benchmarks import multi_gpu

TESTS = """
import pytest

@pytest.mark.multi_gpu
@pytest.mark.parametrize("outcome", ["passes", "fails", "skips", "breaks"])
def test_that(outcome, request):
    if outcome == "breaks":
        request.getfixturevalue("broken")
    if outcome == "skips":
        pytest.skip("needs 4 CUDA devices")
    assert outcome == "passes"

@pytest.fixture
def broken():
    raise OSError

def test_without_the_marker():
    assert False
"""


def test_what_passed_failed_and_was_skipped_is_counted_with_reasons_and_names(tmp_path):
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    multi_gpu: x\n")
    assert multi_gpu.main(["--output", str(tmp_path / "found.json"), str(tmp_path)]) == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, {"needs 4 CUDA devices": 1})
    assert [name.rpartition("[")[2] for name in found["failures"]] == ["fails]", "breaks]"]
    assert found["environment"]["torch"]


def test_every_failure_on_two_gpus_has_a_line():
    found = json.loads(Path(multi_gpu.RESULT).read_text())
    assert len(found["failures"]) == found["failed"]
    assert found["passed"] > 60
