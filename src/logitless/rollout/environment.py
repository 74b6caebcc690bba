"""Environments and their episodes: what the policy talks to, and how the two take turns until a limit is reached.

An environment has two methods, ``start`` and ``reply``; it speaks in messages. ``chat.ChatTurns`` makes tokens of them.
Sampling one completion a prompt is the environment that never answers.

``play`` has all episodes go on side by side, a turn at a time. The tokens of a turn are those that were sampled, for
good: the next turn reads them again and nothing tokenizes their text anew. The tokens of an answer are read and not
trained on, and what it pays stays with the turn that earned it.
"""

import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64

from logitless.errors import ConfigurationError, EngineError, InputError, LogitlessError
from logitless.own_code import blamed
from logitless.rollout.engine import Engine
from logitless.rollout.sampling import SamplingOptions
from logitless.seeds import derived_seed
from logitless.types import Completion, Episode, FinishReason, Prompt, read_only


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


def play(
    engine: Engine,
    prompts: Sequence[Prompt],
    environment: Environment,
    *,
    num_samples: int,
    options: SamplingOptions,
    seed: int,
    limits: Limits = Limits(),
    clock: Callable[[], float] = time.monotonic,
) -> list[list[Episode]]:
    """``num_samples`` episodes of each prompt, all of them a turn at a time.

    Args:
        engine: samples every turn.
        prompts: P, with distinct ids.
        environment: answers, in messages with their tokens (``chat.ChatEnvironment`` adds them). Where it raises, the
            episodes that it was asked about end with that as their failure.
        num_samples: G.
        options: of each turn; ``max_new_tokens`` bounds a turn, ``limits`` the episode.
        seed: with the same weights, the same episodes.
        limits: of an episode.
        clock: seconds, for ``limits.max_seconds``.

    Returns:
        G episodes of each prompt, in order. One whose last turn was cut, or which the environment would have gone on
        with beyond a limit, has ``finish_reason="length"``.

    Raises:
        InputError: an answer without tokens.
        EngineError: the engine raised, or did not give the completions that it was asked for.

    Example:
        >>> class Parrot:
        ...     def sample(self, prompts, num_samples, options, *, seed):
        ...         return [[Completion(p.id, p.token_ids, p.text, "stop")] * num_samples for p in prompts]
        ...     def load(self, weights, version): ...
        ...     def close(self): ...
        >>> asked = [Prompt("7", "2+2=", (4, 9))]
        >>> [[episode]] = play(Parrot(), asked, SingleTurn(), num_samples=1, options=SamplingOptions(9), seed=0)
        >>> episode.completion.token_ids.tolist(), [message["role"] for message in episode.messages]
        ([4, 9], ['user', 'assistant'])
    """
    began = clock()
    groups = [
        [_Playing(p, g, environment.start(p, seed=derived_seed(seed, p.id, g))) for g in range(num_samples)]
        for p in prompts
    ]
    playing = [each for group in groups for each in group]
    first = sampled(engine, prompts, num_samples, options, seed=seed)
    _answer(environment, playing, [completion for of_prompt in first for completion in of_prompt])
    for number in range(1, limits.max_turns):
        late = limits.max_seconds is not None and clock() - began >= limits.max_seconds
        going_on = [each for each in playing if not (each.over or late or each.is_full(options, limits))]
        if not going_on:
            break
        asked = [each.next_prompt() for each in going_on]
        turns = sampled(engine, asked, 1, options, seed=derived_seed(seed, "turn", number))
        _answer(environment, going_on, [completion for [completion] in turns])
    return [[each.episode() for each in group] for group in groups]


@dataclass
class _Playing:
    """An episode under way."""

    prompt: Prompt
    sample: int
    state: Any
    turns: list[tuple[Completion, Reply]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether no turn follows: the environment is done, or the last turn was cut off."""
        completion, reply = self.turns[-1]
        return reply.ends or completion.finish_reason == "length"

    def is_full(self, options: SamplingOptions, limits: Limits) -> bool:
        """Whether the next turn might go beyond the episode's tokens."""
        so_far = sum(completion.length + len(reply.token_ids) for completion, reply in self.turns)
        return limits.max_tokens is not None and so_far + options.max_new_tokens > limits.max_tokens

    def next_prompt(self) -> Prompt:
        """What the engine reads for the next turn: everything so far, under an id of its own."""
        name = f"{self.prompt.id}/{self.sample}/{len(self.turns)}"
        return Prompt(name, "", tokens_so_far(self.prompt, self.turns))

    def episode(self) -> Episode:
        """All turns as one completion, with what was said and paid."""
        messages = list(self.prompt.messages or ({"role": "user", "content": self.prompt.text},))
        for number, (completion, reply) in enumerate(self.turns):
            messages.append({"role": "assistant", "content": completion.text})
            messages += reply.messages if number + 1 < len(self.turns) else ()
        paid = tuple(reply.reward for _, reply in self.turns)
        failure = self.turns[-1][1].failure
        return Episode(joined(self.turns), tuple(messages), paid if any(paid) else (), failure)


def _answer(environment: Environment, playing: Sequence[_Playing], turns: Sequence[Completion]) -> None:
    """Add a turn and its reply to each episode."""
    try:
        replies = replies_of(environment, [each.state for each in playing], turns)
    except LogitlessError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        replies = [Reply(failure=why)] * len(turns)
    for each, turn, reply in zip(playing, turns, replies, strict=True):
        if reply.messages and not len(reply.token_ids):
            raise InputError(
                needed="the tokens of what an environment says",
                given=f"{len(reply.messages)} messages without",
                remedy="Put it into a ChatEnvironment, which renders messages with the tokenizer's chat template.",
            )
        each.turns.append((turn, reply))


def sampled(
    engine: Engine, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
) -> list[list[Completion]]:
    """What the engine samples, checked.

    Raises:
        EngineError: it raised, or its answer is not what was asked for.
    """
    # A batch that is too large is not the engine's fault, and whoever chose its size waits for this exception.
    passing = torch.OutOfMemoryError
    with blamed(f"completions from {type(engine).__name__}.sample (rollout.engine)", EngineError, passing=passing):
        answer = engine.sample(prompts, num_samples, options, seed=seed)
    return checked(answer, prompts, num_samples)


def checked(answer: Any, prompts: Sequence[Prompt], num_samples: int) -> list[list[Completion]]:
    """The answer of ``Engine.sample``, if it is what was asked for: an engine of somebody else's may answer anything.

    Args:
        answer: of the engine.
        prompts: that it was asked about.
        num_samples: completions that it was asked for, of each prompt.

    Raises:
        EngineError: another number of completions than asked for, in another order, or something else.

    Example:
        >>> checked([[Completion("7", (4,), "4", "stop")]], [Prompt("7", "2+2=", (4,))], 1)[0][0].text
        '4'
        >>> checked([[]], [Prompt("7", "2+2=", (4,))], 1)
        Traceback (most recent call last):
        logitless.errors.EngineError: needed 1 completions of prompt '7' ...
    """
    groups = [list(group) if isinstance(group, Iterable) else [group] for group in _listed(answer)]
    if len(groups) != len(prompts):
        raise _broken(f"a list of completions for each of {len(prompts)} prompts", f"{len(groups)} lists")
    for prompt, group in zip(prompts, groups, strict=True):
        if len(group) != num_samples:
            raise _broken(f"{num_samples} completions of prompt {prompt.id!r}", f"{len(group)}")
        for each in group:
            if not isinstance(each, Completion):
                raise _broken(f"a logitless.types.Completion for prompt {prompt.id!r}", f"a {type(each).__name__}")
            if each.prompt_id != prompt.id:
                raise _broken(
                    f"completions of prompt {prompt.id!r}, in the prompts' order", f"one of {each.prompt_id!r}"
                )
            if each.finish_reason not in get_args(FinishReason):
                raise _broken(f"finish_reason {' or '.join(get_args(FinishReason))}", repr(each.finish_reason))
    return groups


def _listed(answer: Any) -> list[Any]:
    if not isinstance(answer, Iterable):
        raise _broken("a list of completions for each prompt", f"a {type(answer).__name__}")
    return list(answer)


def _broken(needed: str, given: str) -> EngineError:
    return EngineError(
        needed=f"{needed} from rollout.engine", given=given, remedy="Repair what the engine's `sample` returns."
    )


def tokens_so_far(prompt: Prompt, turns: Sequence[tuple[Completion, Reply]]) -> Int64[np.ndarray, "L"]:
    """What the next turn goes on from: the prompt, and each turn with what was replied.

    Example:
        >>> tokens_so_far(Prompt("7", "", (4, 9)), [(Completion("7", (5,), "5", "stop"), Reply())]).tolist()
        [4, 9, 5]
    """
    said = [np.asarray(ids, np.int64) for turn, reply in turns for ids in (turn.token_ids, reply.token_ids)]
    return np.concatenate([prompt.token_ids, *said])


def joined(turns: Sequence[tuple[Completion, Reply]]) -> Completion:
    """The turns and what came between them, end to end; a single turn that was to be the last is itself.

    Tokens that were given have log-prob 0, for they have probability 1.

    Example:
        >>> first, second = Completion("7", (4,), "4", "stop"), Completion("7/0/1", (6,), "6", "stop")
        >>> both = joined([(first, Reply(messages=({"role": "user", "content": "?"},), token_ids=(8, 9))),
        ...                (second, Reply())])
        >>> both.token_ids.tolist(), both.trained.tolist(), both.text
        ([4, 8, 9, 6], [True, False, False, True], '6')
    """
    (first, _), (last, last_reply) = turns[0], turns[-1]
    finish_reason = last.finish_reason if last_reply.ends else "length"
    if len(turns) == 1 and finish_reason == first.finish_reason:
        return first
    parts: list[Completion] = []
    for number, (turn, reply) in enumerate(turns):
        parts.append(replace(turn, turn=np.full(turn.length, number), finish_reason=finish_reason))
        if number + 1 < len(turns):
            parts.append(given(reply.token_ids, turn, turn=number, version=turn.weights_version))
    return end_to_end(parts)


def given(token_ids: Sequence[int] | np.ndarray, beside: Completion, *, turn: int, version: int | None) -> Completion:
    """Tokens that were read and not sampled, as a part of a completion: of probability 1, and not trained on.

    Args:
        token_ids: of them.
        beside: a part from the engine, which says what is known of each token.
        turn: that they belong to.
        version: of the weights that read them; None if unknown.
    """
    zeros = read_only(np.zeros(len(token_ids), np.float32))
    known = {
        name: zeros for name in ("logp_sampler", "entropy_sampler", "logp_policy") if getattr(beside, name) is not None
    }
    return Completion(
        beside.prompt_id,
        np.asarray(token_ids),
        "",
        "stop",
        trained=zeros > 0,
        turn=np.full(len(zeros), turn),
        weights_version=version,
        **known,
    )


def end_to_end(parts: Sequence[Completion]) -> Completion:
    """Parts of one completion, with the last one's text and finish reason; None for numbers that one part lacks."""

    def whole(values: Sequence[np.ndarray | None]) -> np.ndarray | None:
        known = [each for each in values if each is not None]
        return read_only(np.concatenate(known)) if len(known) == len(values) else None

    every = [part for part in parts if part.length]
    versions = [_versions(part) for part in every]
    oldest = min((int(each.min()) for each in versions if each is not None), default=None)
    several = any(each is not None and bool((each != oldest).any()) for each in versions)
    return Completion(
        parts[0].prompt_id,
        read_only(np.concatenate([part.token_ids for part in parts])),
        parts[-1].text,
        parts[-1].finish_reason,
        logp_sampler=whole([part.logp_sampler for part in parts]),
        trained=whole([np.ones(p.length, np.bool_) if p.trained is None else p.trained for p in parts]),
        turn=whole([np.zeros(p.length, np.int64) if p.turn is None else p.turn for p in parts]),
        weights_version=oldest,
        entropy_sampler=whole([part.entropy_sampler for part in parts]),
        token_versions=whole(versions) if several else None,
        logp_policy=whole([part.logp_policy for part in parts]),
    )


def _versions(part: Completion) -> np.ndarray | None:
    """Of each token; None if unknown."""
    if part.token_versions is not None or part.weights_version is None:
        return part.token_versions
    return np.full(part.length, part.weights_version)
