"""The lock of a run folder, or of another one that has one writer.

An operating system lock on ``lock.json``, which names the process that holds it. The system releases the lock when its
process ends, however it ends. The file of a killed process is taken over.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from logitless.errors import ConfigurationError
from logitless.train.store.atomic import cannot_write

LOCK = "lock.json"


@contextmanager
def locked(
    folder: Path, *, kind: str = "run folder", another: str = "choose another name with --set name=..."
) -> Iterator[None]:
    """Hold the lock of a folder inside; ``lock.json`` is removed afterwards.

    Args:
        folder: that exists.
        kind, another: of folder, and how a user takes another one; for the error.

    Raises:
        ConfigurationError: another process holds it.
        TrainingError: the lock cannot be written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with locked(folder):
        ...     print(json.loads((folder / LOCK).read_text())["pid"] == os.getpid())
        True
    """
    path, host = folder.resolve() / LOCK, socket.gethostname()
    with ExitStack() as stack:
        try:
            stack.enter_context(FileLock(path, blocking=False))
            owner = _owner(path)
            if owner.get("host", host) != host:  # some shared file systems do not show other machines' locks
                raise _taken(path, owner, kind, another)
            since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
            path.write_text(json.dumps({"pid": os.getpid(), "host": host, "since": since}))
        except Timeout:
            raise _taken(path, _owner(path), kind, another) from None
        except OSError as error:
            raise cannot_write(path, error) from error
        stack.callback(path.unlink, missing_ok=True)
        yield


def _taken(path: Path, owner: dict[str, str], kind: str, another: str) -> ConfigurationError:
    who = "process {pid} on {host}, which has it since {since}" if owner else "another process"
    return ConfigurationError(
        needed=f"the {kind} {path.parent} for this process alone",
        given=who.format(**owner),
        remedy=f"Wait for it or stop it, or {another}; if it ran on another machine and is gone for good, "
        f"delete {path}.",
    )


def _owner(path: Path) -> dict[str, str]:
    """The process that wrote the file; empty if there is none, or its write was interrupted."""
    with suppress(OSError, ValueError):
        owner = json.loads(path.read_text())
        if isinstance(owner, dict) and owner.keys() >= {"pid", "host", "since"}:
            return owner
    return {}
