"""The reward of a suite: the constraints of its prompt that a completion satisfies.

Checks take linear time and run in this process. The exception are arguments that official checks compile as regular
expressions: a row with a repetition in one (``(a+)+b``, ``a?a?a?``) is checked in ``shared_pool``, with a deadline.
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
"""Time limit for a completion that is checked with patterns of its row; beyond it the score is 0."""


@dataclass(frozen=True, kw_only=True)
class InstructionReward(TextReward):
    """The fraction of its prompt's constraints that a completion satisfies, strictly.

    Args:
        name: the suite that the ids must belong to.
        reduction: ``fraction`` of the constraints; or ``all``: 1 if all are satisfied, else 0.
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
        """Check that every row has known ids with their arguments, and that the packages for them are installed."""
        for constraints in self._constraints(columns):
            for constraint in constraints:
                require(constraint.instruction.needs)

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        rows = self._constraints(batch.columns)
        slow = [row for row, found in enumerate(rows) if any(constraint.may_backtrack for constraint in found)]
        verdicts = self._verdicts_of_workers(slow, texts, batch) if slow else {}
        for row, (constraints, text) in enumerate(zip(rows, texts, strict=True)):
            if row not in verdicts:
                verdicts[row] = scored(constraints, text, reduction=self.reduction)
        return [verdicts[row] for row in range(len(texts))]

    def _verdicts_of_workers(self, rows: Sequence[int], texts: Sequence[str], batch: Batch) -> dict[int, Verdict]:
        ids, arguments = column(batch.columns, self.ids_column), column(batch.columns, self.arguments_column)
        outcomes = shared_pool().run(
            "logitless.rewards.instructions.suites:score_response",
            [(self.name, ids[row], arguments[row], texts[row], False) for row in rows],
            deadline_seconds=PATTERN_SECONDS,
        )
        return {
            row: _verdict_of(ids[row], outcome, self.reduction) for row, outcome in zip(rows, outcomes, strict=True)
        }

    def _constraints(self, columns: Columns) -> list[tuple[Constraint, ...]]:
        pairs = zip(column(columns, self.ids_column), column(columns, self.arguments_column), strict=True)
        return [
            read_constraints(ids, arguments, suite=self.name, row=f"row {row}")
            for row, (ids, arguments) in enumerate(pairs)
        ]


def scored(constraints: Sequence[Constraint], text: str, *, reduction: Reduction = "fraction") -> Verdict:
    """The strict verdict on a text: the fraction of constraints that it satisfies, or whether it satisfies all.

    ``missing`` if data or a package is absent that a check needs.

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


def _verdict_of(ids: Sequence[str], outcome: Outcome, reduction: Reduction) -> Verdict:
    if outcome.status == "done" and "strict" in outcome.value:
        return _graded(list(zip(ids, outcome.value["strict"], strict=True)), reduction)
    verdict = verdict_of(outcome)
    return replace(verdict, detail=tuple((name, False) for name in ids)) if verdict.status == "ungradable" else verdict
