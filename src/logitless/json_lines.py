"""JSON Lines files: one JSON value a line, in UTF-8; what is not quite JSON is refused with its line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from logitless.errors import DataError


def json_lines(path: Path, *, accept_nan: bool = False) -> Iterator[tuple[int, Any]]:
    """The number from 1 and the value of each line that is not blank.

    Args:
        path: of the file.
        accept_nan: accept NaN and Infinity, which JSON does not have and Python writes, as in log-probs.

    Raises:
        DataError: the file cannot be read; a line is not JSON in UTF-8, has a key twice, or half a surrogate pair.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.jsonl"
        >>> _ = path.write_text('{"a": 1}\\n\\n[2]')
        >>> list(json_lines(path))
        [(1, {'a': 1}), (3, [2])]
    """
    on_constant = None if accept_nan else _no_constant
    try:
        lines = path.open("rb")
    except OSError as error:
        raise DataError(
            needed=f"a readable file in UTF-8 at {path}", given=str(error), remedy="Check the path."
        ) from error
    with lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not text:
                    continue
                value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=on_constant)
                if "\\u" in text:
                    json.dumps(value, ensure_ascii=False).encode()  # raises for half a surrogate pair, which is no text
            except (ValueError, RecursionError) as error:
                raise DataError(
                    needed=f"a JSON object in {path.name}, line {number}, in UTF-8",
                    given=str(error),
                    remedy=f"Repair or remove that line of {path}.",
                ) from error
            yield number, value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {next(n for n in names if names.count(n) > 1)!r} twice")
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
