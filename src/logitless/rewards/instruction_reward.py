"""The reward of a suite: how many of its prompt's constraints a completion satisfies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from logitless.errors import UnavailableError
from logitless.rewards.contract import Batch, Columns, TextReward, column
from logitless.rewards.instructions.text import require
from logitless.rewards.suites import Constraint, SuiteName, read_constraints
from logitless.types import Verdict

Reduction: TypeAlias = Literal["fraction", "all"]


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
        return [
            judge(constraints, text, reduction=self.reduction) for constraints, text in zip(rows, texts, strict=True)
        ]

    def _constraints(self, columns: Columns) -> list[tuple[Constraint, ...]]:
        pairs = zip(column(columns, self.ids_column), column(columns, self.arguments_column), strict=True)
        return [
            read_constraints(ids, arguments, suite=self.name, row=f"row {row}")
            for row, (ids, arguments) in enumerate(pairs)
        ]


def judge(constraints: Sequence[Constraint], text: str, *, reduction: Reduction = "fraction") -> Verdict:
    """The strict verdict of a text: the fraction of its constraints that are satisfied, or whether all are.

    ``missing`` where data or a package that a check needs is absent: nothing is scored by guess.

    Example:
        >>> judge(read_constraints(["punctuation:no_comma"], [{}], suite="ifeval", row="row 1"), "Yes.").detail
        (('punctuation:no_comma', True),)
    """
    detail = []
    try:
        for constraint in constraints:
            detail.append((constraint.instruction.id, constraint.is_satisfied(text)))
    except UnavailableError as error:
        return Verdict(score=None, status="missing", detail=tuple(detail), message=str(error))
    except TimeoutError as error:
        return Verdict(score=None, status="timeout", detail=tuple(detail), message=str(error))
    satisfied = sum(passed for _, passed in detail)
    share = satisfied / len(detail)
    return Verdict.graded(float(share == 1) if reduction == "all" else share, detail)
