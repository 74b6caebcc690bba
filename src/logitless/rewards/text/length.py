"""The length of a completion, up to a cap: the simplest reward with a known optimum, for testing a setup."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from logitless.errors import ConfigurationError
from logitless.rewards.reward import Batch, TextReward, check_at_least_one
from logitless.types import Verdict

LengthUnit: TypeAlias = Literal["tokens", "words", "characters"]


@dataclass(frozen=True, kw_only=True)
class Length(TextReward):
    """``min(length, cap)``.

    Args:
        cap: the largest score.
        unit: ``tokens`` (the stop token included), ``words`` (separated by white space) or ``characters``.

    Raises:
        ConfigurationError: a cap below 1.

    Example:
        >>> Length(cap=3, unit="words")(["Go on."] * 2, ["one two", "one two three four"])
        [2.0, 3.0]
    """

    name: Literal["length"] = "length"
    cap: int = 20
    unit: LengthUnit = "tokens"

    def __post_init__(self) -> None:
        check_at_least_one(cap=self.cap)

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        return [Verdict.graded(float(min(length, self.cap))) for length in lengths(texts, batch, self.unit)]


def lengths(texts: Sequence[str], batch: Batch, unit: LengthUnit) -> list[int]:
    """The length of each text.

    Raises:
        ConfigurationError: the unit is tokens and the batch has no ``completion_ids``.

    Example:
        >>> lengths(["one two"], Batch([""], ["one two"], {}), "characters")
        [7]
    """
    if unit == "characters":
        return [len(text) for text in texts]
    if unit == "words":
        return [len(text.split()) for text in texts]
    if batch.completion_ids is None:
        raise ConfigurationError(
            needed="completion_ids, to count tokens",
            given="none",
            remedy="Pass completion_ids, or count `unit: words` or `unit: characters`.",
        )
    return [len(ids) for ids in batch.completion_ids]
