"""Completions in a file: written once, replayed as an engine.

One JSON object a line (``.jsonl``) or one Parquet row (``.parquet``) a completion, with the fields of ``Completion``;
only ``prompt_id``, ``token_ids``, ``text`` and ``finish_reason`` are required. Other columns are not read.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from logitless.errors import DataError, InputError
from logitless.json_lines import json_lines
from logitless.rollout.engine import Weights
from logitless.rollout.sampling import SamplingOptions
from logitless.types import PER_TOKEN, Completion, Prompt

_REQUIRED = ("prompt_id", "token_ids", "text", "finish_reason")
_TYPES: dict[str, type] = {
    "prompt_id": str,
    "token_ids": int,
    "text": str,
    "finish_reason": str,
    "logp_sampler": float,
    "trained": bool,
    "turn": int,
    "weights_version": int,
    "entropy_sampler": float,
    "token_versions": int,
    "logp_policy": float,
}
"""Type of each field, or of its items if it is one of ``PER_TOKEN``."""


class RecordedEngine:
    """An ``Engine`` that returns recorded completions, whatever the weights.

    If a prompt has more recorded completions than requested, the seed chooses.

    Args:
        path: ``.jsonl`` or ``.parquet`` file.

    Raises:
        DataError: a malformed row, with its number.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "completions.jsonl"
        >>> write_completions(path, [Completion("7", (4, 2), "4", "stop")])
        >>> engine = RecordedEngine(path)
        >>> engine.sample([Prompt("7", "2+2=", (4,))], 1, SamplingOptions(max_new_tokens=2), seed=0)[0][0].text
        '4'
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._recorded: dict[str, list[Completion]] = {}
        for completion in read_completions(path):
            self._recorded.setdefault(completion.prompt_id, []).append(completion)

    def load(self, weights: Weights, version: int) -> None:
        """Do nothing: completions keep the version in the file."""

    def close(self) -> None:
        """Do nothing: no file is open."""

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """``num_samples`` recorded completions of each prompt, in the file's order.

        Raises:
            DataError: a prompt has fewer, or a completion is longer than ``options.max_new_tokens``.
        """
        return [self._choose(prompt, num_samples, options, seed) for prompt in prompts]

    def _choose(self, prompt: Prompt, num_samples: int, options: SamplingOptions, seed: int) -> list[Completion]:
        recorded = self._recorded.get(prompt.id, [])
        if len(recorded) < num_samples:
            raise DataError(
                needed=f"{num_samples} recorded completions of prompt {prompt.id!r}",
                given=f"{len(recorded)} in {str(self.path)!r}",
                remedy="Record more, ask for fewer completions a prompt, or leave the prompt out.",
            )
        generator = np.random.default_rng([seed, *prompt.id.encode()])
        chosen = sorted(generator.permutation(len(recorded))[:num_samples].tolist())
        completions = [recorded[index] for index in chosen]
        longest = max((completion.length for completion in completions), default=0)
        if longest > options.max_new_tokens:
            raise DataError(
                needed=f"completions of at most {options.max_new_tokens} tokens",
                given=f"one of {longest} for prompt {prompt.id!r} in {str(self.path)!r}",
                remedy="Raise max_new_tokens to the value the file was recorded with.",
            )
        return completions


class ColumnEngine:
    """An ``Engine`` that answers each prompt with the text of a column, whatever the weights.

    Args:
        column: of the data.
        tokenizer: of the policy; its EOS ends each text.

    Raises:
        DataError: in ``sample``: a prompt has no text there, or one of more than ``options.max_new_tokens`` tokens.
    """

    def __init__(self, column: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._column, self._tokenizer = column, tokenizer

    def load(self, weights: Weights, version: int) -> None:
        """Do nothing: texts have no version."""

    def close(self) -> None:
        """Do nothing."""

    def sample(
        self, prompts: Sequence[Prompt], num_samples: int, options: SamplingOptions, *, seed: int
    ) -> list[list[Completion]]:
        """``num_samples`` times the text of each prompt.

        Raises:
            DataError: a prompt without a text, or with one of more than ``max_new_tokens`` tokens.
        """
        del seed
        return [[self._text(prompt, options.max_new_tokens)] * num_samples for prompt in prompts]

    def check(self, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        """Refuse prompts that ``sample`` would refuse: a row that comes up late must not end a long run."""
        for prompt in prompts:
            self._text(prompt, max_new_tokens)

    def _text(self, prompt: Prompt, max_new_tokens: int) -> Completion:
        completion = text_of_column(prompt, self._column, self._tokenizer)
        if completion.length > max_new_tokens:
            raise DataError(
                needed=f"texts of at most {max_new_tokens} tokens in column {self._column!r}",
                given=f"{completion.length} for prompt {completion.prompt_id!r}",
                remedy="Raise rollout.sampling.max_new_tokens, or leave the row out.",
            )
        return completion


def text_of_column(prompt: Prompt, column: str, tokenizer: PreTrainedTokenizerBase) -> Completion:
    """The text in a prompt's column as its completion: tokenized without special tokens, and ended by EOS.

    Raises:
        DataError: there is no text.
    """
    text = prompt.columns.get(column)
    if not isinstance(text, str):
        has = ", ".join(map(repr, sorted(prompt.columns))) or "no other column"
        raise DataError(
            needed=f"text in column {column!r} of every prompt, to imitate",
            given=f"{type(text).__name__} for prompt {prompt.id!r}, which has {has}",
            remedy="Name the column that holds it: rollout.engine.column, or warm_start.answer_column.",
        )
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return Completion(prompt.id, token_ids=np.array(ids), text=text, finish_reason="stop")


def read_completions(path: str | Path) -> list[Completion]:
    """The completions in a file.

    Raises:
        DataError: no such file, another kind of file, or a malformed row, with its number.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "completions.jsonl"
        >>> row = '{"prompt_id": "7", "token_ids": [4, 2], "text": "4", "finish_reason": "stop"}'
        >>> _ = path.write_text(row)
        >>> read_completions(path)[0].token_ids.tolist()
        [4, 2]
    """
    path = Path(path)
    return [_completion(row, f"{path}, {place}") for place, row in _rows(path)]


def write_completions(
    path: str | Path, completions: Sequence[Completion], prompts: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write completions; ``read_completions`` reads equal ones.

    Args:
        path: of the file.
        completions: one row each.
        prompts: texts by prompt id, for a column ``prompt``.

    Raises:
        InputError: a file name that ends neither in ``.jsonl`` nor in ``.parquet``.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "completions.parquet"
        >>> write_completions(path, [Completion("7", (4, 2), "4", "stop", logp_sampler=(-0.5, -0.25))])
        >>> read_completions(path)[0].logp_sampler.tolist()
        [-0.5, -0.25]
    """
    path = Path(path)
    rows = [each.as_json() | ({"prompt": prompts[each.prompt_id]} if prompts else {}) for each in completions]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        kinds = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
        types = {name: pa.list_(kinds[of]) if name in PER_TOKEN else kinds[of] for name, of in _TYPES.items()}
        if prompts:
            types["prompt"] = pa.string()
        parquet.write_table(pa.Table.from_pylist(rows, schema=pa.schema(list(types.items()))), path)
    else:
        raise InputError(needed="a .jsonl or .parquet file", given=repr(str(path)), remedy="Choose one of the two.")


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(line or row number in words, content) of each completion."""
    if not path.is_file():
        raise DataError(
            needed="a file of completions", given=f"{str(path)!r}, which does not exist", remedy="Correct the path."
        )
    if path.suffix == ".jsonl":
        for number, row in json_lines(path, accept_nan=True):
            yield f"line {number}", row
    elif path.suffix == ".parquet":
        from pyarrow import ArrowInvalid, parquet

        try:
            table = parquet.read_table(path)
        except ArrowInvalid as error:
            raise DataError(
                needed="a Parquet file", given=f"{str(path)!r}: {error}", remedy="Write the file again."
            ) from error
        known = table.select([name for name in _TYPES if name in table.column_names])
        for number, row in enumerate(known.to_pylist()):
            yield f"row {number}", row
    else:
        raise DataError(needed="a .jsonl or .parquet file", given=repr(str(path)), remedy="Convert it to one of them.")


def _completion(row: Any, place: str) -> Completion:
    def malformed(needed: str, value: Any) -> DataError:
        texts = "Name the column of texts in data.train instead: rollout.engine={name: recorded, column: ...}."
        is_text = isinstance(row, dict) and "token_ids" not in row
        remedy = texts if is_text else "Repair or remove the row."
        return DataError(needed=needed, given=f"{value!r} in {place}", remedy=remedy)

    if not isinstance(row, Mapping):
        raise malformed("an object a completion", row)
    for name, kind in _TYPES.items():
        value = row.get(name)
        if value is None and name not in _REQUIRED:
            continue
        items = value if name in PER_TOKEN else [value]
        accepted = (float, int) if kind is float else kind
        if not isinstance(items, list) or any(not isinstance(item, accepted) for item in items):
            raise malformed(f"{name} as {'a list of ' if name in PER_TOKEN else ''}{kind.__name__}", value)
    if row["finish_reason"] not in ("stop", "length"):
        raise malformed("finish_reason 'stop' or 'length'", row["finish_reason"])
    values: dict[str, Any] = {name: row[name] for name in _TYPES if row.get(name) is not None}
    try:
        return Completion(**values)
    except InputError as error:
        raise DataError(needed=error.needed, given=f"{error.given} in {place}", remedy=error.remedy) from error
