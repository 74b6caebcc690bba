"""Tables in documents that are made from result files and from nothing else."""

from collections.abc import Mapping, Sequence
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
