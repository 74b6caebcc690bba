"""Write files and folders atomically: under another name, flushed to disk, then renamed."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from logitless.errors import CheckpointError, LogitlessError, TrainingError


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a crash at any moment leaves the old file or the new one.

    Raises:
        TrainingError: the disk is full or not writable; the old file is unchanged.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_flushed(partial, content)
        partial.replace(path)
        flush(path.parent)
    except OSError as error:
        with suppress(OSError):  # where nothing can be written, nothing can be removed
            partial.unlink(missing_ok=True)
        raise cannot_write(path, error) from error


def write_folder_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Write a folder that appears whole or not at all; an existing one is replaced.

    Args:
        write: fills an empty folder.

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
        replace_folder(path, partial)
    except (OSError, SafetensorError, CheckpointError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise cannot_write(path, error) from error


def replace_folder(path: Path, by: Path) -> None:
    """Rename ``by`` to ``path``; a folder that stood there is ``.NAME.old`` until then."""
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)  # removed in its place, half of it could stay there
    by.rename(path)
    flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def cannot_write(path: Path, error: Exception | str, kind: type[LogitlessError] = TrainingError) -> LogitlessError:
    """The error for a disk that is full or not writable."""
    return kind(
        needed=f"room and permission to write {path}",
        given=str(error),
        remedy="Free disk space or choose another place (`output` of a run); --resume continues a run that has begun.",
    )


def write_flushed(path: Path, content: bytes) -> None:
    """Write a file and flush it to disk; a crash may leave a part of it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush(path: Path) -> None:
    """Flush a file, or a folder's list of files, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
