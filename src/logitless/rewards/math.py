"""Mathematical equality, as math-verify decides it. It may take for ever (towers of powers), so a worker does it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from logitless.errors import DataError
from logitless.rewards.contract import Batch, Columns, check_text_column, column
from logitless.rewards.format import tagged
from logitless.rewards.pooled import PooledReward, require, verdict_of
from logitless.types import Verdict

_NEEDS = ("math_verify:parse",)


@dataclass(frozen=True, kw_only=True)
class Math(PooledReward):
    """1 where the last expression of the completion equals the gold answer, else 0.

    Args:
        column: column with the gold answer: a number, or LaTeX with or without dollar signs.
        answer_tag: read what stands in the last ``<answer_tag>...</answer_tag>``; without the tags the score is 0.

    Source:
        https://github.com/huggingface/Math-Verify.

    Example:
        >>> Math()(["1/4 + 1/4?"], ["It is $2/4$."], answer=["0.5"])
        [1.0]
    """

    name: Literal["math"] = "math"
    column: str = "answer"
    answer_tag: str | None = None

    def check(self, columns: Columns) -> None:
        """math-verify is here and reads every gold answer."""
        require("math_verify", "math-verify")
        check_text_column(columns, self.column)
        gold = columns[self.column]
        verdicts = [verdict_of(outcome) for outcome in self.run("grade_math", [(g, "0") for g in gold], _NEEDS)]
        for row, verdict in enumerate(verdicts):
            if verdict.status != "graded":
                raise DataError(
                    needed=f"a gold answer in column {self.column!r} that math-verify can read in time",
                    given=f"{gold[row]!r:.80} in row {row} ({verdict.message})",
                    remedy="Write it as a number or as LaTeX, or leave the row out.",
                )

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        """One verdict a text."""
        require("math_verify", "math-verify")
        said = texts if self.answer_tag is None else [tagged(text, self.answer_tag) or "" for text in texts]
        items = list(zip(column(batch.columns, self.column), said, strict=True))
        return [verdict_of(outcome) for outcome in self.run("grade_math", items, _NEEDS)]
