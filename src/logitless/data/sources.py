"""Sources of rows: a file, the hub, or a generator. Every row carries its place, for error messages.

Rows are read into memory, not streamed: ids are checked to be unique.
"""

import difflib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import pyarrow
import pyarrow.parquet
from pydantic import ConfigDict, Field

from logitless.errors import ConfigurationError, DataError, UnavailableError
from logitless.hub import use_cache_if_unreachable
from logitless.installed import optional
from logitless.json_lines import json_lines


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """How a row becomes text; common to all sources.

    Args:
        system: the conversation's first message, or the template's ``{system}``.
        template: plain text around ``{prompt}``, used instead of the tokenizer's chat template.

    Example:
        >>> Rendered(template="Question: {prompt}").template
        'Question: {prompt}'
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    system: str | None = None
    template: str | None = None

    def __post_init__(self) -> None:
        if self.template is None:
            return
        try:
            names = {name for _, name, _, _ in Formatter().parse(self.template) if name is not None}
        except ValueError as error:
            raise ConfigurationError(
                needed="a format string such as 'Question: {prompt}'",
                given=f"{self.template!r} ({error})",
                remedy="Write a literal brace twice.",
            ) from error
        wanted = {"prompt"} if self.system is None else {"prompt", "system"}
        if names != wanted:
            raise ConfigurationError(
                needed=f"a template with exactly the fields {_listed(wanted)}",
                given=f"{self.template!r} with {_listed(names) or 'no field'}",
                remedy="Use {prompt} always and {system} exactly when `system` is set; write a literal brace twice.",
            )


@dataclass(frozen=True, kw_only=True)
class FileData(Rendered):
    """Prompts of a JSONL or Parquet file.

    Args:
        path: ``*.jsonl`` (one object a line, blank lines ignored) or ``*.parquet``.
        columns: our name -> the file's name, for ``prompt`` (text, or a list of messages), ``id`` (default: the row's
            number) and columns that rewards read.
        system: the conversation's first message, or the template's ``{system}``.
        template: plain text with ``{prompt}``, and ``{system}`` if that is set, used instead of the chat template.
            None: the chat template, or the prompt as it is.

    Example:
        >>> FileData(path=Path("train.jsonl"), columns={"prompt": "question", "answer": "gold"}).name
        'file'
    """

    path: Path
    columns: Mapping[str, str] = field(default_factory=dict)
    name: Literal["file"] = "file"


@dataclass(frozen=True, kw_only=True)
class HubData(Rendered):
    """Prompts of a data set that the ``datasets`` library can load: a hub name, or a local folder.

    Args:
        dataset: for example ``openai/gsm8k``.
        split: for example ``train``, or ``train[:1000]``.
        config: the data set's configuration (``main`` for GSM8K), if it has several.
        columns, system, template: as for ``FileData``.

    Example:
        >>> HubData(dataset="openai/gsm8k", config="main", split="train", columns={"prompt": "question"}).split
        'train'
    """

    dataset: str
    split: str
    config: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    name: Literal["hub"] = "hub"


@dataclass(frozen=True, kw_only=True)
class ReasoningGymData(Rendered):
    """Prompts that a reasoning-gym task generates, without a download.

    Each row has the columns ``answer`` and ``entry``; the task's own verifier needs the entry.

    Args:
        task: for example ``chain_sum``.
        size: number of rows.
        seed: of the generator. Two seeds give different rows, which may repeat questions (see ``without_overlap``).
        options: the task's own settings, for example ``{"max_terms": 3}``.
        system, template: as for ``FileData``.

    Example:
        >>> ReasoningGymData(task="chain_sum", size=100, seed=1, options={"max_terms": 3}).name
        'reasoning_gym'
    """

    task: str
    size: Annotated[int, Field(ge=1)]
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    name: Literal["reasoning_gym"] = "reasoning_gym"


@dataclass(frozen=True, kw_only=True)
class GuessingData(Rendered):
    """Prompts of the guessing game, `rollout.environment: {name: guessing}`: each names a range of numbers.

    Each row has the column ``secret``, a number of that range.

    Args:
        size: number of rows.
        seed: of the generator.
        low, high: every range lies between them.
        system, template: as for ``FileData``.

    Raises:
        ConfigurationError: ``low`` is not below ``high``.

    Example:
        >>> read_rows(GuessingData(size=1, seed=0, high=9))[0].values
        {'prompt': 'Find a number from 7 to 9.', 'secret': 7}
    """

    size: Annotated[int, Field(ge=1)]
    seed: int
    low: int = 1
    high: int = 100
    name: Literal["guessing"] = "guessing"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            raise ConfigurationError(
                needed="low below high", given=f"low={self.low}, high={self.high}", remedy="Raise high."
            )


DataOptions: TypeAlias = Annotated[FileData | HubData | ReasoningGymData | GuessingData, Field(discriminator="name")]
"""pydantic chooses the class by ``name``; unknown keys are errors."""

SourceName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Name of a source or a held-out set; part of the names of its metrics."""


@dataclass(frozen=True, kw_only=True)
class WeightedData:
    """One source of several.

    Args:
        data: prompts of this source.
        weight: its share of the prompts is its weight over the sum of all.

    Example:
        >>> WeightedData(data=FileData(path=Path("train.jsonl")), weight=3.0).weight
        3.0
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    data: DataOptions
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


@dataclass(frozen=True, kw_only=True)
class MixedData:
    """Prompts of several sources; each has its share of every block, to a prompt or two.

    Args:
        sources: by names of your choice, which appear in metrics (``source/<name>/...``) and ids, and which a reward's
            ``sources`` refers to.

    Raises:
        ConfigurationError: fewer than two sources, or a reserved name.

    Example:
        >>> sums = ReasoningGymData(task="chain_sum", size=100, seed=1)
        >>> words = FileData(path=Path("words.jsonl"))
        >>> MixedData(sources={"sums": WeightedData(data=sums, weight=3.0), "words": WeightedData(data=words)}).name
        'mixture'
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    sources: Mapping[SourceName, WeightedData]
    name: Literal["mixture"] = "mixture"

    def __post_init__(self) -> None:
        if len(self.sources) < 2 or RESERVED_SOURCES & set(self.sources):
            raise ConfigurationError(
                needed="two or more sources in a mixture, none called " + " or ".join(sorted(RESERVED_SOURCES)),
                given=_listed(self.sources) or "none",
                remedy="Give a single source as data.train itself, and each of several a name of its own.",
            )


RESERVED_SOURCES = frozenset({"train", "held_out"})
"""Names of a single source's prompts and of those of ``data.held_out``."""

TrainingData: TypeAlias = Annotated[
    FileData | HubData | ReasoningGymData | GuessingData | MixedData, Field(discriminator="name")
]
"""``DataOptions``, or a mixture of them."""


def sources_of(data: TrainingData) -> Mapping[str, WeightedData]:
    """The sources of a mixture by name; other data are one source, ``train``.

    Example:
        >>> list(sources_of(FileData(path=Path("sums.jsonl"))))
        ['train']
    """
    return data.sources if isinstance(data, MixedData) else {"train": WeightedData(data=data)}


@dataclass(frozen=True)
class Row:
    """One row of a data set and its place, for error messages."""

    place: str
    values: Mapping[str, Any]


def read_rows(options: DataOptions) -> tuple[Row, ...]:
    """All rows, their columns renamed as ``columns`` says; a column that a row lacks is None.

    Raises:
        DataError: no such file, split, task or column; a row that cannot be read.
        UnavailableError: the library or the network that this source needs is missing.

    Example:
        >>> row = read_rows(ReasoningGymData(task="chain_sum", size=1, seed=7))[0]
        >>> sorted(row.values)
        ['answer', 'entry', 'prompt']
    """
    match options:
        case FileData():
            rows, origin = _file_rows(options.path), str(options.path)
        case HubData():
            rows, origin = _hub_rows(options), options.dataset
        case ReasoningGymData():
            return _reasoning_gym_rows(options)
        case GuessingData():
            return _guessing_rows(options)
    if not any(row.values for row in rows):
        raise DataError(needed="at least one row", given=f"none in {origin}", remedy="Check the path or the split.")
    return _renamed(rows, options.columns, origin)


def _file_rows(path: Path) -> list[Row]:
    if not path.is_file():
        raise DataError(
            needed="a data file",
            given=f"{path}, which does not exist" if not path.exists() else f"{path}, which is not a file",
            remedy="Check path; a relative one starts at the recipe's folder, in --set at the current one.",
        )
    if path.suffix == ".jsonl":
        return _jsonl_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    raise DataError(
        needed="a file called *.jsonl or *.parquet", given=str(path), remedy="Convert the data, or rename the file."
    )


def _jsonl_rows(path: Path) -> list[Row]:
    rows = []
    for number, values in json_lines(path):
        place = f"{path}, line {number}"
        if not isinstance(values, dict):
            raise DataError(
                needed="one JSON object on each line",
                given=f"{place}: a {type(values).__name__}",
                remedy='Write the row as {"prompt": ...}.',
            )
        rows.append(Row(place, values))
    return rows


def _parquet_rows(path: Path) -> list[Row]:
    try:
        table = pyarrow.parquet.read_table(path)
        records = table.to_pylist(maps_as_pydicts="strict")
    except (pyarrow.ArrowException, OSError, KeyError, ValueError) as error:
        raise DataError(
            needed="a readable Parquet file with distinct column names",
            given=f"{path}: {error}",
            remedy="Write the file again.",
        ) from error
    return [Row(f"{path}, row {number}", values) for number, values in enumerate(records)]


def _hub_rows(options: HubData) -> list[Row]:
    if not Path(options.dataset).exists():
        use_cache_if_unreachable()
    needed = "the package datasets for hub data"
    datasets = optional("datasets", extra="data", needed=needed, otherwise="use a JSONL or Parquet file")
    asked = f"{options.dataset} (config {options.config}, split {options.split})"
    try:
        loaded = datasets.load_dataset(options.dataset, options.config, split=options.split)
    except ConnectionError as error:
        raise UnavailableError(
            needed=f"the hub, or a cached copy of {asked}",
            given=f"{type(error).__name__}: {error}",
            remedy="Go online once to fill the cache, unset HF_HUB_OFFLINE, or use a JSONL or Parquet file.",
        ) from error
    except (FileNotFoundError, ValueError, RuntimeError) as error:
        raise DataError(
            needed=f"the data set {asked}",
            given=f"{type(error).__name__}: {error}",
            remedy="Check dataset, config and split.",
        ) from error
    return [Row(f"{options.dataset}/{options.split}, row {number}", values) for number, values in enumerate(loaded)]


def _reasoning_gym_rows(options: ReasoningGymData) -> tuple[Row, ...]:
    needed = "the package reasoning-gym for reasoning_gym data"
    reasoning_gym = optional("reasoning_gym", extra="rewards", needed=needed, otherwise="use a JSONL or Parquet file")
    if options.task not in reasoning_gym.factory.DATASETS:
        raise DataError(
            needed="the name of a reasoning-gym task",
            given=repr(options.task),
            remedy=f"Did you mean {nearest(options.task, reasoning_gym.factory.DATASETS)!r}?",
        )
    try:
        generated = reasoning_gym.create_dataset(
            options.task, size=options.size, seed=options.seed, **dict(options.options)
        )
        entries = [generated[index] for index in range(options.size)]
    except (TypeError, AssertionError, ValueError) as error:
        raise DataError(
            needed=f"options that the reasoning-gym task {options.task!r} takes",
            given=f"{dict(options.options)} ({error})",
            remedy="Check options against the task's configuration class.",
        ) from error
    return tuple(
        Row(
            f"{options.task}, row {number}",
            {"prompt": entry["question"], "answer": entry["answer"], "entry": entry},
        )
        for number, entry in enumerate(entries)
    )


def _guessing_rows(options: GuessingData) -> tuple[Row, ...]:
    generator, rows = random.Random(options.seed), []
    for number in range(options.size):
        low, high = sorted(generator.sample(range(options.low, options.high + 1), 2))
        secret = generator.randint(low, high)
        asked = f"Find a number from {low} to {high}."
        rows.append(Row(f"guessing, row {number}", {"prompt": asked, "secret": secret}))
    return tuple(rows)


def _renamed(rows: Sequence[Row], columns: Mapping[str, str], origin: str) -> tuple[Row, ...]:
    """The rows with columns renamed; columns in the order in which the rows first have them."""
    theirs = list(dict.fromkeys(name for row in rows for name in row.values))
    ours_of = {their: our for our, their in columns.items()}
    if len(ours_of) != len(columns):
        raise DataError(
            needed="each column of the data under one name",
            given=f"columns {dict(columns)}",
            remedy="Map every column once.",
        )
    for our, their in {"prompt": "prompt", **columns}.items():
        if their not in theirs:
            needed = f"a column {their!r}" + (f" for {our!r}" if our in columns else "")
            raise DataError(
                needed=f"{needed} in {origin}",
                given=f"the columns {_listed(theirs)}",
                remedy=_how_to_name(our, their, columns, theirs),
            )
    names = {their: ours_of.get(their, their) for their in theirs}
    twice = {our for our in names.values() if list(names.values()).count(our) > 1}
    if twice:
        raise DataError(
            needed="distinct column names after renaming",
            given=f"{_listed(twice)} twice in {origin}",
            remedy="Give the other column of that name a name of its own in columns.",
        )
    return tuple(Row(row.place, {our: row.values.get(their) for their, our in names.items()}) for row in rows)


def _how_to_name(our: str, their: str, columns: Mapping[str, str], theirs: Sequence[str]) -> str:
    """What to change in a recipe so that the column is found."""
    if our not in columns and (misspelt := difflib.get_close_matches(our, columns, n=1)):
        return f"Write {our!r} instead of {misspelt[0]!r} in columns."
    if similar := difflib.get_close_matches(their, theirs, n=1):
        return f"Set columns.{our}; did you mean {similar[0]!r}?"
    return f"Say which column holds it: columns: {{{our}: NAME}} in a recipe, --column NAME of `logitless sample`."


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The candidate spelled most like ``name``.

    Example:
        >>> nearest("qestion", ["answer", "question"])
        'question'
    """
    return max(candidates, key=lambda candidate: difflib.SequenceMatcher(a=name, b=candidate).ratio())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
