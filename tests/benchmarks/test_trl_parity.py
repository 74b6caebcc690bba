"""The page for TRL's and Liger's users shows the committed result, and the result keeps what the page says."""

import doctest
import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
        spec = importlib.util.spec_from_file_location("trl_parity", ROOT / "benchmarks" / "trl_parity.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def result(benchmark):
    return json.loads(benchmark.RESULT.read_text())


def test_the_page_shows_the_committed_result(benchmark, result):
    text = benchmark.PAGE.read_text()
    assert benchmark.with_lines(text, result) == text


def test_losses_of_whole_runs_are_equal_to_the_seventh_decimal(benchmark, result):
    assert [each["case"] for each in result["runs"]] == list(benchmark.CASES)
    for each in result["runs"]:
        theirs, ours = each["trl"], each["logitless"]
        assert len(theirs["losses"]) == 2 * benchmark.STEPS
        assert benchmark.largest(theirs["losses"], ours["losses"]) < 5e-7, each["case"]
        assert max(map(abs, theirs["losses"])) > 0.05
        assert min(theirs["grad_norms"]) > 1e-3


def test_no_configuration_is_beyond_its_tolerance(result):
    assert {each["against"]: each["beyond_tolerance"] for each in result["parity"]} == {"trl": 0, "liger": 0}


def test_the_examples_of_the_page_run(benchmark):
    found = doctest.testfile(str(benchmark.PAGE), module_relative=False)
    assert found.attempted >= 6
    assert found.failed == 0
