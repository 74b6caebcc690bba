"""Environments: what the policy talks to, and what bounds an episode.

An environment has two methods, ``start`` and ``reply``; it speaks in messages. ``chat.ChatTurns`` makes tokens of them,
and ``play.play`` has the episodes. Sampling one completion a prompt is the environment that never answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from logitless.errors import ConfigurationError, InputError
from logitless.rollout.engine import Engine
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Episode, Prompt


@dataclass(frozen=True)
class Reply:
    """What an environment does after an assistant turn.

    Args:
        reward: paid for that turn.
        messages: what it says, for example ``{"role": "tool", "content": "4"}``; empty ends the episode.
        token_ids: the same as the policy reads it, up to where its next turn begins: the end of the turn before, the
            messages under the chat template and the header of an assistant's message. Empty where ``ChatTurns`` is to
            make them.
        failure: why the environment could not answer, where that is its own failure and not the policy's: the episode
            ends and has no reward, which is never that of a wrong answer.

    Raises:
        InputError: tokens without a message, or messages beside a failure.

    Example:
        >>> Reply(reward=0.5).ends
        True
    """

    reward: float = 0.0
    messages: tuple[Mapping[str, Any], ...] = ()
    token_ids: Sequence[int] = ()
    failure: str = ""

    def __post_init__(self) -> None:
        if (len(self.token_ids) and not self.messages) or (self.failure and self.messages):
            raise InputError(
                needed="messages for tokens to be read as, and none beside a failure",
                given=f"{len(self.messages)} messages, {len(self.token_ids)} tokens, failure {self.failure!r}",
                remedy="Give the messages that the tokens say.",
            )

    @property
    def ends(self) -> bool:
        """Whether the episode is over."""
        return not self.messages


@runtime_checkable
class Environment(Protocol):
    """What the policy talks to. An episode has a state of its own, so that one environment serves all at once."""

    def start(self, prompt: Prompt, *, seed: int) -> Any:
        """The state of a new episode.

        Args:
            prompt: that it begins with.
            seed: for whatever is random in it.
        """
        ...

    def reply(self, state: Any, turn: Completion) -> Reply:
        """What follows an assistant turn; may change ``state``.

        Args:
            state: of ``start``.
            turn: the tokens and the text of this turn alone.
        """
        ...


@runtime_checkable
class BatchedEnvironment(Environment, Protocol):
    """An environment that answers the turns of many episodes at once: one whose tools run in worker processes."""

    def replies(self, states: Sequence[Any], turns: Sequence[Completion]) -> list[Reply]:
        """``reply`` of each, in order."""
        ...


@runtime_checkable
class Driver(Protocol):
    """Has whole episodes by itself, where a program of somebody else's drives them: see ``harness.HarnessEpisodes``."""

    def episodes(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        options: SamplingOptions,
        seed: int,
        limits: "Limits",
    ) -> tuple[list[Prompt], list[list[Episode]]]:
        """``num_samples`` episodes of each prompt, and the prompts as the policy read them."""
        ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds an episode; one that a limit cut has ``finish_reason="length"``.

    Args:
        max_turns: assistant turns.
        max_tokens: tokens after the prompt, the environment's included; a turn begins only where
            ``sampling.max_new_tokens`` fit. Null: turns alone bound it.
        max_seconds: after so long no turn begins; the run is then not repeatable. Null: no limit.

    Raises:
        ConfigurationError: a limit that is not positive.

    Example:
        >>> Limits(max_turns=2, max_tokens=64).max_seconds is None
        True
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    max_turns: int = 16
    max_tokens: int | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 < value < float("inf"):
                raise ConfigurationError(
                    needed=f"a positive {name}", given=str(value), remedy="Raise it, or leave it out."
                )


class SingleTurn:
    """One completion, no answer, no reward of its own.

    Example:
        >>> SingleTurn().reply(None, Completion("7", (4,), "4", "stop")).ends
        True
    """

    def start(self, prompt: Prompt, *, seed: int) -> None:
        """Nothing to remember."""

    def reply(self, state: None, turn: Completion) -> Reply:  # noqa: ARG002
        """The end."""
        return Reply()


def replies_of(environment: Environment, states: Sequence[Any], turns: Sequence[Completion]) -> list[Reply]:
    """What the environment answers to each turn, at once where it can.

    Example:
        >>> replies_of(SingleTurn(), [None], [Completion("7", (4,), "4", "stop")])
        [Reply(reward=0.0, messages=(), token_ids=(), failure='')]
    """
    if isinstance(environment, BatchedEnvironment):
        return environment.replies(states, turns)
    return [environment.reply(state, turn) for state, turn in zip(states, turns, strict=True)]
