"""What a reward is: completions and columns of data rows in, a ``Verdict`` each out; and what a completion is worth.

A reward never raises because of what a completion says: hostile text is graded, or its verdict carries a status that
says why not. It raises for what the caller got wrong (columns of another length, a missing column, an absent
package), and ``check`` says so before the first rollout.

``judge`` asks several rewards about completions and makes one number of what they say of each.

Inside logitless columns travel as a mapping, so that a column may have any name (``kwargs``, ``self``). Only
``__call__``, the shape TRL calls reward functions in, spreads them as keyword arguments.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from logitless.errors import ConfigurationError, DataError, InputError, TrainingError
from logitless.own_code import blamed
from logitless.types import Episode, Group, Prompt, Verdict

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Text: TypeAlias = str | Messages
Columns: TypeAlias = Mapping[str, Sequence[Any]]
Unscored: TypeAlias = Literal["leave_out", "drop"]

TrlFunction: TypeAlias = Callable[..., Any]
"""TRL's reward function: ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, or async."""

MAX_CHARACTERS = 1_000_000
"""A longer completion is not graded: it scores 0, and its verdict is ``ungradable``."""

TRAINER_ARGUMENTS = frozenset({"trainer_state", "log_extra", "log_metric"})
"""What TRL passes to every reward function beside the columns; not one value a completion."""

RESERVED_ARGUMENTS = frozenset({"prompts", "completions", "completion_ids"})
"""Names that a column cannot have where columns are spread as arguments."""

ENVIRONMENT = "environment"
"""The verdict on an episode that no reward judges beside the environment that pays for it."""


@runtime_checkable
class Reward(Protocol):
    """Scores completions.

    A reward is a value: the same completion and columns give the same verdict, in any order and from any thread.
    """

    @property
    def name(self) -> str:
        """What its metrics are called unless a ``WeightedReward`` gives another name."""

    def check(self, columns: Columns) -> None:
        """Raise for rows that cannot be graded and for what this machine lacks, before anything is scored.

        Raises:
            ConfigurationError: a column is absent, or a knob makes no sense.
            DataError: a row is malformed; the message names the row.
            UnavailableError: an optional package is absent.
        """

    def verdicts(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        columns: Columns,
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> list[Verdict]:
        """One verdict a completion, in order."""


@runtime_checkable
class EpisodeReward(Reward, Protocol):
    """A reward that scores how an answer came about: every turn, what the environment said and what it paid.

    Where there are episodes ``episode_verdicts`` is asked, and ``verdicts`` only where there is nothing but text.
    """

    def episode_verdicts(self, episodes: Sequence[Episode], columns: Columns) -> list[Verdict]:
        """One verdict an episode, in order.

        Args:
            episodes: what is scored.
            columns: data rows by column, one value an episode.
        """


def completion_text(completion: Text) -> str:
    """The text that is graded: a string itself, or the content of the last assistant message.

    Raises:
        InputError: neither a string nor messages that end with text of an assistant.

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
    """A prompt as one string: the string itself, or the text of its messages, a line apart.

    Example:
        >>> prompt_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}])
        'Be brief.\\n2+2='
    """
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message.get("content") or "") for message in prompt)


def column(columns: Columns, name: str) -> Sequence[Any]:
    """The column of that name.

    Raises:
        ConfigurationError: there is none.

    Example:
        >>> column({"answer": ["4"]}, "answer")
        ['4']
    """
    if name not in columns:
        raise ConfigurationError(
            needed=f"a column {name!r} in the data",
            given=f"columns {sorted(columns)}",
            remedy="Name an existing column, or map one to this name in the data section.",
        )
    return columns[name]


def check_text_column(columns: Columns, name: str) -> None:
    """Every row of a column is a string.

    Raises:
        ConfigurationError: the column is absent.
        DataError: a row holds something else.

    Example:
        >>> check_text_column({"answer": ["4", "5"]}, "answer")
    """
    for row, value in enumerate(column(columns, name)):
        if not isinstance(value, str):
            raise DataError(
                needed=f"text in column {name!r}",
                given=f"{type(value).__name__} in row {row}",
                remedy="Repair the row, or leave it out.",
            )


def from_json(value: Any) -> Any:
    """A row's value, or what its text says in JSON; None where it is text of another kind.

    Example:
        >>> from_json("[1]"), from_json([1]), from_json("one")
        ([1], [1], None)
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None


def check_at_least_one(**knobs: int) -> None:
    """Knobs that count are positive.

    Raises:
        ConfigurationError: one is not.

    Example:
        >>> check_at_least_one(cap=1)
    """
    for name, value in knobs.items():
        if value < 1:
            raise ConfigurationError(needed=f"{name} of at least 1", given=str(value), remedy=f"Raise `{name}`.")


def check_reserved(columns: Columns) -> None:
    """No column has the name of an argument of a reward function.

    Raises:
        ConfigurationError: one has.

    Example:
        >>> check_reserved({"kwargs": [{}], "self": [1]})
    """
    clashing = sorted(RESERVED_ARGUMENTS & set(columns))
    if clashing:
        raise ConfigurationError(
            needed="columns with names of their own",
            given=f"{', '.join(map(repr, clashing))}, as the arguments of a reward function are called",
            remedy="Rename them in the data section.",
        )


@dataclass(frozen=True, kw_only=True)
class TextReward:
    """The common part of rewards that read the text of a completion: knobs of every reward, and both call shapes.

    A subclass is a frozen dataclass with ``name: Literal[...]`` and its own knobs; it implements ``grade``, and
    ``check`` where rows can be wrong. Its fields are the keys of a recipe's entry; other keys are refused there.

    Args:
        name: which reward this is.
        weight: factor in the weighted sum.
        gate: make the whole reward 0 unless this score is above 0, instead of adding to it.
        label: what its metrics are called; None: its name.
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
        """What its metrics are called."""
        return self.label or self.name

    @property
    def __name__(self) -> str:
        """What TRL calls the reward in its logs."""
        return self.metric_name

    def check(self, columns: Columns) -> None:
        """Columns named by fields called ``column`` or ``..._column`` are there; no row is looked at."""
        for name in (each.name for each in fields(self)):
            named = getattr(self, name)
            if (name == "column" or name.endswith("_column")) and isinstance(named, str):
                column(columns, named)

    def grade(self, texts: Sequence[str], batch: "Batch") -> list[Verdict]:
        """One verdict a text; the fields of ``batch`` are aligned with the texts."""
        raise NotImplementedError

    def verdicts(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        columns: Columns,
        completion_ids: Sequence[Sequence[int]] | None = None,
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
        given = [_gradable_text(completion) for completion in completions]
        readable = [row for row, text in enumerate(given) if isinstance(text, str)]
        texts = [text for text in given if isinstance(text, str)]
        with blamed(f"verdicts from `grade` of reward {self.metric_name!r}", TrainingError):
            answered = self.grade(texts, batch.take(readable)) if texts else []
        if not isinstance(answered, list) or [type(each) for each in answered] != [Verdict] * len(texts):
            raise InputError(
                needed=f"a list of {len(texts)} Verdict from `grade` of reward {self.metric_name!r}",
                given=f"{answered!r:.80}",
                remedy="Return one for each text, such as Verdict.graded(1.0).",
            )
        graded = dict(zip(readable, answered, strict=True))
        return [graded[row] if isinstance(text, str) else text for row, text in enumerate(given)]

    def __call__(
        self,
        /,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """The scores in TRL's shape: None where a completion has none."""
        rows = {name: values for name, values in columns.items() if name not in TRAINER_ARGUMENTS}
        return [verdict.score for verdict in self.verdicts(prompts, completions, rows, completion_ids)]


@dataclass(frozen=True)
class Batch:
    """What belongs to B completions, row by row.

    Raises:
        InputError: a field or column of another length.

    Example:
        >>> Batch(["2+2="], ["4"], {"answer": ["4"]}).take([0]).columns["answer"]
        ['4']
    """

    prompts: Sequence[Text]
    completions: Sequence[Text]
    columns: Columns
    completion_ids: Sequence[Sequence[int]] | None = None

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
    """The text, or the verdict of a completion that cannot be read."""
    try:
        text = completion_text(completion)
    except InputError as error:
        return Verdict(score=None, status="error", message=str(error))
    if len(text) > MAX_CHARACTERS:
        return Verdict(score=0.0, status="ungradable", message=f"{len(text)} characters, over {MAX_CHARACTERS}")
    return text


@dataclass(frozen=True)
class WeightedReward:
    """A reward's place in a sum.

    Args:
        reward: the reward.
        weight: its factor; may be negative (a penalty).
        name: what its metrics are called; the reward's own name where empty.
        gate: instead of counting in the sum, make the whole sum 0 unless this score is above 0.
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
    """The entries of a recipe's list of rewards, each under its label, with its weight.

    Raises:
        ConfigurationError: two have the same name, or there are gates and nothing beside them.

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


def weighted_sum(
    verdicts: Mapping[str, Verdict],
    weights: Mapping[str, float],
    *,
    gates: Sequence[str] = (),
    unscored: Unscored = "leave_out",
) -> float | None:
    """``sum_name weights[name] * verdicts[name].score``, 0 where a gate is shut, None where there is nothing to sum.

    A gate is open where its score is above 0. A gate without a score leaves the reward unknown: None.

    Args:
        verdicts: of one completion, by reward name.
        weights: by reward name; other verdicts do not count.
        gates: names of the gates.
        unscored: ``leave_out`` sums the scored rewards alone and gives None only where there is none; ``drop`` gives
            None as soon as one of them has no score.

    Raises:
        InputError: a weight or a gate without a verdict.

    Example:
        >>> timeout = Verdict(score=None, status="timeout")
        >>> weighted_sum({"exact": Verdict.graded(1.0), "style": timeout}, {"exact": 2.0, "style": 1.0})
        2.0
        >>> weighted_sum({"style": timeout}, {"style": 1.0}) is None
        True
    """
    absent = [name for name in (*weights, *gates) if name not in verdicts]
    if absent:
        raise InputError(
            needed=f"a verdict of each of {[*weights, *gates]}",
            given=f"none of {absent}",
            remedy="Score with the same rewards that the weights are for.",
        )
    openness = [verdicts[name].score for name in gates]
    scores = {name: verdicts[name].score for name in weights}
    scored = {name: score for name, score in scores.items() if score is not None}
    if None in openness or not scored or (unscored == "drop" and len(scored) < len(scores)):
        return None
    if any(score <= 0 for score in openness if score is not None):
        return 0.0
    return math.fsum(weights[name] * score for name, score in scored.items())


def total_reward(
    verdicts: Mapping[str, Verdict], rewards: Sequence[WeightedReward], unscored: Unscored = "leave_out"
) -> float | None:
    """The number a completion is trained on: ``weighted_sum`` with the weights and gates of these rewards.

    Example:
        >>> from logitless.rewards.text.length import Length
        >>> rewards = weighted([Length(unit="words", weight=0.5)])
        >>> total_reward({"length": Verdict.graded(2.0)}, rewards)
        1.0
    """
    return weighted_sum(
        verdicts,
        {entry.name: entry.weight for entry in rewards if not entry.gate},
        gates=[entry.name for entry in rewards if entry.gate],
        unscored=unscored,
    )


def judge(
    prompts: Sequence[Prompt],
    episodes: Sequence[Sequence[Episode]],
    rewards: Sequence[WeightedReward],
    *,
    unscored: Unscored,
) -> list[Group]:
    """A group of each prompt: its completions with what was said of them.

    A reward that reads text is given the completion's text; an ``EpisodeReward`` is given the whole episode. What the
    environment paid at the turns is added to the weighted sum of the rewards; where there are none, it is the reward,
    and a verdict called ``environment`` says so. An episode that its environment could not go on with is an ``error``
    under every reward.

    Args:
        prompts: may repeat.
        episodes: of each prompt, in order.
        rewards: judge.
        unscored: what a completion is worth that some of the functions could not judge, see ``total_reward``.

    Example:
        >>> from logitless.rewards.text.length import Length
        >>> from logitless.types import Completion
        >>> episode = Episode(Completion("7", (4, 2), "4", "stop"), ())
        >>> [group] = judge([Prompt("7", "2+2=", (4,))], [[episode]], weighted([Length()]), unscored="leave_out")
        >>> group.rewards
        (2.0,)
    """
    pairs = [(p, episode) for p, of_prompt in zip(prompts, episodes, strict=True) for episode in of_prompt]
    verdicts = _verdicts(pairs, rewards)
    totals = [
        _total(said, episode, [r for r in rewards if r.applies_to(prompt.source)], unscored)
        for said, (prompt, episode) in zip(verdicts, pairs, strict=True)
    ]
    groups = []
    for prompt, of_prompt in zip(prompts, episodes, strict=True):
        n = len(of_prompt)
        paid = tuple(episode.turn_rewards for episode in of_prompt)
        groups.append(
            Group(
                prompt,
                tuple(episode.completion for episode in of_prompt),
                tuple(verdicts[:n]),
                tuple(totals[:n]),
                paid if any(paid) else (),
                tuple(e.messages for e in of_prompt) if any(e.num_turns > 1 for e in of_prompt) else (),
            )
        )
        verdicts, totals = verdicts[n:], totals[n:]
    return groups


def _verdicts(pairs: Sequence[tuple[Prompt, Episode]], rewards: Sequence[WeightedReward]) -> list[dict[str, Verdict]]:
    """By reward name, in the rewards' order, for each episode; of the rewards that judge its prompt's source."""
    if not rewards:
        return [{ENVIRONMENT: _failed(e) if e.failure else Verdict.graded(_paid(e))} for _, e in pairs]
    said: list[dict[str, Verdict]] = [{} for _ in pairs]
    for entry in rewards:
        rows = [row for row, (prompt, _) in enumerate(pairs) if entry.applies_to(prompt.source)]
        for row, verdict in zip(rows, _verdicts_of(entry, [pairs[row] for row in rows]) if rows else (), strict=True):
            episode = pairs[row][1]
            said[row][entry.name] = _failed(episode) if episode.failure else verdict
    return said


def _verdicts_of(entry: WeightedReward, pairs: Sequence[tuple[Prompt, Episode]]) -> list[Verdict]:
    """What one reward says of each episode."""
    names = {name for prompt, _ in pairs for name in prompt.columns}
    columns = {name: [p.columns.get(name) for p, _ in pairs] for name in names}
    if isinstance(entry.reward, EpisodeReward):
        with blamed(f"verdicts from `episode_verdicts` of reward {entry.name!r}", TrainingError):
            said = entry.reward.episode_verdicts([episode for _, episode in pairs], columns)
    else:
        said = entry.reward.verdicts(
            [p.messages if p.messages is not None else p.text for p, _ in pairs],
            [episode.completion.text for _, episode in pairs],
            columns,
            [episode.completion.token_ids.tolist() for _, episode in pairs],
        )
    if len(said) != len(pairs):
        raise InputError(
            needed=f"a verdict for each of {len(pairs)} completions",
            given=f"{len(said)} from reward {entry.name!r}",
            remedy="Return one Verdict a completion, in order.",
        )
    return said


def _failed(episode: Episode) -> Verdict:
    """What is said of an episode that its environment could not go on with."""
    first, _, trace = episode.failure.partition("\n")
    return Verdict(score=None, status="error", message=f"the environment failed: {first}", traceback=trace)


def _total(
    verdicts: dict[str, Verdict], episode: Episode, rewards: Sequence[WeightedReward], unscored: Unscored
) -> float | None:
    if ENVIRONMENT in verdicts and not rewards:
        return verdicts[ENVIRONMENT].score
    total = total_reward(verdicts, rewards, unscored)
    return total + _paid(episode) if total is not None and episode.turn_rewards else total


def _paid(episode: Episode) -> float:
    return math.fsum(episode.turn_rewards)
