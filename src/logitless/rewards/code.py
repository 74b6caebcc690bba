"""Programs that are run against tests.

Each test runs in a fresh interpreter (``python -I``) in a folder of its own, with limits on time, memory, output and
open files, and none may start further processes (the kernel exempts root from that limit; whatever is started is
killed with the test). Expected outputs stay in the parent. This bounds accidents. It is not a security boundary: a
program can read your files and use your network, and a determined one can do harm. Run training that executes
generated code in a container or a virtual machine that holds nothing you would miss.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from logitless.errors import DataError
from logitless.rewards.contract import Batch, Columns, column
from logitless.rewards.pool import Outcome, shared_pool
from logitless.rewards.pooled import MEBIBYTE, PooledReward, verdict_of
from logitless.rewards.tasks import unfenced
from logitless.types import Verdict

_START_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Code(PooledReward):
    """1 where the program of the completion passes all tests, or the fraction that it passes.

    The program is the last block fenced as ``python``, or the whole completion. A program that fails, hangs or goes
    over a limit fails the test: that is its own doing, and graded.

    Args:
        column: column with each row's tests (a list, or JSON text): ``output`` is expected, of a run with ``input`` as
            standard input, or of the ``repr`` of the expression ``call``. White space at line ends does not count.
        partial: give the fraction of passed tests instead of all or nothing.
        deadline_seconds: wall clock for one test.
        memory_mib: memory for one test.

    Example:
        >>> tests = [{"call": "double(2)", "output": "4"}, {"call": "double('a')", "output": "'aa'"}]
        >>> Code(partial=True)(["Write double."], ["def double(x): return x + 2"], tests=[tests])
        [0.5]
    """

    name: Literal["code"] = "code"
    column: str = "tests"
    partial: bool = False
    memory_mib: int = 512

    def check(self, columns: Columns) -> None:
        """Every row has tests."""
        for row, value in enumerate(column(columns, self.column)):
            _tests(value, self.column, row)

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        """One verdict a text, with a detail for each test."""
        values = column(batch.columns, self.column)
        tests = [_tests(value, self.column, row) for row, value in enumerate(values)]
        limits = (self.deadline_seconds, self.memory_mib * MEBIBYTE)
        items = [(unfenced(text, "python"), own, *limits) for text, own in zip(texts, tests, strict=True)]
        outcomes = shared_pool().run(
            "logitless.rewards.tasks:run_program",
            items,
            deadline_seconds=(self.deadline_seconds + _START_SECONDS) * max(map(len, tests)),
        )
        return [self._verdict(outcome) for outcome in outcomes]

    def _verdict(self, outcome: Outcome) -> Verdict:
        verdict = verdict_of(outcome)
        if verdict.score is None or self.partial:
            return verdict
        return Verdict.graded(float(verdict.score == 1.0), verdict.detail)


def _tests(value: Any, name: str, row: int) -> list[dict[str, str]]:
    """A row's tests."""
    tests = value
    if isinstance(value, str):
        try:
            tests = json.loads(value)
        except ValueError:
            tests = None
    if not isinstance(tests, Sequence) or not tests or not all(map(_is_test, tests)):
        raise DataError(
            needed=f"a list of tests in column {name!r}, each with texts `output` and `input` or `call`",
            given=f"{value!r:.80} in row {row}",
            remedy='Write [{"input": "1 2", "output": "3"}], or [{"call": "add(1, 2)", "output": "3"}].',
        )
    return [{key: text for key, text in test.items() if text is not None} for test in tests]


def _is_test(test: Any) -> bool:
    if not isinstance(test, Mapping):
        return False
    given = {key: text for key, text in test.items() if text is not None}
    kinds = {"output", "input"}, {"output", "call"}, {"output"}
    return set(given) in kinds and all(isinstance(text, str) for text in given.values())
