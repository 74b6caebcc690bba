"""The texts of ``cases.toml`` that instructions are tested with."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitless.rewards.instructions import INSTRUCTIONS


@dataclass(frozen=True)
class Case:
    """A text, and arguments to check it with."""

    text: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Cases:
    """The cases of one instruction."""

    passes: Case
    fails: Case
    fail_too: Sequence[Case]
    quirks: Mapping[str, Case]
    hostile: str


def _case(entry: dict[str, Any]) -> Case:
    text = entry.pop("text")
    return Case(text if isinstance(text, str) else "".join(part * times for part, times in text), entry)


def _read() -> dict[str, Cases]:
    rows = tomllib.loads((Path(__file__).parent / "cases.toml").read_text(encoding="utf-8"))
    cases: dict[str, Cases] = {}
    for name in INSTRUCTIONS:
        official, row = cases.get(name.removesuffix("@fixed")), rows.pop(name, {})
        fails = _case(row["fails"]) if "fails" in row else official.fails
        cases[name] = Cases(
            _case(row["passes"]) if "passes" in row else official.passes,
            fails,
            [Case(text, fails.arguments) for text in row.get("fail_too", ())]
            if official is None
            else official.fail_too,
            {note: _case(entry) for note, entry in row.get("quirks", {}).items()},
            row.get("hostile", "a " if official is None else official.hostile),
        )
    assert not rows, f"no instructions: {sorted(rows)}"
    return cases


CASES = _read()
