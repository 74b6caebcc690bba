"""The worked examples hold to the rules that the rest of the code does."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extending.diffs import ROOT, extended


@pytest.mark.parametrize("heading", ["A new objective", "A new engine", "A new reward"])
def test_what_an_example_adds_is_formatted_and_clean(tmp_path, heading):
    touched = [str(path) for path in extended(heading, tmp_path)]
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ruff = str(Path(sys.executable).with_name("ruff"))
    for command in (["format", "--check"], ["check"]):
        done = subprocess.run([ruff, *command, *touched], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_an_example_that_the_code_has_moved_away_from_says_so(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "## Moved\n```diff\n--- a/src/logitless/seeds.py\n+++ b/src/logitless/seeds.py\n@@\n-gone\n+here\n```\n"
    )
    monkeypatch.setattr("tests.extending.diffs.PAGE", page)
    with pytest.raises(AssertionError, match="is out of date"):
        extended("Moved", tmp_path / "copy")
