"""Tables in documents that are made from result files and from nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from logitless.errors import DataError


@dataclass(frozen=True)
class Marks:
    """Where in a document the output of ``logitless bench WHAT`` stands.

    Example:
        >>> Marks("head").end
        '<!-- bench head: end -->'
    """

    benchmark: str

    @property
    def begin(self) -> str:
        return f"<!-- bench {self.benchmark}: begin (made by `logitless bench {self.benchmark} --table`) -->"

    @property
    def end(self) -> str:
        return f"<!-- bench {self.benchmark}: end -->"


def update(documents: Sequence[Path], marks: Marks, content: str, *, check: bool) -> int:
    """Rewrites what stands between the marks in each document; with ``check``, 1 if one is out of date.

    Raises:
        DataError: a document without the marks.
    """
    stale = 0
    for path in documents:
        text = path.read_text()
        before, begin, rest = text.partition(marks.begin)
        _, end, after = rest.partition(marks.end)
        if not begin or not end:
            raise DataError(
                needed=f"the marks {marks.begin!r} and {marks.end!r} in {path}",
                given="none",
                remedy="Add them where it should go.",
            )
        fresh = f"{before}{begin}\n\n{content}\n\n{end}{after}"
        if fresh != text:
            stale = 1
            if check:
                print(f"{path} is out of date: run `logitless bench {marks.benchmark} --table {path}`")
            else:
                path.write_text(fresh)
    return stale if check else 0
