"""Environments and episodes: the policy and an environment take turns until a limit is reached.

An environment has two methods, ``start`` and ``reply``, and replies in messages; ``chat.ChatTurns`` turns them into
tokens. ``SingleTurn``, which never replies, is plain sampling of one completion.

``play`` advances all episodes together, one turn at a time. Sampled tokens are kept: the next turn continues them, and
their text is never tokenized again. Tokens of replies are read but not trained on. A reward belongs to the turn before
it.
"""

import math
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
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

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
"""Folder of this library's code, whose calls around user code a traceback leaves out."""


@dataclass(frozen=True)
class Reply:
    """An environment's reaction to an assistant turn.

    Args:
        reward: for that turn.
        messages: a sequence of mappings with the texts ``role`` and ``content``, for example
            ``[{"role": "tool", "content": "4"}]``; empty ends the episode.
        token_ids: all tokens between this turn and the next: the end of the turn, the messages under the chat template
            and the header of an assistant's message. Empty if ``ChatTurns`` is to make them.
        failure: why the environment could not reply, if the policy is not to blame. The episode then ends without a
            reward, unlike one with a wrong answer.

    Raises:
        InputError: messages of another form, tokens without a message, or messages beside a failure.
    """

    reward: float = 0.0
    messages: Sequence[Mapping[str, Any]] = ()
    token_ids: Sequence[int] = ()
    failure: str = ""

    def __post_init__(self) -> None:
        if not _are_messages(self.messages):
            raise InputError(
                needed="messages as a list of mappings with a text as role and a text as content",
                given=f"{self.messages!r:.200}",
                remedy='Give messages=[{"role": "user", "content": "..."}].',
            )
        if (len(self.token_ids) and not self.messages) or (self.failure and self.messages):
            raise InputError(
                needed="messages with every token_ids, and none with a failure",
                given=f"{len(self.messages)} messages, {len(self.token_ids)} tokens, failure {self.failure!r}",
                remedy="Give the messages that the tokens are made of.",
            )

    @property
    def ends(self) -> bool:
        """Whether the episode is over."""
        return not self.messages


def _are_messages(given: Any) -> bool:
    return isinstance(given, Sequence) and all(
        isinstance(each, Mapping) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        for each in given
    )


@runtime_checkable
class Environment(Protocol):
    """What the policy talks to. Each episode has its own state, so that one environment serves all of them."""

    def start(self, prompt: Prompt, *, seed: int) -> Any:
        """The state of a new episode.

        Args:
            prompt: its first message.
            seed: of all randomness in it.
        """

    def reply(self, state: Any, turn: Completion) -> Reply:
        """Reply to an assistant turn; may change ``state``.

        Args:
            state: from ``start``.
            turn: tokens and text of this turn alone.
        """


@runtime_checkable
class BatchedEnvironment(Environment, Protocol):
    """An environment that replies to many episodes at once, for example because its tools run in worker processes."""

    def replies(self, states: Sequence[Any], turns: Sequence[Completion]) -> list[Reply]:
        """``reply`` of each, in order."""


@runtime_checkable
class Driver(Protocol):
    """Runs whole episodes itself, driven by another program: see ``harness.HarnessEpisodes``."""

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
        """``num_samples`` episodes of each prompt, and the prompts that the policy read."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of an episode; one that a limit cut has ``finish_reason="length"``.

    Args:
        max_turns: assistant turns.
        max_tokens: tokens after the prompt, the environment's included. A turn begins only if
            ``sampling.max_new_tokens`` still fit. Recipes need it.
        max_seconds: no turn begins after so long; the run is then not repeatable. Null: no limit.

    Raises:
        ConfigurationError: a limit that is not positive.
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
    """The environment that never replies: one completion, no reward."""

    def start(self, prompt: Prompt, *, seed: int) -> None:
        """No state."""

    def reply(self, state: None, turn: Completion) -> Reply:  # noqa: ARG002
        """End the episode."""
        return Reply()


def replies_of(environment: Environment, states: Sequence[Any], turns: Sequence[Completion]) -> list[Reply]:
    """The environment's reply to each turn, in one call if it supports that.

    Where ``reply`` raises or returns something else, its episode fails, and no other.
    """
    name = type(environment).__name__
    if isinstance(environment, BatchedEnvironment):
        replies = environment.replies(states, turns)
        if len(replies) != len(turns):
            raise TypeError(f"{name} has to return a Reply for each turn, not {len(replies)} for {len(turns)} turns")
    else:
        replies = [_reply(environment, state, turn) for state, turn in zip(states, turns, strict=True)]
    return [_checked(reply, name) for reply in replies]


def _ends_the_run(error: Exception) -> bool:
    """Whether an environment's error is more than a failed episode; a ``Reply`` of wrong arguments is no more."""
    return isinstance(error, LogitlessError) and not isinstance(error, InputError)


def _reply(environment: Environment, state: Any, turn: Completion) -> Reply:
    try:
        return environment.reply(state, turn)
    except Exception as error:
        if _ends_the_run(error):
            raise
        return Reply(failure=failure_of(error))


def _checked(reply: Any, name: str) -> Reply:
    """A reply with a finite reward; a failure in place of anything else."""
    if not isinstance(reply, Reply):
        return Reply(failure=f"TypeError: {name} has to return a Reply for each turn, not a {type(reply).__name__}")
    wrong = wrong_reward(reply.reward)
    return Reply(failure=wrong) if wrong else reply


def wrong_reward(reward: Any) -> str:
    """Why what an environment pays is no reward; empty for a finite number.

    Example:
        >>> wrong_reward(0.5), wrong_reward(float("inf")), wrong_reward("much")
        ('', 'a finite number expected as reward, inf given', "a finite number expected as reward, 'much' given")
    """
    try:
        if math.isfinite(reward):
            return ""
    except (TypeError, OverflowError):  # no number, or an integer beyond every float
        pass
    return f"a finite number expected as reward, {reward!r:.80} given"


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
    """``num_samples`` episodes of each prompt, advanced together one turn at a time.

    Args:
        engine: samples every turn.
        prompts: P, with distinct ids.
        environment: replies in messages with their tokens (``chat.ChatEnvironment`` adds them). If it raises, the
            episode ends with the exception as its failure; if ``replies`` raises, those of that call do.
        num_samples: G.
        options: of each turn; ``max_new_tokens`` bounds a turn, ``limits`` the episode.
        seed: the same seed and weights give the same episodes.
        limits: of an episode.
        clock: seconds, for ``limits.max_seconds``.

    Returns:
        G episodes of each prompt, in order. ``finish_reason`` is ``"length"`` if the last turn was cut, or if a limit
        ended an episode that the environment would have continued.

    Raises:
        InputError: a reply without tokens.
        EngineError: the engine raised, or returned other completions than requested.

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
        [_started(environment, p, g, seed=derived_seed(seed, p.id, g)) for g in range(num_samples)] for p in prompts
    ]
    running = [each for group in groups for each in group]
    first = sampled(engine, prompts, num_samples, options, seed=seed)
    _add_turns(environment, running, [completion for of_prompt in first for completion in of_prompt])
    for number in range(1, limits.max_turns):
        late = limits.max_seconds is not None and clock() - began >= limits.max_seconds
        running = [each for each in running if not (each.over or late or each.is_full(options, limits))]
        if not running:
            break
        next_prompts = [each.next_prompt() for each in running]
        turns = sampled(engine, next_prompts, 1, options, seed=derived_seed(seed, "turn", number))
        _add_turns(environment, running, [completion for [completion] in turns])
    return [[each.episode() for each in group] for group in groups]


@dataclass
class _Running:
    """An episode under way; one whose start failed ends with its first turn."""

    prompt: Prompt
    sample: int
    state: Any
    failure: str = ""
    turns: list[tuple[Completion, Reply]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether no turn follows: the environment ended it, or the last turn was cut."""
        completion, reply = self.turns[-1]
        return reply.ends or completion.finish_reason == "length"

    def is_full(self, options: SamplingOptions, limits: Limits) -> bool:
        """Whether the next turn might go beyond the episode's tokens."""
        so_far = sum(completion.length + len(reply.token_ids) for completion, reply in self.turns)
        return limits.max_tokens is not None and so_far + options.max_new_tokens > limits.max_tokens

    def next_prompt(self) -> Prompt:
        """The prompt of the next turn: all tokens so far, under an id of its own."""
        name = f"{self.prompt.id}/{self.sample}/{len(self.turns)}"
        return Prompt(name, "", tokens_so_far(self.prompt, self.turns))

    def episode(self) -> Episode:
        """All turns as one completion, with messages and rewards."""
        messages = list(self.prompt.messages or ({"role": "user", "content": self.prompt.text},))
        for number, (completion, reply) in enumerate(self.turns):
            messages.append({"role": "assistant", "content": completion.text})
            messages += reply.messages if number + 1 < len(self.turns) else ()
        turn_rewards = tuple(reply.reward for _, reply in self.turns)
        failure = self.turns[-1][1].failure
        return Episode(joined(self.turns), tuple(messages), turn_rewards if any(turn_rewards) else (), failure)


def _started(environment: Environment, prompt: Prompt, sample: int, *, seed: int) -> _Running:
    try:
        return _Running(prompt, sample, environment.start(prompt, seed=seed))
    except Exception as error:
        if _ends_the_run(error):
            raise
        return _Running(prompt, sample, None, failure_of(error))


def failure_of(error: Exception) -> str:
    """An exception as the failure of an episode: a line, and below it its traceback, which begins in user code."""
    calls = _calls(error.__traceback__)
    users = next((each for each in calls if not each.tb_frame.f_code.co_filename.startswith(_OURS)), None)
    trace = traceback.format_exception(type(error), error, users or error.__traceback__)
    return f"{type(error).__name__}: {error}\n{''.join(trace)}"


def _calls(last: TracebackType | None) -> Iterator[TracebackType]:
    while last is not None:
        yield last
        last = last.tb_next


def _add_turns(environment: Environment, running: Sequence[_Running], turns: Sequence[Completion]) -> None:
    """Add to each episode its turn and the environment's reply to it."""
    asked = [(each.state, turn) for each, turn in zip(running, turns, strict=True) if not each.failure]
    try:
        given = replies_of(environment, [state for state, _ in asked], [turn for _, turn in asked])
    except Exception as error:
        if _ends_the_run(error):
            raise
        given = [Reply(failure=failure_of(error))] * len(asked)
    left = iter(given)
    replies = [Reply(failure=each.failure) if each.failure else next(left) for each in running]
    for each, turn, reply in zip(running, turns, replies, strict=True):
        if reply.messages and not len(reply.token_ids):
            raise InputError(
                needed="tokens with the environment's messages",
                given=f"{len(reply.messages)} messages without",
                remedy="Put it into a ChatEnvironment, which renders messages with the tokenizer's chat template.",
            )
        each.turns.append((turn, reply))


def sampled(
    engine: Engine, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
) -> list[list[Completion]]:
    """Completions from the engine, checked.

    Raises:
        EngineError: the engine raised, or returned other completions than requested.
    """
    passing = torch.OutOfMemoryError  # the caller chose the batch's size and catches this
    with blamed(f"completions from {type(engine).__name__}.sample (rollout.engine)", EngineError, passing=passing):
        completions = engine.sample(prompts, num_samples, options, seed=seed)
    return checked(completions, prompts, num_samples)


def checked(completions: Any, prompts: Sequence[Prompt], num_samples: int) -> list[list[Completion]]:
    """The result of ``Engine.sample``, checked: the engine may be a user's own.

    Args:
        completions: the result.
        prompts: the call's.
        num_samples: the call's.

    Raises:
        EngineError: not completions, or another number or order of them than requested.

    Example:
        >>> checked([[Completion("7", (4,), "4", "stop")]], [Prompt("7", "2+2=", (4,))], 1)[0][0].text
        '4'
        >>> checked([[]], [Prompt("7", "2+2=", (4,))], 1)
        Traceback (most recent call last):
        logitless.errors.EngineError: needed 1 completions of prompt '7' ...
    """
    if not isinstance(completions, Iterable):
        raise _broken("a list of completions for each prompt", f"a {type(completions).__name__}")
    groups = [list(group) if isinstance(group, Iterable) else [group] for group in completions]
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


def _broken(needed: str, given: str) -> EngineError:
    return EngineError(
        needed=f"{needed} from rollout.engine", given=given, remedy="Repair what the engine's `sample` returns."
    )


def tokens_so_far(prompt: Prompt, turns: Sequence[tuple[Completion, Reply]]) -> Int64[np.ndarray, "L"]:
    """The tokens that the next turn continues: the prompt, then each turn with its reply.

    Example:
        >>> tokens_so_far(Prompt("7", "", (4, 9)), [(Completion("7", (5,), "5", "stop"), Reply())]).tolist()
        [4, 9, 5]
    """
    parts = [np.asarray(ids, np.int64) for turn, reply in turns for ids in (turn.token_ids, reply.token_ids)]
    return np.concatenate([prompt.token_ids, *parts])


def joined(turns: Sequence[tuple[Completion, Reply]]) -> Completion:
    """The turns, with the replies between them, as one completion.

    Tokens of replies have log-prob 0 (probability 1) and are not trained on.

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
        return first  # without the per-token fields that several turns need
    parts: list[Completion] = []
    for number, (turn, reply) in enumerate(turns):
        parts.append(replace(turn, turn=np.full(turn.length, number), finish_reason=finish_reason))
        if number + 1 < len(turns):
            parts.append(given(reply.token_ids, turn, turn=number, version=turn.weights_version))
    return end_to_end(parts)


def given(token_ids: Sequence[int] | np.ndarray, beside: Completion, *, turn: int, version: int | None) -> Completion:
    """Tokens that were not sampled, as a part of a completion: log-prob 0, not trained on.

    Args:
        token_ids: the tokens.
        beside: a sampled part of the same completion; the result has the same optional fields.
        turn: that they belong to.
        version: of the weights; None if unknown.
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
    """Join parts of one completion. Text and finish reason are the last part's; a field that a part lacks is None."""

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
    """The weights version of each token; None if unknown."""
    if part.token_versions is not None or part.weights_version is None:
        return part.token_versions
    return np.full(part.length, part.weights_version)
