"""A text game: the policy guesses a number and gets a reward when it finds it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from logitless.errors import ConfigurationError, DataError
from logitless.rollout.environment import Reply
from logitless.types import Completion, Prompt


@dataclass
class _Game:
    """A game under way."""

    secret: int
    guesses: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class GuessingGame:
    """Find a number: the reply to each guess is `higher` or `lower`, until it is found or the turns are over.

    The last whole number of a turn is the guess; a turn without one gets the reply `no` and counts. The reward is 1 for
    the number, less `per_guess` for each guess before it. `{name: guessing}` data has the number in column `secret`.

    Args:
        column: column with the number.
        per_guess: taken off for each further guess, so that halving the range is best.
        template: plain text around `{reply}`, used instead of the tokenizer's chat template.

    Raises:
        ConfigurationError: `per_guess` outside of [0, 1].

    Example:
        >>> game = GuessingGame(per_guess=0.1)
        >>> state = game.start(Prompt("7", "1 to 9", (4,), columns={"secret": 5}), seed=0)
        >>> game.reply(state, Completion("7", (4,), "7", "stop")).messages[0]["content"]
        'lower'
        >>> game.reply(state, Completion("7", (4,), "5", "stop"))
        Reply(reward=0.9, messages=(), token_ids=(), failure='')
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: Literal["guessing"] = "guessing"
    column: str = "secret"
    per_guess: float = 0.0
    template: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.per_guess <= 1:
            raise ConfigurationError(
                needed="per_guess from 0 to 1", given=str(self.per_guess), remedy="Use for example 0.1."
            )

    def start(self, prompt: Prompt, *, seed: int) -> _Game:  # noqa: ARG002 - the number is the row's
        """A game with the row's number; raises DataError if the row has none."""
        return _Game(_secret(prompt.columns, self.column, prompt.id))

    def reply(self, state: _Game, turn: Completion) -> Reply:
        """A hint, or the end with a reward."""
        guess = last_number(turn.text)
        if guess == state.secret:
            return Reply(max(0.0, 1 - self.per_guess * len(state.guesses)))
        state.guesses.append(-1 if guess is None else guess)
        hint = "no" if guess is None else "higher" if guess < state.secret else "lower"
        return Reply(messages=({"role": "user", "content": hint},))


def last_number(text: str) -> int | None:
    """The last whole number of a text, of at most 18 digits.

    Example:
        >>> last_number("5? No, 17."), last_number("none"), last_number("9" * 99)
        (17, None, None)
    """
    words = "".join(character if character.isascii() and character.isdigit() else " " for character in text).split()
    return int(words[-1]) if words and len(words[-1]) <= 18 else None


def _secret(columns: Mapping[str, Any], name: str, row: str) -> int:
    value = columns.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise DataError(
            needed=f"a whole number in column {name!r}",
            given=f"{value!r:.80} in row {row!r}",
            remedy="Make the data with {name: guessing}, or name the right column.",
        )
    return value
