"""The page on instructions is the registry's."""

import sys
from pathlib import Path

import pytest

from logitless.rewards.instructions import INSTRUCTIONS, document

ROOT = Path(__file__).parents[3]


def test_the_page_is_current():
    assert (ROOT / document.PAGE).read_text(encoding="utf-8") == document.page()


def test_every_instruction_has_a_row_of_six_cells():
    rows = [line for line in document.page().splitlines() if line.startswith("| `") and ":" in line.split("`")[1]]
    assert [row.split("`")[1] for row in rows] == list(INSTRUCTIONS)
    assert all(len(row.replace("\\|", "").split("|")) == 8 for row in rows)


@pytest.mark.parametrize(("content", "status"), [(None, 1), ("old", 1), (document.page(), 0)])
def test_check_tells_a_current_page_from_an_old_one(tmp_path, monkeypatch, content, status):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["document", "--check"])
    if content is not None:
        document.PAGE.parent.mkdir()
        document.PAGE.write_text(content, encoding="utf-8")
    assert document.main() == status


def test_without_check_the_page_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["document"])
    assert document.main() == 0
    assert document.PAGE.read_text(encoding="utf-8") == document.page()
