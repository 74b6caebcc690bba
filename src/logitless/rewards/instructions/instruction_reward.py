"""The reward of a suite: how many of its prompt's constraints a completion satisfies.

Checks run in this process: each takes linear time. The exception are arguments that official checks compile as regular
expressions. A row with one that repeats something (``(a+)+b``, ``a?a?a?``) is checked in ``shared_pool``, within a
deadline.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from logitless.errors import UnavailableError
from logitless.rewards.instructions.suites import Constraint, SuiteName, read_constraints
from logitless.rewards.instructions.text import require
from logitless.rewards.reward import Batch, Columns, TextReward, column
from logitless.rewards.workers.pool import Outcome, shared_pool
from logitless.rewards.workers.pooled import ungradable, verdict_of
from logitless.types import Verdict

Reduction: TypeAlias = Literal["fraction", "all"]

PATTERN_SECONDS = 2.0
"""Wall clock for a completion that is checked by patterns from its row; then it scores 0."""


@dataclass(frozen=True, kw_only=True)
class InstructionReward(TextReward):
    """How many of its prompt's constraints a completion satisfies, strictly.

    Args:
        name: the suite that the ids must be from.
        reduction: ``fraction`` of the constraints, or 1 where ``all`` are satisfied and else 0.
        ids_column: column with the list of instruction ids.
        arguments_column: column with the list of their arguments.

    Example:
        >>> reward = InstructionReward(name="ifeval_basic")
        >>> row = {"instruction_id_list": [["punctuation:no_comma", "startend:quotation"]], "kwargs": [[{}, {}]]}
        >>> reward(["Say yes."], ["Yes."], **row)
        [0.5]
    """

    name: SuiteName = "ifeval"
    reduction: Reduction = "fraction"
    ids_column: str = "instruction_id_list"
    arguments_column: str = "kwargs"

    def check(self, columns: Columns) -> None:
        """Every row has known ids with their arguments, and the packages that they need are installed."""
        for constraints in self._constraints(columns):
            for constraint in constraints:
                require(constraint.instruction.needs)

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        """One verdict a text."""
        rows = self._constraints(batch.columns)
        risky = [row for row, found in enumerate(rows) if any(constraint.may_backtrack for constraint in found)]
        bounded = dict(zip(risky, self._grade_bounded(risky, texts, batch), strict=True))
        return [
            bounded[row] if row in bounded else scored(constraints, text, reduction=self.reduction)
            for row, (constraints, text) in enumerate(zip(rows, texts, strict=True))
        ]

    def _grade_bounded(self, rows: Sequence[int], texts: Sequence[str], batch: Batch) -> list[Verdict]:
        ids, arguments = column(batch.columns, self.ids_column), column(batch.columns, self.arguments_column)
        outcomes = (
            shared_pool().run(
                "logitless.rewards.instructions.suites:score_response",
                [(self.name, ids[row], arguments[row], texts[row], False) for row in rows],
                deadline_seconds=PATTERN_SECONDS,
            )
            if rows
            else []
        )
        return [
            _bounded_verdict(ids[row], outcome, self.reduction) for row, outcome in zip(rows, outcomes, strict=True)
        ]

    def _constraints(self, columns: Columns) -> list[tuple[Constraint, ...]]:
        pairs = zip(column(columns, self.ids_column), column(columns, self.arguments_column), strict=True)
        return [
            read_constraints(ids, arguments, suite=self.name, row=f"row {row}")
            for row, (ids, arguments) in enumerate(pairs)
        ]


def scored(constraints: Sequence[Constraint], text: str, *, reduction: Reduction = "fraction") -> Verdict:
    """The strict verdict of a text: the fraction of its constraints that are satisfied, or whether all are.

    ``missing`` where data or a package that a check needs is absent: nothing is scored by guess.

    Example:
        >>> scored(read_constraints(["punctuation:no_comma"], [{}], suite="ifeval", row="row 1"), "Yes.").detail
        (('punctuation:no_comma', True),)
    """
    detail = []
    try:
        for constraint in constraints:
            detail.append((constraint.instruction.id, constraint.is_satisfied(text)))
    except UnavailableError as error:
        return Verdict(score=None, status="missing", detail=tuple(detail), message=str(error))
    except TimeoutError as error:
        return ungradable(str(error), detail=detail)
    return _graded(detail, reduction)


def _graded(detail: Sequence[tuple[str, bool]], reduction: Reduction) -> Verdict:
    share = sum(passed for _, passed in detail) / len(detail)
    return Verdict.graded(float(share == 1) if reduction == "all" else share, detail)


def _bounded_verdict(ids: Sequence[str], outcome: Outcome, reduction: Reduction) -> Verdict:
    if outcome.status == "done" and "strict" in outcome.value:
        return _graded(list(zip(ids, outcome.value["strict"], strict=True)), reduction)
    verdict = verdict_of(outcome)
    return replace(verdict, detail=tuple((name, False) for name in ids)) if verdict.status == "ungradable" else verdict
