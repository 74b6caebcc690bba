"""Recipe lines that ``logitless bench`` found fastest on this machine, for ``logitless doctor``."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from logitless.bench.machine import environment

FOLDER = "LOGITLESS_SETTINGS"
"""Environment variable with the folder of result files."""


def settings_folder() -> Path:
    """Folder of the result files of ``logitless bench``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(FOLDER) or cache / "logitless" / "settings")


def recommended_here() -> list[tuple[str, str]]:
    """Pairs of a benchmark and a recipe line, from result files of the same machine and torch.

    Example:
        >>> isinstance(recommended_here(), list)
        True
    """
    return list(_lines(settings_folder()))


def _lines(folder: Path) -> Iterator[tuple[str, str]]:
    here = environment("cuda" if torch.cuda.is_available() else "cpu", ())
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            found: Mapping[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError):
            continue  # incomplete; the benchmark writes it again
        if all(found.get("environment", {}).get(name) == value for name, value in here.items()):
            yield from ((path.stem, line) for line in found.get("recommended", ()))
