"""Files and folders that appear whole or not at all: written beside their place, flushed to disk and renamed."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from logitless.errors import CheckpointError, TrainingError


def write_atomically(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path`` so that a crash at any moment leaves the old file or the new one.

    Raises:
        TrainingError: the disk is full or not writable; the old file is untouched.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "summary.json"
        >>> write_atomically(path, b"{}")
        >>> path.read_text()
        '{}'
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_flushed(partial, content)
        partial.replace(path)
        flush(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def write_folder_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Put a folder at ``path`` that is there as a whole or not at all; one that is there already is replaced.

    Args:
        path: of the folder.
        write: fills the empty folder that it is given.

    Raises:
        TrainingError: the disk is full or not writable.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "model"
        >>> write_folder_atomically(path, lambda folder: (folder / "a").write_text("b") and None)
        >>> (path / "a").read_text()
        'b'
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        for each in [*partial.rglob("*"), partial]:
            flush(each)
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
        flush(path.parent)
    except (OSError, SafetensorError, CheckpointError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: Exception) -> TrainingError:
    """The error of a disk that is full or not writable."""
    return TrainingError(
        needed=f"room and permission to write {path}",
        given=str(error),
        remedy="Free disk space or choose another `output`, then continue with --resume from the last checkpoint.",
    )


def write_flushed(path: Path, content: bytes) -> None:
    """Write a file and push it to the disk; a crash may leave a part of it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush(path: Path) -> None:
    """Push a file or the list of a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
