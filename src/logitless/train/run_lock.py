"""One process at a time in a run folder.

``lock.json`` says who writes there: process, machine, and when that process started, since numbers of processes are
used again. The process also holds the kernel's lock on the file, which ends with it however it ends, so that a lock
left behind by a killed process, a restarted container or a restarted machine is known as stale and taken over. A lock
of another machine cannot be judged from here and is kept.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from logitless.errors import ConfigurationError, TrainingError

LOCK = "lock.json"

_HELD: set[Path] = set()
"""Locks of this process: the kernel's lock keeps others out, not the process that has it."""


@dataclass(frozen=True)
class Owner:
    """A process.

    Args:
        pid: its number.
        host: its machine's name.
        boot: changes whenever the machine is started ("" where the operating system does not say).
        started: when the process started, in ticks since then ("" where the operating system does not say).
        since: when it took the lock, for people.

    Example:
        >>> this_process().is_alive()
        True
    """

    pid: int
    host: str
    boot: str
    started: str
    since: str

    def is_alive(self) -> bool:
        """Whether the process still runs, for one of this machine whose numbers of processes are seen from here."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # somebody else's
            pass
        return _started(self.pid) == self.started


def this_process() -> Owner:
    """The process that asks."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return Owner(os.getpid(), socket.gethostname(), _boot(), _started(os.getpid()), since)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Inside, the folder is this process's; ``lock.json`` is gone afterwards.

    Raises:
        ConfigurationError: another process has it.
        TrainingError: the lock cannot be written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with locked(folder):
        ...     print(json.loads((folder / LOCK).read_text())["pid"] == os.getpid())
        True
    """
    path = folder.resolve() / LOCK
    if path in _HELD:
        raise _taken(path, this_process())
    try:
        file = _opened(path)
    except OSError as error:
        raise TrainingError(
            needed=f"room and permission to write {path}",
            given=str(error),
            remedy="Free disk space or choose another `output`.",
        ) from error
    _HELD.add(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()
        _HELD.discard(path)


def _opened(path: Path) -> TextIO:
    """The lock's file, open, locked and with this process in it."""
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+", encoding="utf-8")
        try:
            kernel_knows = _lock(file)
            owner = _owner(file.read())
            if kernel_knows is False:
                raise _taken(path, owner)
            if not _is_at(path, file):
                file.close()  # its owner went away, and the file with it
                continue
            if owner is not None and _keeps(owner, kernel_knows=kernel_knows is True):
                raise _taken(path, owner)
            file.seek(0)
            file.truncate()
            file.write(json.dumps(asdict(this_process())))
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            file.close()
            raise
        return file


def _is_at(path: Path, file: TextIO) -> bool:
    """Whether an open file is the one that the path names, where any may be removed at any moment."""
    mine = os.fstat(file.fileno())
    try:
        return os.path.samestat(mine, path.stat())
    except FileNotFoundError:
        return False


def _lock(file: TextIO) -> bool | None:
    """Take the kernel's lock: True, or False where another process has it; None where the file system has none."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return None
        raise
    return True


def _keeps(owner: Owner, *, kernel_knows: bool) -> bool:
    """Whether a lock that the kernel does not hold is one all the same."""
    here = this_process()
    if owner.host != here.host:
        return True  # another machine, whose kernel is not asked
    if owner.boot != here.boot:
        return False  # this machine, before it was started again
    return not kernel_knows and owner.is_alive()


def _taken(path: Path, owner: Owner | None) -> ConfigurationError:
    who = (
        "another process" if owner is None else f"process {owner.pid} on {owner.host}, which has it since {owner.since}"
    )
    return ConfigurationError(
        needed=f"the run folder {path.parent} for this process alone",
        given=who,
        remedy="Wait for it or stop it, or choose another name with --set name=...; if it ran on another machine and "
        f"is gone for good, delete {path}.",
    )


def _owner(text: str) -> Owner | None:
    """Who wrote it; None where that is nobody, or the write was cut by the writer's end."""
    try:
        return Owner(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """The 22nd field of the process's line; its second, the name, may hold anything but a last parenthesis."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
