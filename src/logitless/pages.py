"""Pages that are made from code or results and from nothing else: whole ones, and tables between marks."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from logitless.errors import DataError


@dataclass(frozen=True)
class Marks:
    """Where in a document a table of ``logitless bench WHAT`` stands; ``part`` tells its tables apart.

    Example:
        >>> Marks("head", "targets").end
        '<!-- bench head targets: end -->'
    """

    benchmark: str
    part: str = ""

    @property
    def begin(self) -> str:
        return f"<!-- {self._name}: begin (made by `logitless bench {self.benchmark} --table`) -->"

    @property
    def end(self) -> str:
        return f"<!-- {self._name}: end -->"

    @property
    def _name(self) -> str:
        return f"bench {self.benchmark} {self.part}".rstrip()


def update(documents: Sequence[Path], tables: Mapping[Marks, str], *, check: bool) -> int:
    """Rewrites the tables whose marks a document has, in each document; with ``check``, 1 if one is out of date.

    Raises:
        DataError: a document without any of the marks.
    """
    stale = 0
    for path in documents:
        text = path.read_text()
        found = [marks for marks in tables if marks.begin in text and marks.end in text]
        if not found:
            raise DataError(
                needed=f"marks in {path}",
                given="none of " + ", ".join(repr(marks.begin) for marks in tables),
                remedy="Add such a line where a table should go, and the same with 'end' below it.",
            )
        fresh = text
        for marks in found:
            before, _, rest = fresh.partition(marks.begin)
            fresh = f"{before}{marks.begin}\n\n{tables[marks]}\n\n{marks.end}{rest.partition(marks.end)[2]}"
        if fresh != text:
            stale = 1
            if check:
                print(f"{path} is out of date: run `logitless bench {found[0].benchmark} --table {path}`")
            else:
                path.write_text(fresh)
    return stale if check else 0


@dataclass(frozen=True)
class Written:
    """A page, or several, that a module writes.

    Args:
        write: makes it anew.
        outdated: what of it is not current, in words; empty where all is.
    """

    write: Callable[[], None]
    outdated: Callable[[], Sequence[str]]


def text_page(path: Path, text: Callable[[], str]) -> Written:
    """A page that is one text.

    Example:
        >>> text_page(Path("no/such/page.md"), lambda: "# Title").outdated()
        ['no/such/page.md']
    """

    def write() -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text(), encoding="utf-8")

    def outdated() -> list[str]:
        current = path.is_file() and path.read_text(encoding="utf-8") == text()
        return [] if current else [path.as_posix()]

    return Written(write, outdated)


def main(module: str, *pages: Written) -> int:
    """Write the pages, or with ``--check`` say on standard error which are not current, and return 1 if any is."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Write pages of docs/ from the code.")
    parser.add_argument("--check", action="store_true", help="exit with 1 where something is not current")
    if not parser.parse_args().check:
        for page in pages:
            page.write()
        return 0
    found = [each for page in pages for each in page.outdated()]
    if found:
        print(f"not current: {', '.join(found)}; run python -m {module}", file=sys.stderr)
    return 1 if found else 0
