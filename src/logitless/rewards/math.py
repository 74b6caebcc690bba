"""Mathematical equality, decided by math-verify.

math-verify may run for ever (towers of powers), and its parser evaluates parts of the text as Python. Therefore each
text of which it parses more than words and numbers gets a process of its own in a sandbox, and texts whose size alone
would stall it are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from logitless.errors import DataError
from logitless.rewards.reward import Batch, Columns, check_text_column, column
from logitless.rewards.text.format import tagged
from logitless.rewards.workers.pooled import ConfinedReward, require
from logitless.types import Verdict


@dataclass(frozen=True, kw_only=True)
class Math(ConfinedReward):
    """1 if the last expression of the completion equals the gold answer, else 0.

    Args:
        column: column with the gold answer: a number, or LaTeX with or without dollar signs.
        answer_tag: grade the content of the last ``<answer_tag>...</answer_tag>``; without the tags the score is 0.

    Source:
        https://github.com/huggingface/Math-Verify.

    Example:
        >>> Math()(["1/4 + 1/4?"], ["It is $2/4$."], answer=["0.5"])
        [1.0]
    """

    purpose: ClassVar[str] = "math"
    needs: ClassVar[tuple[str, ...]] = ("math_verify:parse",)
    warm: ClassVar[str] = "logitless.rewards.workers.tasks:warm_math"

    name: Literal["math"] = "math"
    column: str = "answer"
    answer_tag: str | None = None

    def check(self, columns: Columns) -> None:
        """Check that math-verify is installed and parses every gold answer."""
        require("math_verify", "math-verify")
        check_text_column(columns, self.column)
        gold = columns[self.column]
        outcomes = self.run_confined("grade_math", [(g, "0") for g in gold], gold)
        verdicts = [self.verdict(outcome) for outcome in outcomes]
        for row, verdict in enumerate(verdicts):
            if verdict.status != "graded":
                raise DataError(
                    needed=f"a gold answer in column {self.column!r} that math-verify can parse in time",
                    given=f"{gold[row]!r:.80} in row {row} ({verdict.message})",
                    remedy="Write it as a number or as LaTeX, or leave the row out.",
                )

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        require("math_verify", "math-verify")
        answers = texts if self.answer_tag is None else [tagged(text, self.answer_tag) or "" for text in texts]
        items = list(zip(column(batch.columns, self.column), answers, strict=True))
        once = list(dict.fromkeys(items))  # completions of a prompt are often alike, and each costs a process
        texts = [f"{gold} {text}" for gold, text in once]
        outcomes = self.run_confined("grade_math", once, texts, harmless="grade_math_of_numbers")
        verdicts = dict(zip(once, map(self.verdict, outcomes), strict=True))
        return [verdicts[item] for item in items]
