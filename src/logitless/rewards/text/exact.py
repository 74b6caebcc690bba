"""The completion equals a column of the data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from logitless.errors import DataError
from logitless.rewards.reward import Batch, Columns, TextReward, column
from logitless.rewards.text.format import tagged
from logitless.types import Verdict


@dataclass(frozen=True, kw_only=True)
class Exact(TextReward):
    """1 if the completion equals the answer, or one of several accepted answers, else 0.

    Args:
        column: column with the answer (text) or the accepted answers (list of texts).
        strip: ignore white space around both.
        casefold: ignore upper and lower case.
        answer_tag: grade the content of the last ``<answer_tag>...</answer_tag>``; without the tags the score is 0.

    Example:
        >>> Exact(casefold=True)(["Capital of France?"], [" paris\\n"], answer=["Paris"])
        [1.0]
        >>> Exact(answer_tag="answer")(["2+2="], ["4"], answer=["4"])
        [0.0]
    """

    name: Literal["exact"] = "exact"
    column: str = "answer"
    strip: bool = True
    casefold: bool = False
    answer_tag: str | None = None

    def check(self, columns: Columns) -> None:
        """Check that every row has an answer."""
        for row, value in enumerate(column(columns, self.column)):
            _accepted(value, self.column, row)

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        verdicts = []
        for row, (text, value) in enumerate(zip(texts, column(batch.columns, self.column), strict=True)):
            given = text if self.answer_tag is None else tagged(text, self.answer_tag)
            accepted = {self._normalized(answer) for answer in _accepted(value, self.column, row)}
            verdicts.append(Verdict.graded(float(given is not None and self._normalized(given) in accepted)))
        return verdicts

    def _normalized(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.casefold else text


def _accepted(value: Any, name: str, row: int) -> list[str]:
    """The accepted answers of a row."""
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, list | tuple) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise DataError(
            needed=f"a text or a list of texts in column {name!r}",
            given=f"{value!r:.80} in row {row}",
            remedy="Write numbers as text, and leave out rows without an answer.",
        )
    return list(answers)
