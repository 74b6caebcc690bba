"""The diffs of docs/extending.md, applied to a copy of the library as they stand there."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests import warm

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"


def extended(heading: str, copy: Path) -> list[Path]:
    """Copy the library's source to ``copy/src`` and apply the diff under this heading; the files it touches."""
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    diff = re.search(r"^```diff\n(.*?)^```$", section, re.M | re.S)
    assert diff, f"no diff under {heading!r}"
    files = re.split(r"^--- (?:a/.*|/dev/null)\n\+\+\+ b/(.*)\n", diff[1], flags=re.M)[1:]
    touched = []
    for name, body in zip(files[::2], files[1::2], strict=True):
        path = copy / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for hunk in re.split(r"^@@\n", body, flags=re.M)[1:]:
            text = _changed(text, hunk.splitlines(keepends=True), name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        touched.append(path)
    return touched


def _changed(text: str, hunk: list[str], name: str) -> str:
    """The text with one hunk applied where its old lines stand, which must be one place."""
    old = "".join(line[1:] for line in hunk if line[0] in " -")
    new = "".join(line[1:] for line in hunk if line[0] in " +")
    places = text.count(old) if old else int(not text)
    assert places == 1, f"{name} has {places} places for this change, so docs/extending.md is out of date:\n{old}"
    return text.replace(old, new) if old else new


def run_in(copy: Path, *arguments: str, also: Sequence[Path] = ()) -> str:
    """What Python prints in a process that imports the library from the copy; it must succeed.

    Args:
        copy: of ``extended``; the process runs there.
        arguments: of ``python``.
        also: further folders to import from.
    """
    paths = os.pathsep.join(map(str, (copy / "src", *also)))
    done = warm.run(*arguments, environment=os.environ | {"PYTHONPATH": paths}, folder=copy)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_tests(copy: Path, *paths: str) -> str:
    """What pytest prints of these files of the copy, doctests included; they must pass."""
    return run_in(
        copy, "-m", "pytest", "-q", "--doctest-modules", "-p", "no:cacheprovider", f"--rootdir={copy}", *paths
    )
