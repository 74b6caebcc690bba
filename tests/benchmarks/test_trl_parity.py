"""Parity with TRL: the committed result keeps what the page says, and the page's examples run."""

import doctest
import json

import pytest

import trl_parity as benchmark
from script import RESULTS, ROOT


@pytest.fixture(scope="module")
def result():
    return json.loads((RESULTS / benchmark.RESULT).read_text())


def test_losses_of_whole_runs_are_equal_to_the_seventh_decimal_as_the_readmes_first_screen_says(result):
    assert [each["case"] for each in result["runs"]] == list(benchmark.CASES)
    for each in result["runs"]:
        theirs, ours = each["trl"], each["logitless"]
        assert len(theirs["losses"]) == 2 * benchmark.STEPS
        assert benchmark.largest(theirs["losses"], ours["losses"]) < 1e-7, each["case"]
        assert max(map(abs, theirs["losses"])) > 0.05
        assert min(theirs["grad_norms"]) > 1e-3
    first_screen = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    assert "[TRL or Liger](docs/trl.md)" in first_screen
    assert "losses agree to\nthe seventh decimal" in first_screen


def test_no_configuration_is_beyond_its_tolerance(result):
    assert {each["against"]: each["beyond_tolerance"] for each in result["parity"]} == {"trl": 0, "liger": 0}


def test_the_examples_of_the_page_run():
    found = doctest.testfile(str(ROOT / "docs" / "trl.md"), module_relative=False)
    assert found.attempted >= 6
    assert found.failed == 0
