"""What every reward is: completions and the columns of their data rows in, one ``Verdict`` a completion out.

A reward never raises because of what a completion says: hostile text is graded, or its verdict carries a status that
says why not. It raises for what the caller got wrong (columns of another length, a missing column, an absent
package), and ``check`` says so before the first rollout.

Inside logitless columns travel as a mapping, so that a column may have any name (``kwargs``, ``self``). Only
``__call__``, the shape TRL calls reward functions in, spreads them as keyword arguments.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from logitless.errors import ConfigurationError, DataError, InputError
from logitless.types import Episode, Verdict

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Text: TypeAlias = str | Messages
Columns: TypeAlias = Mapping[str, Sequence[Any]]

MAX_CHARACTERS = 1_000_000
"""A longer completion is not graded: it scores 0, and its verdict is ``ungradable``."""

TRAINER_ARGUMENTS = frozenset({"trainer_state", "log_extra", "log_metric"})
"""What TRL passes to every reward function beside the columns; not one value a completion."""

RESERVED_ARGUMENTS = frozenset({"prompts", "completions", "completion_ids"})
"""Names that a column cannot have where columns are spread as arguments."""


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
        """Nothing in the data can be wrong for this reward."""

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
        """
        batch = Batch(prompts, completions, columns, completion_ids)
        given = [_gradable_text(completion) for completion in completions]
        readable = [row for row, text in enumerate(given) if isinstance(text, str)]
        texts = [text for text in given if isinstance(text, str)]
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


TrlFunction: TypeAlias = Callable[..., Any]
"""TRL's reward function: ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, or async."""


def _gradable_text(completion: Text) -> str | Verdict:
    """The text, or the verdict of a completion that cannot be read."""
    try:
        text = completion_text(completion)
    except InputError as error:
        return Verdict(score=None, status="error", message=str(error))
    if len(text) > MAX_CHARACTERS:
        return Verdict(score=0.0, status="ungradable", message=f"{len(text)} characters, over {MAX_CHARACTERS}")
    return text
