"""Episodes: the policy speaks, an environment answers, until one of them is done or a limit is reached.

All episodes go on side by side, a turn at a time. The tokens of a turn are those that were sampled, for good: the next
turn reads them again and nothing tokenizes their text anew. The tokens of an answer are read and not trained on, and
what it pays stays with the turn that earned it.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from logitless.errors import InputError, LogitlessError
from logitless.rollout.engine import Engine
from logitless.rollout.environment import Environment, Limits, Reply, replies_of
from logitless.rollout.sampling import SamplingOptions
from logitless.seeds import derived_seed
from logitless.types import Completion, Episode, Prompt


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

    Example:
        >>> from logitless.rollout.environment import SingleTurn
        >>> class Parrot:
        ...     def sample(self, prompts, num_samples, options, *, seed):
        ...         return [[Completion(p.id, p.token_ids, p.text, "stop")] * num_samples for p in prompts]
        ...     def load(self, weights, version): ...
        ...     def close(self): ...
        >>> asked = [Prompt("7", "2+2=", (4, 9))]
        >>> [[episode]] = play(Parrot(), asked, SingleTurn(), num_samples=1, options=SamplingOptions(9), seed=0)
        >>> episode.completion.token_ids, [message["role"] for message in episode.messages]
        ((4, 9), ['user', 'assistant'])
    """
    began = clock()
    groups = [
        [_Playing(p, g, environment.start(p, seed=derived_seed(seed, p.id, g))) for g in range(num_samples)]
        for p in prompts
    ]
    playing = [each for group in groups for each in group]
    sampled = engine.sample(prompts, num_samples, options, seed=seed)
    _answer(environment, playing, [completion for of_prompt in sampled for completion in of_prompt])
    for number in range(1, limits.max_turns):
        late = limits.max_seconds is not None and clock() - began >= limits.max_seconds
        going_on = [each for each in playing if not (each.over or late or each.is_full(options, limits))]
        if not going_on:
            break
        asked = [each.next_prompt() for each in going_on]
        turns = engine.sample(asked, 1, options, seed=derived_seed(seed, "turn", number))
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
        ids = list(self.prompt.token_ids)
        for completion, reply in self.turns:
            ids += (*completion.token_ids, *reply.token_ids)
        return Prompt(f"{self.prompt.id}/{self.sample}/{len(self.turns)}", "", tuple(ids))

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
        if reply.messages and not reply.token_ids:
            raise InputError(
                needed="the tokens of what an environment says",
                given=f"{len(reply.messages)} messages without",
                remedy="Put it into a ChatEnvironment, which renders messages with the tokenizer's chat template.",
            )
        each.turns.append((turn, reply))


def joined(turns: Sequence[tuple[Completion, Reply]]) -> Completion:
    """The turns and what came between them, end to end; a single turn that was to be the last is itself.

    Example:
        >>> first, second = Completion("7", (4,), "4", "stop"), Completion("7/0/1", (6,), "6", "stop")
        >>> both = joined([(first, Reply(messages=({"role": "user", "content": "?"},), token_ids=(8, 9))),
        ...                (second, Reply())])
        >>> both.token_ids, both.trained, both.text
        ((4, 8, 9, 6), (True, False, False, True), '6')
    """
    (first, _), (last, last_reply) = turns[0], turns[-1]
    finish_reason = last.finish_reason if last_reply.ends else "length"
    if len(turns) == 1 and finish_reason == first.finish_reason:
        return first
    ids: list[int] = []
    trained: list[bool] = []
    turn: list[int] = []
    logp: list[float] | None = []
    entropy: list[float] | None = []
    policy: list[float] | None = []
    versions: list[int | None] = []
    for number, (completion, reply) in enumerate(turns):
        given = reply.token_ids if number + 1 < len(turns) else ()
        ids += (*completion.token_ids, *given)
        trained += [True] * completion.length + [False] * len(given)
        turn += [number] * (completion.length + len(given))
        logp = _with(logp, completion.logp_sampler, len(given))
        entropy = _with(entropy, completion.entropy_sampler, len(given))
        policy = _with(policy, completion.logp_policy, len(given))
        drawn_with = completion.token_versions or (completion.weights_version,) * completion.length
        versions += (*drawn_with, *(completion.weights_version for _ in given))
    known = [v for v in versions if v is not None]
    return Completion(
        prompt_id=first.prompt_id,
        token_ids=tuple(ids),
        text=last.text,
        finish_reason=finish_reason,
        logp_sampler=None if logp is None else tuple(logp),
        trained=tuple(trained),
        turn=tuple(turn),
        weights_version=min(known, default=None),
        entropy_sampler=None if entropy is None else tuple(entropy),
        token_versions=tuple(known) if len(known) == len(versions) and len(set(known)) > 1 else None,
        logp_policy=None if policy is None else tuple(policy),
    )


def _with(values: list[float] | None, of_turn: Sequence[float] | None, num_given: int) -> list[float] | None:
    """Numbers of the tokens so far with those of a turn, and 0 for what it was given: that has probability 1."""
    return None if values is None or of_turn is None else [*values, *of_turn, *[0.0] * num_given]
