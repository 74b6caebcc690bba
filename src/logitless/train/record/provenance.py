"""Provenance of a run: versions, commit, device, and digests of its data and of files of user code.

``provenance.json`` in the run folder has an entry for each start, resumes included. A resume with other data is an
error, one with other code a warning, for the code may have been mended. Both are compared by digests of their contents.
"""

import hashlib
import json
import logging
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from logitless.errors import CheckpointError, ConfigurationError, DataError
from logitless.installed import gpu_driver, version_of
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.loading import CODE, places
from logitless.train.record.run_folder import RunFolder
from logitless.train.store.atomic import write_atomically
from logitless.types import Prompt

logger = logging.getLogger("logitless")

SCHEMA_NUMBER = 1

PACKAGES = (
    *("logitless", "torch", "transformers", "tokenizers", "safetensors", "numpy", "peft", "triton", "datasets"),
    *("reasoning-gym", "math-verify"),
)


def record_start(
    folder: RunFolder,
    data: Mapping[str, str],
    device: torch.device,
    *,
    code: Mapping[str, str],
    step: int,
    changed: Mapping[str, Any],
    parent: Mapping[str, Any] | None,
) -> None:
    """Add this start to ``provenance.json``.

    Args:
        code: of ``digests_of_code``.
        step: optimizer steps done before this start.
        changed: changed keys of the recipe since the last start. A held-out set whose data are among them may have
            other rows.
        parent: where a new fork begins; None for any other start.

    Raises:
        ConfigurationError: the run was started with other data.
        CheckpointError: the file is damaged.
    """
    before: dict[str, Any] = _read(folder.provenance) if folder.provenance.exists() else {"data": data, "starts": []}
    named_anew = {key for key in changed if key.startswith("evaluation.sets.")}
    differ = sorted(
        name
        for name in {*before["data"], *data}
        if before["data"].get(name) != data.get(name)
        and not any(key == name or key.startswith(f"{name}.data.") for key in named_anew)
    )
    if differ:
        raise ConfigurationError(
            needed="the data that the run was started with",
            given=f"other rows in {', '.join(differ)} than {folder.provenance} says",
            remedy="Bring the earlier data back, or start a run of another name.",
        )
    start = {"step": step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "code": dict(code), **environment(device)}
    starts = [*before["starts"], start | ({"changed": dict(changed)} if changed else {})]
    forked = parent if parent is not None else before.get("parent")
    content = {
        "schema_number": SCHEMA_NUMBER,
        **({} if forked is None else {"parent": dict(forked)}),
        "data": dict(data),
        "starts": starts,
    }
    write_atomically(folder.provenance, (json.dumps(content, indent=2) + "\n").encode())


def parent_in(folder: RunFolder) -> dict[str, Any] | None:
    """Where a fork began: ``run``, ``checkpoint``, ``block``, ``step`` and ``changed``; None for any other run.

    Raises:
        CheckpointError: the file is damaged.
    """
    found = _read(folder.provenance).get("parent") if folder.provenance.exists() else None
    return None if found is None else dict(found)


def digests_of(folder: RunFolder) -> dict[str, str]:
    """Digests of the data that a run was last started with, by name; empty without ``provenance.json``.

    Raises:
        CheckpointError: the file is damaged.
    """
    return dict(_read(folder.provenance)["data"]) if folder.provenance.exists() else {}


def warn_of_changed_code(folder: RunFolder, code: Mapping[str, str]) -> None:
    """Warn of each file of code that is another one than at the run's last start.

    Args:
        folder: of the run that goes on, or of the parent of a fork.
        code: of ``digests_of_code``.

    Raises:
        CheckpointError: ``provenance.json`` is damaged.
    """
    starts = _read(folder.provenance)["starts"] if folder.provenance.exists() else []
    before = starts[-1].get("code", {}) if starts else {}
    for file in sorted(before.keys() & code.keys()):
        if before[file] != code[file]:
            logger.warning(
                "%s has changed since %s was last started: from here on its new code counts", file, folder.path
            )


def digests_of_code(recipe: Recipe) -> dict[str, str]:
    """SHA-256 of each file that a recipe names as code (``./file.py:name``), by its path; not of what it imports."""
    whole = recipe.model_dump(mode="json")
    named = {str(at[last]).rpartition(":")[0] for key in CODE for _, at, last in places(whole, key)}
    return {file: digest_of_file(Path(file).expanduser()) for file in sorted(named) if file.endswith(".py")}


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, commit and device.

    Example:
        >>> sorted(environment(torch.device("cpu")))
        ['commit', 'device', 'driver', 'packages', 'platform', 'python']
    """
    on_gpu = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := version_of(name)) is not None},
        "commit": _commit(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "driver": gpu_driver() if on_gpu else None,
    }


def digest_of_prompts(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of prompts: ids, texts, tokens and columns, in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        row = [prompt.id, prompt.text, prompt.token_ids.tolist(), dict(prompt.columns)]
        digest.update(json.dumps(row, sort_keys=True, default=_shown).encode() + b"\n")
    return digest.hexdigest()


def digest_of_file(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_log(folder: Path) -> str:
    """SHA-256 of a run's log (``block_log.py``).

    Raises:
        DataError: there is no log.
    """
    files = sorted(folder.glob("block-*"))
    if not files:
        raise DataError(
            needed=f"a log of collected blocks at {folder}",
            given="none",
            remedy="Name the folder of a run with rollout.staleness or parallel.sampling, or a file of completions.",
        )
    return hashlib.sha256("".join(map(digest_of_file, files)).encode()).hexdigest()


def _shown(value: object) -> str:
    """A column's value that is no JSON, as text; an object whose text has its address is replaced by its type."""
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        dict(found["data"])
        list(found["starts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            needed=f"readable JSON with data and starts in {path}",
            given=f"{type(error).__name__}: {error}",
            remedy="Delete the file; what earlier starts were made with is then not known any more.",
        ) from error
    return found


def _commit() -> str | None:
    """The commit of the current folder's repository; None outside of one."""
    try:
        asked = ["git", "rev-parse", "--verify", "HEAD"]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
