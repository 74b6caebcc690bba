"""The completion matches a regular expression; in a worker process, because some take exponential time."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from logitless.errors import ConfigurationError
from logitless.rewards.reward import Batch, Columns, check_text_column, column
from logitless.rewards.workers.pooled import PooledReward
from logitless.types import Verdict


@dataclass(frozen=True, kw_only=True)
class Regex(PooledReward):
    """1 if the pattern is found in the completion, else 0; ungradable if the search goes over the deadline.

    Args:
        pattern: Python's syntax; or None, with ``column``.
        column: column with each row's pattern; or None, with ``pattern``.
        whole: the pattern must match the whole completion.
        ignore_case: upper and lower case are the same.
        dot_all: a dot matches a line break too.

    Raises:
        ConfigurationError: both or neither of ``pattern`` and ``column``, or a pattern that does not compile.

    Example:
        >>> Regex(pattern="[0-9]+ apples")(["How many?"] * 2, ["There are 12 apples.", "None."])
        [1.0, 0.0]
    """

    name: Literal["regex"] = "regex"
    pattern: str | None = None
    column: str | None = None
    whole: bool = False
    ignore_case: bool = False
    dot_all: bool = False
    deadline_seconds: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_source("pattern", self.column)
        if self.pattern is not None:
            _check_pattern(self.pattern, "`pattern`")

    def check(self, columns: Columns) -> None:
        """Check that every row's pattern compiles."""
        if self.column is not None:
            check_text_column(columns, self.column)
            for row, pattern in enumerate(columns[self.column]):
                _check_pattern(pattern, f"row {row} of column {self.column!r}")

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        patterns = [self.pattern] * len(texts) if self.column is None else column(batch.columns, self.column)
        flags = (re.IGNORECASE if self.ignore_case else 0) | (re.DOTALL if self.dot_all else 0)
        items = [(pattern, int(flags), self.whole, text) for pattern, text in zip(patterns, texts, strict=True)]
        return [self.verdict(outcome) for outcome in self.run("match_pattern", items)]


def _check_pattern(pattern: str, place: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigurationError(
            needed=f"a regular expression in {place}",
            given=f"{pattern!r:.80} ({error})",
            remedy="Correct it; a backslash needs single quotes in YAML.",
        ) from error
