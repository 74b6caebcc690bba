"""Programs that are run against tests, in a sandbox.

Each test runs in a fresh interpreter in a folder of its own, with an empty environment and limits on time, memory,
output and open files. It can read Python and the system's libraries and write in its folder; it cannot reach the
network or another process, nor start one. The expected output stays in this process: workers return hashes of what was
printed. ``PYTHONHASHSEED`` is 0, so that a program without random numbers prints the same every time.

Not prevented: finding out which files exist, using one processor and its memory until the deadline, and bugs of the
kernel. ``sandbox.sandbox_of("program")`` tests what holds on a machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from logitless.errors import DataError
from logitless.rewards.reward import Batch, Columns, column, from_json
from logitless.rewards.workers.pool import Outcome, program_pool
from logitless.rewards.workers.pooled import MEBIBYTE, PooledReward
from logitless.rewards.workers.programs import fingerprint
from logitless.rewards.workers.sandbox import SandboxOption, require_sandbox
from logitless.rewards.workers.tasks import unfenced
from logitless.rewards.workers.worker import MAX_DEADLINES
from logitless.types import Verdict

_START_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Code(PooledReward):
    """1 if the completion's program passes all tests, else 0; or the fraction of tests that it passes.

    The program is the last block fenced as ``python``, or the whole completion. A program that fails, hangs, goes over
    a limit or kills its parent fails the test. The module's docstring describes the sandbox and what it does not
    prevent; ``logitless doctor`` reports what is in force.

    Args:
        column: column with each row's tests (a list, or JSON text): ``output`` expected of a run with ``input``, or
            of the expression ``call``.
        partial: score the fraction of passed tests.
        deadline_seconds: for one test: processor time while it computes, wall-clock time while it waits.
        memory_mib: memory for one test.
        sandbox: ``required`` refuses to start without a sandbox; ``none`` runs programs with your rights.

    Example:
        >>> tests = [{"call": "double(2)", "output": "4"}, {"call": "double('a')", "output": "'aa'"}]
        >>> Code(partial=True)(["Write double."], ["def double(x): return x + 2"], tests=[tests])
        [0.5]
    """

    name: Literal["code"] = "code"
    column: str = "tests"
    partial: bool = False
    memory_mib: int = 512
    sandbox: SandboxOption = "required"

    def check(self, columns: Columns) -> None:
        """Check that every row has tests, and that there is a sandbox unless the recipe does without."""
        require_sandbox("program", self.sandbox)
        for row, value in enumerate(column(columns, self.column)):
            _tests(value, self.column, row)

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        """One verdict a text, with a detail for each test."""
        values = column(batch.columns, self.column)
        tests = [_tests(value, self.column, row) for row, value in enumerate(values)]
        require_sandbox("program", self.sandbox)
        limits = (self.deadline_seconds, self.memory_mib * MEBIBYTE, self.sandbox == "required")
        items = [
            (unfenced(text, "python"), [_without_output(test) for test in own], *limits)
            for text, own in zip(texts, tests, strict=True)
        ]
        outcomes = program_pool().run(
            "logitless.rewards.workers.programs:run_program",
            items,
            # The worker itself ends a program at its deadline; this one is for a worker that does not respond.
            deadline_seconds=(MAX_DEADLINES * self.deadline_seconds + _START_SECONDS) * max(map(len, tests)),
        )
        return [self._graded(outcome, own) for outcome, own in zip(outcomes, tests, strict=True)]

    def _graded(self, outcome: Outcome, tests: Sequence[Mapping[str, str]]) -> Verdict:
        if outcome.status != "done" or "prints" not in outcome.value:
            return self.verdict(outcome)
        expected = [fingerprint(test["output"]) for test in tests]
        passed = [printed == wanted for printed, wanted in zip(outcome.value["prints"], expected, strict=True)]
        score = sum(passed) / len(passed) if self.partial else float(all(passed))
        return Verdict.graded(score, [("code:test", each) for each in passed])


def _without_output(test: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in test.items() if name != "output"}


def _tests(value: Any, name: str, row: int) -> list[dict[str, str]]:
    """A row's tests, without nulls."""
    read = from_json(value)
    entries = read if isinstance(read, Sequence) else ()
    tests = [{k: text for k, text in each.items() if text is not None} for each in entries if isinstance(each, Mapping)]
    if not tests or len(tests) < len(entries) or not all(map(_is_test, tests)):
        raise DataError(
            needed=f"a list of tests in column {name!r}, each with texts `output` and `input` or `call`",
            given=f"{value!r:.80} in row {row}",
            remedy='Write [{"input": "1 2", "output": "3"}], or [{"call": "add(1, 2)", "output": "3"}].',
        )
    return tests


def _is_test(test: Mapping[str, Any]) -> bool:
    kinds = {"output", "input"}, {"output", "call"}, {"output"}
    return set(test) in kinds and all(isinstance(text, str) for text in test.values())
