"""A penalty on repeated runs of words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from logitless.rewards.reward import Batch, TextReward, check_at_least_one
from logitless.types import Verdict


@dataclass(frozen=True, kw_only=True)
class Repetition(TextReward):
    """``distinct / total - 1`` over the n-grams of words: 0 if none repeats, near -1 if all do.

    Words are separated by white space, in lower case. A completion of fewer than ``ngram`` words scores 0.

    Args:
        ngram: words in an n-gram; 1 penalises every repeated word.

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
        return [Verdict.graded(self._score(text.lower().split())) for text in texts]

    def _score(self, words: Sequence[str]) -> float:
        runs = list(zip(*(words[start:] for start in range(self.ngram)), strict=False))
        return len(set(runs)) / len(runs) - 1 if runs else 0.0
