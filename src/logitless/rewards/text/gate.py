"""Gates against completions that satisfy other rewards by being empty or unrelated to the prompt."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from logitless.errors import ConfigurationError
from logitless.rewards.reward import Batch, TextReward, check_at_least_one, prompt_text
from logitless.rewards.text.length import LengthUnit, lengths
from logitless.types import Verdict

_LONG_WORD = re.compile(r"\w{4,}")


@dataclass(frozen=True, kw_only=True)
class MinimumLength(TextReward):
    """1 if the completion has at least ``minimum`` units, else 0; a gate by default.

    Args:
        minimum: smallest length that passes.
        unit: ``tokens``, ``words`` or ``characters``.

    Raises:
        ConfigurationError: a minimum below 1.

    Example:
        >>> MinimumLength(minimum=2)(["Go on."] * 2, ["one", "one two"])
        [0.0, 1.0]
    """

    name: Literal["minimum_length"] = "minimum_length"
    minimum: int = 10
    unit: LengthUnit = "words"
    gate: bool = True

    def __post_init__(self) -> None:
        check_at_least_one(minimum=self.minimum)

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        return [Verdict.graded(float(length >= self.minimum)) for length in lengths(texts, batch, self.unit)]


@dataclass(frozen=True, kw_only=True)
class Relevance(TextReward):
    """1 if the completion repeats enough of the prompt's words, else 0; a gate by default.

    ``|W(prompt) & W(completion)| >= share * |W(prompt)|`` with W the set of words of four letters or more, in lower
    case. Every completion of a prompt without such words passes.

    Args:
        share: in (0, 1].

    Raises:
        ConfigurationError: a share outside (0, 1].

    Example:
        >>> Relevance(share=0.5)(["Describe Paris."] * 2, ["Paris is large.", "It is large."])
        [1.0, 0.0]
    """

    name: Literal["relevance"] = "relevance"
    share: float = 0.1
    gate: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigurationError(
                needed="a share above 0 and at most 1", given=str(self.share), remedy="Use 0.1, or drop the gate."
            )

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        verdicts = []
        for text, prompt in zip(texts, batch.prompts, strict=True):
            words = set(_LONG_WORD.findall(prompt_text(prompt).lower()))
            repeated = words & set(_LONG_WORD.findall(text.lower()))
            verdicts.append(Verdict.graded(float(len(repeated) >= self.share * len(words))))
        return verdicts
