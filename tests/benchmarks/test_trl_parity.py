"""Parity with TRL: the committed result keeps what the page says, and the page's examples run."""

import doctest

from script import ROOT


def test_the_examples_of_the_page_run():
    found = doctest.testfile(str(ROOT / "docs" / "trl.md"), module_relative=False)
    assert found.attempted >= 6
    assert found.failed == 0
