"""Pages that are made from the code and from nothing else."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


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
