"""DAPO's soft penalty on completions that come close to the limit of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from logitless.errors import ConfigurationError
from logitless.rewards.reward import Batch, TextReward
from logitless.rewards.text.length import lengths
from logitless.types import Verdict


@dataclass(frozen=True, kw_only=True)
class Overlong(TextReward):
    """``max(-1, min(0, (max_length - buffer - length) / buffer))`` for a length in tokens.

    0 up to ``max_length - buffer``, then falling linearly to -1 at ``max_length`` and beyond.

    Args:
        max_length: tokens at which the penalty is full; at most the rollout's ``max_new_tokens``.
        buffer: tokens over which it grows.

    Raises:
        ConfigurationError: not ``0 < buffer <= max_length``.

    Source:
        Yu et al. 2025, DAPO (arXiv:2503.14476), equation 13.

    Example:
        >>> Overlong(max_length=10, buffer=4)(["Go on."] * 3, ["..."] * 3, [[1] * 6, [1] * 7, [1] * 10])
        [0.0, -0.25, -1.0]
    """

    name: Literal["overlong"] = "overlong"
    max_length: int
    buffer: int

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.max_length:
            raise ConfigurationError(
                needed="0 < buffer <= max_length",
                given=f"buffer={self.buffer}, max_length={self.max_length}",
                remedy="Use a fifth of max_length as buffer.",
            )

    def grade(self, texts: Sequence[str], batch: Batch) -> list[Verdict]:
        free = self.max_length - self.buffer
        counts = lengths(texts, batch, "tokens")
        return [Verdict.graded(max(-1.0, min(0.0, (free - count) / self.buffer))) for count in counts]
