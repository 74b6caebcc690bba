"""The official prompts, which are data of their publishers and no part of the project."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(os.environ.get("LOGITLESS_SHARED", Path(__file__).parents[3] / ".." / "shared"))


def official_rows(name: str) -> list[dict[str, Any]]:
    """The rows of ``ifeval`` or ``ifbench``; the test is skipped where the file is absent."""
    path = SHARED / "data" / f"{name}_prompts.jsonl"
    if not path.exists():
        pytest.skip(f"NOT TESTED: {path} is absent; set LOGITLESS_SHARED to the folder that holds data/{path.name}")
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
