"""The folder of a run: configuration, metrics, rollouts, checkpoints, summary and report.

    runs/<name>/
        config.yaml                     the resolved recipe
        provenance.json                 versions, device, commit of each start, digests of data and code
        lock.json                       while a process writes here
        metrics.jsonl                   one line an optimizer step, see docs/metrics.md
        rollouts/part-000001.parquet    one data set in a few files, one row a completion, see docs/rollout_data.md
        collected/block-000012.json     under rollout.staleness or parallel.sampling: the log of blocks (block_log.py)
        checkpoints/                    see checkpoint.py
        tensorboard/
        model/                          at the end: Hugging Face format, for from_pretrained (an adapter under LoRA)
        value_head.safetensors          at the end, where the algorithm has a value loss
        summary.json                    at the end, after an error too
        report.html                     `logitless report`

Files are written atomically. Only ``metrics.jsonl`` grows in place: a crash can cut its last line, which is skipped
when the file is read and removed when the run is resumed.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from logitless.errors import ConfigurationError, DataError, InputError
from logitless.train.record import rollout_data
from logitless.train.record.metrics import Line, check_names
from logitless.train.store.atomic import cannot_write, write_atomically
from logitless.train.store.checkpoint import checkpoints, is_first
from logitless.train.store.run_lock import LOCK
from logitless.types import Group

WARM_START = "warm_start"
"""Name of the folder with the result of the warm start."""


class _Inside:
    """A path inside a run folder, as an attribute of ``RunFolder``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", kind: type["RunFolder"]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The files of a run; use ``create_run_folder`` or ``open_run_folder``."""

    path: Path

    config = _Inside("config.yaml")
    """The resolved recipe."""
    provenance = _Inside("provenance.json")
    """Versions, device, commit and data of each start."""
    metrics = _Inside("metrics.jsonl")
    """One JSON object a line, one line an optimizer step."""
    rollouts = _Inside("rollouts")
    """The data set of completions: every ``*.parquet`` in it is a part."""
    collected = _Inside("collected")
    """The log of sampled blocks."""
    checkpoints = _Inside("checkpoints")
    """One folder a checkpoint."""
    tensorboard = _Inside("tensorboard")
    """Event files."""
    writers = _Inside("writers.json")
    """The run's id at each service that gets its metrics."""
    model = _Inside("model")
    """The finished policy in Hugging Face format."""
    value_head = _Inside("value_head.safetensors")
    """The finished value head."""
    warm_start = _Inside(WARM_START)
    """The result of the warm start, if there was one."""
    summary = _Inside("summary.json")
    """Summary of the finished run."""
    report = _Inside("report.html")
    """The report."""

    def is_failed_start(self) -> bool:
        """Whether the folder may be reused: no block was finished, and it has no foreign files; or it is empty."""
        if not self.path.is_dir():
            return False
        found = {path.name for path in self.path.iterdir() if path.name not in (LOCK, "rollouts", "checkpoints")}
        if found and not (found & _FIRST and found <= _WRITTEN_FIRST):
            return False
        return self.rollout_blocks() in ([], [1]) and all(map(is_first, checkpoints(self.checkpoints)))

    def remove_after_failed_start(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Exit function of a context: remove the folder if an error came before the first rollout or summary."""
        del rest
        said = any(self.rollouts.glob("*")) or self.summary.exists()
        if kind is not None and self.is_failed_start() and not said:
            # A thread may be writing the first checkpoint still: what it leaves is the folder of a failed start.
            shutil.rmtree(self.path, ignore_errors=True)

    def clear(self) -> None:
        """Remove everything but the lock, and create empty folders for rollouts and checkpoints."""
        # The first files of a start go last: by them the folder is known where this is killed.
        for path in sorted(self.path.iterdir(), key=lambda path: path.name in _FIRST):
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self.rollouts.mkdir()
        self.checkpoints.mkdir()

    def write_config(self, text: str) -> None:
        """Write the resolved recipe."""
        write_atomically(self.config, text.encode())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary; numbers that are not finite become null."""
        summary = {"schema_number": 1, **summary}
        write_atomically(self.summary, (json.dumps(_plain(summary), indent=2) + "\n").encode())

    def read_summary(self) -> dict[str, Any]:
        """The summary; empty where there is none, as of a run that was killed, or it is damaged."""
        try:
            found = json.loads(self.summary.read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def append_metrics(self, record: Line) -> None:
        """Add one line; numbers that are not finite become null.

        Raises:
            InputError: a name that is not on the closed list, or no ``step``.
            TrainingError: the disk is full or not writable.
        """
        check_names(record)
        if "step" not in record:
            raise InputError(needed="a record with its step", given=", ".join(record), remedy="Add 'step'.")
        line = json.dumps(_plain(record)) + "\n"
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise cannot_write(self.metrics, error) from error

    def truncate_metrics(self, num_lines: int) -> None:
        """Keep the first lines, and remove those that were written after the checkpoint of a resumed run."""
        kept = self.read_metrics()[:num_lines]
        write_atomically(self.metrics, "".join(json.dumps(record) + "\n" for record in kept).encode())

    def read_metrics(self) -> list[dict[str, Any]]:
        """All lines, without a last line that a crash cut.

        Raises:
            DataError: a malformed line before the last one.
        """
        if not self.metrics.exists():
            return []
        *lines, last = self.metrics.read_text(encoding="utf-8", errors="replace").split("\n")
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                int(record["step"])
                records.append(record)
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines) and not last:
                    break
                raise DataError(
                    needed="one JSON object with its step on each line",
                    given=f"{self.metrics}, line {number}: {error}",
                    remedy="Delete this line.",
                ) from error
        return records

    def write_rollouts(
        self, block: int, groups: Sequence[Group], advantages: Sequence[Sequence[float | None]] | None = None
    ) -> Path:
        """Add all completions of a block to the data set of rollouts (docs/rollout_data.md).

        Rows of this block and of later ones, which a resumed run samples again, are replaced.

        Args:
            advantages: one a completion, by group; None for completions without one.

        Raises:
            InputError: the numbers of advantages and completions differ.
            TrainingError: the disk is full or not writable.
        """
        if advantages is None:
            advantages = [[None] * len(group.completions) for group in groups]
        if [len(of_group) for of_group in advantages] != [len(group.completions) for group in groups]:
            raise InputError(
                needed="one advantage a completion, by group",
                given=f"{[len(of_group) for of_group in advantages]} for groups of "
                f"{[len(group.completions) for group in groups]}",
                remedy="Give None for a completion without an advantage.",
            )
        rows = rollout_data.rows_of(block, groups, advantages)
        try:
            return rollout_data.append(self.rollouts, block, rows, write_atomically)
        except OSError as error:
            raise cannot_write(self.rollouts, error) from error

    def read_rollouts(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Number and rows of each block, in order; one part is in memory at a time.

        Raises:
            DataError: a file that is not Parquet.
        """
        for table in rollout_data.parts(self.rollouts):
            for block, rows in groupby(table.to_pylist(), key=lambda row: row["block"]):
                yield block, list(rows)

    def rollout_blocks(self) -> list[int]:
        """Numbers of the blocks with rollouts, in order."""
        return rollout_data.blocks(self.rollouts)

    def read_block(self, block: int) -> list[dict[str, Any]]:
        """The rows of a block, one for each completion, sorted by group.

        Raises:
            ConfigurationError: the block is missing.
            DataError: its file is not Parquet.
        """
        there = self.rollout_blocks()
        if block not in there:
            raise ConfigurationError(
                needed=f"a block of {self.path}",
                given=f"block {block}, and there are {f'{there[0]} to {there[-1]}' if there else 'none'}",
                remedy="Name one that is there.",
            )
        return rollout_data.read(self.rollouts, block)


_FIRST = {".provenance.json.partial", "provenance.json", ".config.yaml.partial", "config.yaml"}
"""The first files that a start writes."""

_WRITTEN_FIRST = {
    *_FIRST,
    *("metrics.jsonl", "tensorboard", "wandb", "collected", WARM_START),
    *("writers.json", ".writers.json.partial", ".metrics.jsonl.partial", ".warm_start.partial"),
    *("summary.json", ".summary.json.partial"),  # of an error that came before the first checkpoint
}
"""What may be in a run folder before its first block is done, besides lock, rollouts and checkpoints."""


def create_run_folder(root: Path, name: str, *, unique: bool = False) -> RunFolder:
    """Create ``root/name``; the folder of a failed start is reused.

    Args:
        unique: if the name is taken, use ``name-2``, ``name-3``, ...

    Raises:
        ConfigurationError: the folder holds a run, or other files.
        TrainingError: it cannot be created.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> [create_run_folder(root, "toy", unique=True).path.name for _ in range(3)]
        ['toy', 'toy-2', 'toy-3']
    """
    number = 1
    while True:
        folder = RunFolder(root / (name if number == 1 else f"{name}-{number}"))
        try:
            folder.path.mkdir(parents=True)
            break
        except FileExistsError as error:
            if not unique:
                if folder.is_failed_start():
                    break
                raise taken(folder, forks=False) from error
            number += 1
        except OSError as error:
            raise cannot_write(folder.path, error) from error
    folder.rollouts.mkdir(exist_ok=True)
    folder.checkpoints.mkdir(exist_ok=True)
    return folder


def is_taken(folder: RunFolder) -> bool:
    """Whether the folder holds a run, or anything else, that a new run must not replace."""
    return folder.path.exists() and not folder.is_failed_start()


def taken(folder: RunFolder, *, forks: bool) -> ConfigurationError:
    """The error for a folder that is taken; a run that begins as a fork cannot go on with what is there."""
    resumable = folder.config.is_file() and not forks
    goes_on = "Add --resume (in Python resume=True) to go on with it, choose" if resumable else "Choose"
    return ConfigurationError(
        needed="a run folder that does not exist yet",
        given=f"the existing {folder.path}",
        remedy=f"{goes_on} another name (--set name=..., or --numbered), or remove the folder.",
    )


def open_run_folder(path: Path) -> RunFolder:
    """Open the folder of an existing run.

    Raises:
        ConfigurationError: there is no run in it.

    Example:
        >>> import tempfile
        >>> made = create_run_folder(Path(tempfile.mkdtemp()), "toy")
        >>> made.write_config("name: toy")
        >>> open_run_folder(made.path) == made
        True
    """
    folder = RunFolder(path)
    if not folder.config.is_file():
        near, begun = path, list(path.glob("*/config.yaml"))  # a folder of runs, or one beside runs
        if not begun:
            near, begun = path.parent, list(path.absolute().parent.glob("*/config.yaml"))
        runs = [each.parent.name for each in sorted(begun, key=lambda config: -config.stat().st_mtime)[:5]]
        remedy = f"Name one of those in {near}, newest first: {', '.join(runs)}." if runs else "Check the path."
        run, _, which = str(path).rpartition(":")  # the form that --fork takes
        if run and RunFolder(Path(run)).config.is_file():
            remedy = f"Name {run}; commands that read a checkpoint take --checkpoint {which}."
        raise ConfigurationError(
            needed=f"the folder of a run at {path}",
            given="a folder without a config.yaml" if path.is_dir() else "a file" if path.exists() else "nothing",
            remedy=remedy,
        )
    return folder


def _plain(value: Any) -> Any:
    """The same with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
