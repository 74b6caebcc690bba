"""All completions of a run as one Parquet data set in a few files, which can be read at any time.

    rollouts/part-000001.parquet    blocks 1 to 31
    rollouts/part-000032.parquet    blocks 32 to 40, the last one; rewritten with each block

The last part is replaced atomically with each block until it is full; then another begins, named after its first block.
So every file is always complete, and no row is in two of them. docs/rollout_data.md has the columns.
"""

import array
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from logitless.errors import DataError
from logitless.types import Group

FULL_ROWS, FULL_BYTES = 4096, 8 * 2**20
"""A part with so many rows or bytes is full, which limits what is rewritten with each block."""

COLUMNS: dict[str, tuple[pyarrow.DataType, str]] = {
    "block": (pyarrow.int64(), "rollout batch, from 1"),
    "group": (pyarrow.int64(), "of the block, from 1; one prompt"),
    "sample": (pyarrow.int64(), "of the group, from 1"),
    "source": (pyarrow.string(), "`train`, or a mixture's source"),
    "prompt_id": (pyarrow.string(), "id in the data; in a mixture after its source"),
    "prompt": (pyarrow.string(), "text as the model reads it"),
    "completion": (pyarrow.string(), "text up to the stop string"),
    "num_tokens": (pyarrow.int64(), "with the stop token"),
    "finish_reason": (pyarrow.string(), "`stop`, or `length` at the limit"),
    "weights_version": (pyarrow.int64(), "optimizer steps of the sampling weights; null if unknown"),
    "reward": (pyarrow.float64(), "weighted sum of the scores; null without one"),
    "advantage": (pyarrow.float64(), "mean over its tokens; null where not trained on"),
    "verdicts": (pyarrow.string(), "JSON: status, score, detail, message by function"),
    "num_turns": (pyarrow.int64(), "of the policy; 1 without a conversation"),
    "conversation": (pyarrow.string(), "JSON: messages; null in groups of single turns"),
}
"""Columns of every run, with type and meaning; ``reward/<function>`` (double), its score, follows for each function."""


def rows_of(block: int, groups: Sequence[Group], advantages: Sequence[Sequence[float | None]]) -> list[dict[str, Any]]:
    """The rows of a block; ``advantages`` are by group and completion."""
    return [
        {
            "block": block,
            "group": number,
            "sample": sample,
            "source": group.prompt.source or None,
            "prompt_id": group.prompt.id,
            "prompt": group.prompt.text,
            "completion": completion.text,
            "num_tokens": completion.length,
            "finish_reason": completion.finish_reason,
            "weights_version": completion.weights_version,
            "reward": reward,
            "advantage": advantage,
            "verdicts": json.dumps({name: vars(verdict) for name, verdict in verdicts.items()}),
            "num_turns": completion.num_turns,
            "conversation": None if messages is None else json.dumps(messages, default=str),
            **{f"reward/{name}": verdict.score for name, verdict in verdicts.items()},
        }
        for number, (group, of_group) in enumerate(zip(groups, advantages, strict=True), start=1)
        for sample, (completion, verdicts, reward, advantage, messages) in enumerate(
            zip(
                group.completions,
                group.verdicts,
                group.rewards,
                of_group,
                group.conversations or [None] * len(group.completions),
                strict=True,
            ),
            start=1,
        )
    ]


def append(folder: Path, block: int, rows: Sequence[Mapping[str, Any]], write: Callable[[Path, bytes], None]) -> Path:
    """Add the rows of a block; existing rows of this block and of later ones are removed.

    Args:
        write: writes a file atomically.

    Returns:
        The part that holds the block.

    Raises:
        DataError: the last part is not Parquet.
    """
    later = [name for row in rows for name in row if name not in COLUMNS]
    schema = pyarrow.schema(
        [
            *((name, kind) for name, (kind, _) in COLUMNS.items()),
            *((name, pyarrow.float64()) for name in dict.fromkeys(later)),
        ]
    )
    table = pyarrow.Table.from_arrays(
        [_column([row.get(f.name) for row in rows], f.type) for f in schema], schema=schema
    )
    last: Path | None = None
    for path in reversed(_paths(folder)):
        first, final = _span(path)
        if final < block:
            last = path
            break
        if first < block:
            last = path
            _write(path, _read(path).filter(pyarrow.compute.field("block") < block), write)
            break
        path.unlink()
    if last is not None and not _is_full(last):
        table = pyarrow.concat_tables([_read(last), table], promote_options="default")
        path = last
    else:
        path = folder / f"part-{block:06d}.parquet"
    _write(path, table, write)
    return path


def _column(values: Sequence[Any], kind: pyarrow.DataType) -> pyarrow.Array:
    """As ``pyarrow.array(values, kind)`` for the types of ``COLUMNS``, but without importing pandas.

    Raises:
        TypeError: a value of another type.
    """
    if kind == pyarrow.string():
        builder = pyarrow.lib.StringBuilder()
        builder.append_values(values)
        return builder.finish()
    numbers = array.array("q" if kind == pyarrow.int64() else "d", [0 if value is None else value for value in values])
    valid = np.packbits(np.array([value is not None for value in values], dtype=bool), bitorder="little")
    return pyarrow.Array.from_buffers(kind, len(values), [pyarrow.py_buffer(valid), pyarrow.py_buffer(numbers)])


def parts(folder: Path) -> Iterator[pyarrow.Table]:
    """The tables of all parts in order, one in memory at a time.

    Raises:
        DataError: a file that is not Parquet.
    """
    for path in _paths(folder):
        yield _read(path)


def blocks(folder: Path) -> list[int]:
    """Numbers of all blocks in the data set, in order."""
    found: set[int] = set()
    for path in _paths(folder):
        found |= set(_read(path, ["block"])["block"].to_pylist())
    return sorted(found)


def read(folder: Path, block: int) -> list[dict[str, Any]]:
    """The rows of a block; empty if it is missing."""
    for path in _paths(folder):
        first, last = _span(path)
        if first <= block <= last:
            table = _read(path)
            rows: list[dict[str, Any]] = table.filter(pyarrow.compute.field("block") == block).to_pylist()
            return rows
    return []


def turns(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The turns after the prompt as (role, text); a single turn has no role.

    Messages before the policy's first turn are included if they are not in the prompt, as those of a harness.

    Example:
        >>> said = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "<calc>2+2</calc>"},
        ...         {"role": "tool", "name": "calc", "content": "4"}, {"role": "assistant", "content": "4"}]
        >>> turns({"prompt": "2+2=", "completion": "4", "conversation": json.dumps(said)})
        [('assistant', '<calc>2+2</calc>'), ('tool calc', '4'), ('assistant', '4')]
        >>> turns({"prompt": "2+2=", "completion": "4", "conversation": None})
        [('', '4')]
    """
    if not row.get("conversation"):
        return [("", row["completion"])]
    messages = json.loads(row["conversation"])
    first = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), 0)
    if not all(_text(message).strip() in row["prompt"] for message in messages[:first]):
        first = 0
    return [(f"{each.get('role', '')} {each.get('name') or ''}".strip(), _text(each)) for each in messages[first:]]


def _text(message: Mapping[str, Any]) -> str:
    """The text of a message, or its tool calls if it has none."""
    if message.get("content"):
        return str(message["content"])
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return "\n".join(f"{call['name']}({call['arguments']})" for call in calls)


def _paths(folder: Path) -> list[Path]:
    """All parts, by their first block."""
    return sorted((path for path in folder.glob("*.parquet") if not path.name.startswith(".")), key=_first_block)


def _first_block(path: Path) -> int:
    """From the name, without opening the file, where it ends with the number."""
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdigit() else _span(path)[0]


def _span(path: Path) -> tuple[int, int]:
    """First and last block of a part, from its metadata."""
    try:
        metadata = pyarrow.parquet.read_metadata(path)
        column = metadata.schema.names.index("block")
        found = [metadata.row_group(number).column(column).statistics for number in range(metadata.num_row_groups)]
        return min(each.min for each in found), max(each.max for each in found)
    except (pyarrow.ArrowException, ValueError, AttributeError) as error:
        raise _damaged(path, error) from error


def _is_full(path: Path) -> bool:
    return pyarrow.parquet.read_metadata(path).num_rows >= FULL_ROWS or path.stat().st_size >= FULL_BYTES


def _read(path: Path, columns: list[str] | None = None) -> pyarrow.Table:
    try:
        return pyarrow.parquet.ParquetFile(path).read(columns)
    except pyarrow.ArrowException as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        needed=f"Parquet with a column block in {path}",
        given=str(error),
        remedy="Delete this file; a run never leaves such.",
    )


def _write(path: Path, table: pyarrow.Table, write: Callable[[Path, bytes], None]) -> None:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer, compression="zstd", row_group_size=FULL_ROWS)
    write(path, buffer.getvalue())
