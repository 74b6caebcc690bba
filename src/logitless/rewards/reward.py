"""Rewards: completions and columns of data rows in, one ``Verdict`` a completion out; and their weighted sum.

A reward never raises because of a completion's text: any text is graded, or the verdict's status says why not. It
raises for the caller's mistakes (columns of another length, a missing column, an absent package), and ``check`` finds
these before the first rollout.

``judge`` scores completions with several rewards and adds the scores up.

Columns are passed as a mapping, so that a column may have any name (``kwargs``, ``self``). Only ``__call__``, TRL's
signature of reward functions, takes them as keyword arguments.
"""

import functools
import json
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Int64

from logitless.errors import ConfigurationError, DataError, InputError, TrainingError
from logitless.own_code import blamed
from logitless.types import Episode, Group, Prompt, Verdict

logger = logging.getLogger("logitless")

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Text: TypeAlias = str | Messages
Columns: TypeAlias = Mapping[str, Sequence[Any]]
Unscored: TypeAlias = Literal["leave_out", "drop"]

TrlFunction: TypeAlias = Callable[..., Any]
"""TRL's reward function: ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, or async."""

MAX_CHARACTERS = 1_000_000
"""A longer completion is not graded: its verdict is ``ungradable``, with score 0."""

TRAINER_ARGUMENTS = frozenset({"trainer_state", "log_extra", "log_metric"})
"""Arguments that TRL passes to every reward function and that are not columns."""

TokenIds: TypeAlias = Sequence[int] | Int64[np.ndarray, "L"]
"""Sampled tokens: an array in a run, a list from TRL."""

RESERVED_ARGUMENTS = frozenset({"prompts", "completions", "completion_ids"})
"""Arguments of every reward function; no column can have these names."""

ENVIRONMENT = "environment"
"""Name of the verdict with the environment's reward, in runs without other rewards."""

SLOW_SECONDS = 10.0
"""A batch or check that takes a reward longer is reported, for nothing else says what the run waits for."""


@runtime_checkable
class Reward(Protocol):
    """Scores completions.

    A verdict depends on the completion and its columns alone, not on order or thread.
    """

    @property
    def name(self) -> str:
        """Name of its metrics, unless a ``WeightedReward`` gives another."""

    def check(self, columns: Columns) -> None:
        """Check rows and machine before anything is scored.

        Raises:
            ConfigurationError: a column is absent, or an option makes no sense.
            DataError: a row is malformed; the message names the row.
            UnavailableError: an optional package is absent.
        """

    def verdicts(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        columns: Columns,
        completion_ids: Sequence[TokenIds] | None = None,
    ) -> list[Verdict]:
        """One verdict a completion, in order."""


@runtime_checkable
class EpisodeReward(Reward, Protocol):
    """A reward that scores whole episodes: all turns, the environment's replies and its rewards.

    ``episode_verdicts`` is called instead of ``verdicts`` if there are episodes.
    """

    def episode_verdicts(self, episodes: Sequence[Episode], columns: Columns) -> list[Verdict]:
        """One verdict an episode, in order.

        Args:
            episodes: to score.
            columns: one value an episode, by column.
        """


def completion_text(completion: Text) -> str:
    """The text to grade: a string itself, or the content of the last assistant message.

    Raises:
        InputError: neither a string nor messages with an assistant's text.

    Example:
        >>> completion_text([{"role": "assistant", "content": "4"}])
        '4'
    """
    if isinstance(completion, str):
        return completion
    content: Any = None
    if isinstance(completion, Sequence):
        spoken = [m for m in completion if isinstance(m, Mapping) and m.get("role") == "assistant"]
        content = spoken[-1].get("content") if spoken else None
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        content = "".join(part for part in parts if isinstance(part, str)) if parts else None
    if not isinstance(content, str):
        raise InputError(
            needed="a completion that is a string, or messages with text of an assistant",
            given=f"{type(completion).__name__} without such text",
            remedy="Give the decoded completion.",
        )
    return content


def prompt_text(prompt: Text) -> str:
    """A prompt as one string: itself, or the texts of its messages joined by line breaks.

    Example:
        >>> prompt_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}])
        'Be brief.\\n2+2='
    """
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message.get("content") or "") for message in prompt)


def column(columns: Columns, name: str) -> Sequence[Any]:
    """The column of this name; raises ConfigurationError if it is absent."""
    if name not in columns:
        raise ConfigurationError(
            needed=f"a column {name!r} in the data",
            given=f"columns {sorted(columns)}",
            remedy="Name an existing column, or map one to this name in the data section.",
        )
    return columns[name]


def check_text_column(columns: Columns, name: str) -> None:
    """Raises DataError unless every row of a column is a string, ConfigurationError if the column is absent."""
    for row, value in enumerate(column(columns, name)):
        if not isinstance(value, str):
            raise DataError(
                needed=f"text in column {name!r}",
                given=f"{type(value).__name__} in row {row}",
                remedy="Repair the row, or leave it out.",
            )


def from_json(value: Any) -> Any:
    """A value as it is, or parsed if it is a string; None if the string is not JSON.

    Example:
        >>> from_json("[1]"), from_json([1]), from_json("one")
        ([1], [1], None)
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None


def check_at_least_one(**options: int) -> None:
    """Raises ConfigurationError unless every option is 1 or more."""
    for name, value in options.items():
        if value < 1:
            raise ConfigurationError(needed=f"{name} of at least 1", given=str(value), remedy=f"Raise `{name}`.")


def check_reserved(columns: Columns) -> None:
    """Raises ConfigurationError if a column has a name of ``RESERVED_ARGUMENTS``."""
    clashing = sorted(RESERVED_ARGUMENTS & set(columns))
    if clashing:
        raise ConfigurationError(
            needed=f"columns with other names than {', '.join(sorted(RESERVED_ARGUMENTS))}, arguments of every reward",
            given=", ".join(map(repr, clashing)),
            remedy="Rename them in the data section.",
        )


@dataclass(frozen=True, kw_only=True)
class TextReward:
    """Base of rewards that read the text of a completion: common options, and TRL's call signature.

    A subclass is a frozen dataclass with ``name: Literal[...]`` and its own options. It implements ``grade``, and
    ``check`` if rows can be wrong. Its fields are the keys of a recipe's entry.

    Args:
        name: which reward this is.
        weight: factor in the weighted sum.
        gate: make the whole reward 0 unless this score is above 0, instead of adding to it.
        label: name of its metrics; None: its name.
        sources: names of the data that it scores, ``train`` and ``held_out`` among them; None: all.
    """

    name: str
    weight: float = 1.0
    gate: bool = False
    label: str | None = None
    sources: tuple[str, ...] | None = None

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    @property
    def metric_name(self) -> str:
        return self.label or self.name

    @property
    def __name__(self) -> str:
        """Its name in TRL's logs."""
        return self.metric_name

    def check(self, columns: Columns) -> None:
        """Check that the columns exist that fields called ``column`` or ``..._column`` name; rows are not read."""
        for name in (each.name for each in fields(self)):
            named = getattr(self, name)
            if (name == "column" or name.endswith("_column")) and isinstance(named, str):
                column(columns, named)

    def grade(self, texts: Sequence[str], batch: "Batch") -> list[Verdict]:
        """One verdict a text; ``batch`` has the same rows as ``texts``."""
        raise NotImplementedError

    def verdicts(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        columns: Columns,
        completion_ids: Sequence[TokenIds] | None = None,
    ) -> list[Verdict]:
        """One verdict a completion, in order.

        Raises:
            InputError: prompts, columns or completion_ids of another length than ``completions``, or a ``grade`` that
                does not return a verdict for each text.
            ConfigurationError: a column is absent.
            UnavailableError: an optional package is absent.
            TrainingError: ``grade`` raised.
        """
        batch = Batch(prompts, completions, columns, completion_ids)
        read = [_gradable_text(completion) for completion in completions]  # a text, or why there is none
        rows = [row for row, text in enumerate(read) if isinstance(text, str)]
        texts = [text for text in read if isinstance(text, str)]
        with blamed(f"verdicts from `grade` of reward {self.metric_name!r}", TrainingError):
            graded = self.grade(texts, batch.take(rows)) if texts else []
        if not isinstance(graded, list) or [type(each) for each in graded] != [Verdict] * len(texts):
            raise InputError(
                needed=f"a list of {len(texts)} Verdict from `grade` of reward {self.metric_name!r}",
                given=f"{graded!r:.80}",
                remedy="Return one for each text, such as Verdict.graded(1.0).",
            )
        by_row = dict(zip(rows, graded, strict=True))
        return [by_row[row] if isinstance(text, str) else text for row, text in enumerate(read)]

    def __call__(
        self,
        /,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[TokenIds] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """The scores in TRL's form: None for a completion without one."""
        rows = {name: values for name, values in columns.items() if name not in TRAINER_ARGUMENTS}
        return [verdict.score for verdict in self.verdicts(prompts, completions, rows, completion_ids)]


@dataclass(frozen=True)
class Batch:
    """B completions with their prompts and columns.

    Raises:
        InputError: a field or column of another length.

    Example:
        >>> Batch(["2+2="], ["4"], {"answer": ["4"]}).take([0]).columns["answer"]
        ['4']
    """

    prompts: Sequence[Text]
    completions: Sequence[Text]
    columns: Columns
    completion_ids: Sequence[TokenIds] | None = None

    def __post_init__(self) -> None:
        expected = len(self.completions)
        lengths = {f"column {name!r}": len(values) for name, values in self.columns.items()}
        lengths["prompts"] = len(self.prompts)
        if self.completion_ids is not None:
            lengths["completion_ids"] = len(self.completion_ids)
        wrong = {name: length for name, length in lengths.items() if length != expected}
        if wrong:
            raise InputError(
                needed=f"one value per completion ({expected})",
                given=", ".join(f"{name} of length {length}" for name, length in wrong.items()),
                remedy="Repeat each data row once for every completion of its prompt.",
            )

    def take(self, rows: Sequence[int]) -> "Batch":
        """The batch of these rows, in this order."""
        return Batch(
            prompts=[self.prompts[row] for row in rows],
            completions=[self.completions[row] for row in rows],
            columns={name: [values[row] for row in rows] for name, values in self.columns.items()},
            completion_ids=None if self.completion_ids is None else [self.completion_ids[row] for row in rows],
        )


def _gradable_text(completion: Text) -> str | Verdict:
    """The text, or the verdict of a completion without a text that can be graded."""
    try:
        text = completion_text(completion)
    except InputError as error:
        return Verdict(score=None, status="error", message=str(error))
    if len(text) > MAX_CHARACTERS:
        return Verdict(score=0.0, status="ungradable", message=f"{len(text)} characters, over {MAX_CHARACTERS}")
    return text


@dataclass(frozen=True)
class WeightedReward:
    """A reward as a term of the weighted sum.

    Args:
        reward: the reward.
        weight: its factor; negative for a penalty.
        name: of its metrics; empty for the reward's own name.
        gate: make the whole sum 0 unless this score is above 0, instead of adding to it.
        sources: of the prompts that it scores; None for all.

    Raises:
        ConfigurationError: the weight is not finite, or a gate has one.
    """

    reward: Reward
    weight: float = 1.0
    name: str = ""
    gate: bool = False
    sources: tuple[str, ...] | None = None

    def applies_to(self, source: str) -> bool:
        """Whether it scores prompts of this source."""
        return self.sources is None or source in self.sources

    def __post_init__(self) -> None:
        if not abs(self.weight) < float("inf"):
            raise ConfigurationError(
                needed="a finite weight", given=str(self.weight), remedy="Leave the reward out, or give it a number."
            )
        if self.gate and self.weight != 1.0:
            raise ConfigurationError(
                needed="no weight on a gate, which is not part of the sum",
                given=str(self.weight),
                remedy="Leave `weight` out, or set `gate: false`.",
            )
        if not self.name:
            object.__setattr__(self, "name", self.reward.name)


def weighted(rewards: Sequence[TextReward]) -> tuple[WeightedReward, ...]:
    """The entries of a recipe's list of rewards, by label, with their weights.

    Raises:
        ConfigurationError: two have the same name, or all are gates.

    Example:
        >>> from logitless.rewards.text.length import Length
        >>> entries = weighted([Length(weight=0.5), Length(unit="words", label="words")])
        >>> [(entry.name, entry.weight) for entry in entries]
        [('length', 0.5), ('words', 1.0)]
    """
    entries = tuple(WeightedReward(r, r.weight, r.metric_name, r.gate, r.sources) for r in rewards)
    twice = [name for name, times in Counter(entry.name for entry in entries).items() if times > 1]
    if twice:
        raise ConfigurationError(
            needed="a different name for every reward",
            given=f"{', '.join(map(repr, twice))} more than once",
            remedy="Give one of them a `label`.",
        )
    if entries and all(entry.gate for entry in entries):
        raise ConfigurationError(
            needed="a reward that is not a gate",
            given=f"{len(entries)} gates only",
            remedy="Add a reward, or set `gate: false` on one.",
        )
    return entries


def total_reward(
    verdicts: Mapping[str, Verdict], rewards: Sequence[WeightedReward], unscored: Unscored = "leave_out"
) -> float | None:
    """``sum(weight * score)`` of one completion; 0 if a gate's score is not above 0; None if the sum is unknown.

    Args:
        verdicts: by reward name.
        rewards: terms and gates of the sum. A gate without a score makes the sum unknown.
        unscored: how to treat terms without a score. ``leave_out`` sums the others, and is None only without any;
            ``drop`` is None as soon as one has no score.

    Raises:
        InputError: a reward without a verdict.

    Example:
        >>> from logitless.rewards.text.length import Length
        >>> rewards = weighted([Length(unit="words", weight=0.5)])
        >>> total_reward({"length": Verdict.graded(2.0)}, rewards)
        1.0
        >>> total_reward({"length": Verdict(score=None, status="timeout")}, rewards) is None
        True
    """
    names = [entry.name for entry in rewards]
    if absent := [name for name in names if name not in verdicts]:
        raise InputError(
            needed=f"a verdict of each of {names}",
            given=f"none of {absent}",
            remedy="Score with the same rewards that the weights are for.",
        )
    gates = [verdicts[entry.name].score for entry in rewards if entry.gate]
    scores = [(entry.weight, verdicts[entry.name].score) for entry in rewards if not entry.gate]
    terms = [weight * score for weight, score in scores if score is not None]
    if None in gates or not terms or (unscored == "drop" and len(terms) < len(scores)):
        return None
    if any(score <= 0 for score in gates if score is not None):
        return 0.0
    return math.fsum(terms)


def judge(
    prompts: Sequence[Prompt],
    episodes: Sequence[Sequence[Episode]],
    rewards: Sequence[WeightedReward],
    *,
    unscored: Unscored,
) -> list[Group]:
    """Score the episodes of each prompt: one group a prompt.

    A reward gets the completion's text, an ``EpisodeReward`` the whole episode. The environment's rewards are added to
    the weighted sum; without other rewards they are the reward, in a verdict called ``environment``. An episode whose
    environment failed is an ``error`` under every reward.

    Args:
        prompts: may repeat.
        episodes: of each prompt, in order.
        rewards: terms and gates of the sum.
        unscored: how to treat rewards without a score: see ``total_reward``.

    Example:
        >>> from logitless.rewards.text.length import Length
        >>> from logitless.types import Completion
        >>> episode = Episode(Completion("7", (4, 2), "4", "stop"), ())
        >>> [group] = judge([Prompt("7", "2+2=", (4,))], [[episode]], weighted([Length()]), unscored="leave_out")
        >>> group.rewards
        (2.0,)
    """
    pairs = [(p, episode) for p, of_prompt in zip(prompts, episodes, strict=True) for episode in of_prompt]
    verdicts = iter(_verdicts(pairs, rewards))
    groups = []
    for prompt, of_prompt in zip(prompts, episodes, strict=True):
        applying = [entry for entry in rewards if entry.applies_to(prompt.source)]
        of_group = tuple(next(verdicts) for _ in of_prompt)
        totals = [_total(of_one, e, applying, unscored) for of_one, e in zip(of_group, of_prompt, strict=True)]
        turn_rewards = tuple(episode.turn_rewards for episode in of_prompt)
        groups.append(
            Group(
                prompt,
                tuple(episode.completion for episode in of_prompt),
                of_group,
                tuple(totals),
                turn_rewards if any(turn_rewards) else (),
                tuple(e.messages for e in of_prompt) if any(e.num_turns > 1 for e in of_prompt) else (),
            )
        )
    return groups


@contextmanager
def told_if_slow(name: str, what: str) -> Iterator[None]:
    """Log a line if the block takes a reward longer than ``SLOW_SECONDS``; once in a process for each name and task."""
    timer = threading.Timer(SLOW_SECONDS, _tell_slow, [name, what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@functools.cache
def _tell_slow(name: str, what: str) -> None:
    logger.warning("waiting for reward %r to %s: %g s so far, imports included", name, what, SLOW_SECONDS)


def _verdicts(pairs: Sequence[tuple[Prompt, Episode]], rewards: Sequence[WeightedReward]) -> list[dict[str, Verdict]]:
    """By reward name, for each episode; of the rewards that apply to its prompt's source."""
    if not rewards:
        return [{ENVIRONMENT: _failed(e) if e.failure else Verdict.graded(_turn_total(e))} for _, e in pairs]
    verdicts: list[dict[str, Verdict]] = [{} for _ in pairs]
    for entry in rewards:
        rows = [row for row, (prompt, _) in enumerate(pairs) if entry.applies_to(prompt.source)]
        if not rows:
            continue
        with told_if_slow(entry.name, "score completions"):
            found = _verdicts_of(entry, [pairs[row] for row in rows])
        for row, verdict in zip(rows, found, strict=True):
            episode = pairs[row][1]
            verdicts[row][entry.name] = _failed(episode) if episode.failure else verdict
    return verdicts


def _verdicts_of(entry: WeightedReward, pairs: Sequence[tuple[Prompt, Episode]]) -> list[Verdict]:
    """The verdicts of one reward."""
    names = {name for prompt, _ in pairs for name in prompt.columns}
    columns = {name: [p.columns.get(name) for p, _ in pairs] for name in names}
    if isinstance(entry.reward, EpisodeReward):
        with blamed(f"verdicts from `episode_verdicts` of reward {entry.name!r}", TrainingError):
            verdicts = entry.reward.episode_verdicts([episode for _, episode in pairs], columns)
    else:
        verdicts = entry.reward.verdicts(
            [p.messages if p.messages is not None else p.text for p, _ in pairs],
            [episode.completion.text for _, episode in pairs],
            columns,
            [episode.completion.token_ids for _, episode in pairs],
        )
    if len(verdicts) != len(pairs):
        raise InputError(
            needed=f"a verdict for each of {len(pairs)} completions",
            given=f"{len(verdicts)} from reward {entry.name!r}",
            remedy="Return one Verdict a completion, in order.",
        )
    return verdicts


def _failed(episode: Episode) -> Verdict:
    """The verdict on an episode whose environment failed."""
    first, _, trace = episode.failure.partition("\n")
    return Verdict(score=None, status="error", message=f"the environment failed: {first}", traceback=trace)


def _total(
    verdicts: dict[str, Verdict], episode: Episode, rewards: Sequence[WeightedReward], unscored: Unscored
) -> float | None:
    if ENVIRONMENT in verdicts and not rewards:
        return verdicts[ENVIRONMENT].score
    total = total_reward(verdicts, rewards, unscored)
    return total + _turn_total(episode) if total is not None and episode.turn_rewards else total


def _turn_total(episode: Episode) -> float:
    return math.fsum(episode.turn_rewards)
