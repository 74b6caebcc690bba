"""A penalty on saying the same again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from logitless.rewards.reward import Batch, TextReward, check_at_least_one
from logitless.types import Verdict


@dataclass(frozen=True, kw_only=True)
class Repetition(TextReward):
    """``distinct / total - 1`` over the runs of ``ngram`` words: 0 where none repeats, near -1 where all do.

    Words are separated by white space, in lower case. A completion shorter than one run scores 0.

    Args:
        ngram: words in a run; 1 penalises every repeated word.

    Raises:
        ConfigurationError: ngram below 1.

    Example:
        >>> Repetition(ngram=2)(["Go on."] * 2, ["one two three", "so so so so so"])
        [0.0, -0.75]
    """

    name: Literal["repetition"] = "repetition"
    ngram: int = 3

    def __post_init__(self) -> None:
        check_at_least_one(ngram=self.ngram)

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:  # noqa: ARG002
        """One verdict a text."""
        return [Verdict.graded(self._score(text.lower().split())) for text in texts]

    def _score(self, words: Sequence[str]) -> float:
        runs = list(zip(*(words[start:] for start in range(self.ngram)), strict=False))
        return len(set(runs)) / len(runs) - 1 if runs else 0.0
