"""Pages that modules write: one command for all of them."""

import sys

import pytest

from logitless import pages


@pytest.fixture
def arguments(monkeypatch):
    return lambda *given: monkeypatch.setattr(sys, "argv", ["document", *given])


def test_a_check_names_each_page_that_is_not_current_and_the_command_that_writes_it(tmp_path, arguments, capsys):
    old, missing, current = (tmp_path / name for name in ("old.md", "missing.md", "current.md"))
    old.write_text("before")
    current.write_text("now")
    written = [pages.text_page(path, lambda: "now") for path in (old, missing, current)]
    arguments("--check")
    assert pages.main("some.module", *written) == 1
    assert capsys.readouterr().err == f"not current: {old}, {missing}; run python -m some.module\n"
    assert not missing.exists()
    assert pages.main("some.module", written[-1]) == 0


def test_without_check_every_page_is_written(tmp_path, arguments):
    paths = [tmp_path / "docs" / "one.md", tmp_path / "docs" / "two.md"]
    arguments()
    written = [pages.text_page(path, lambda: "now") for path in paths]
    assert pages.main("some.module", *written) == 0
    assert [path.read_text() for path in paths] == ["now", "now"]
