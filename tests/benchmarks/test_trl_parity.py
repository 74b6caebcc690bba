"""The page for TRL's and Liger's users shows the committed result, and the result keeps what the page says."""

import doctest
import json

import pytest

import trl_parity as benchmark


@pytest.fixture(scope="module")
def result():
    return json.loads(benchmark.RESULT.read_text())


def test_the_page_shows_the_committed_result(result):
    text = benchmark.PAGE.read_text()
    assert benchmark.with_lines(text, result) == text


def test_losses_of_whole_runs_are_equal_to_the_seventh_decimal(result):
    assert [each["case"] for each in result["runs"]] == list(benchmark.CASES)
    for each in result["runs"]:
        theirs, ours = each["trl"], each["logitless"]
        assert len(theirs["losses"]) == 2 * benchmark.STEPS
        assert benchmark.largest(theirs["losses"], ours["losses"]) < 5e-7, each["case"]
        assert max(map(abs, theirs["losses"])) > 0.05
        assert min(theirs["grad_norms"]) > 1e-3


def test_no_configuration_is_beyond_its_tolerance(result):
    assert {each["against"]: each["beyond_tolerance"] for each in result["parity"]} == {"trl": 0, "liger": 0}


def test_the_examples_of_the_page_run():
    found = doctest.testfile(str(benchmark.PAGE), module_relative=False)
    assert found.attempted >= 6
    assert found.failed == 0
