"""Attempts to get out of a sandbox, made from inside: all must fail.

Runs as a function in a grader's process, and as a program; it imports the standard library only.
"""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence


def reached(pids: Sequence[int], port: int, secret: str, folders: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """The kinds of attempts that succeed.

    Args:
        pids: processes outside.
        port: where one of them listens on the loopback interface.
        secret: a file that the process has no business with.
        folders: where it may not write.
        kinds: which attempts to make, of ``memory``, ``secrets``, ``network``, ``files``, ``processes``, ``signals``.
    """
    others = [pid for pid in pids if pid != os.getpid()]  # in a PID namespace this process may have an equal number
    attempts: dict[str, Sequence[Callable[[], None]]] = {
        "memory": [lambda place=place: _read(place) for pid in others for place in _memory(pid)],  # type: ignore[misc]
        "secrets": [lambda: _read(secret)],
        "network": [lambda: _connect(port)],
        "files": [lambda folder=folder: _write(folder) for folder in folders],  # type: ignore[misc]
        "processes": [_fork],
        "signals": [lambda pid=pid: os.kill(pid, 0) for pid in others],  # type: ignore[misc]
    }
    return [kind for kind in kinds if any(map(_works, attempts[kind]))]


def _works(attempt: Callable[[], None]) -> bool:
    with contextlib.suppress(OSError):
        attempt()
        return True
    return False


def _memory(pid: int) -> tuple[str, ...]:
    return f"/proc/{pid}/mem", f"/proc/{pid}/environ", f"/proc/{pid}/maps"


def _read(place: str) -> None:
    os.close(os.open(place, os.O_RDONLY))


def _connect(port: int) -> None:
    with socket.socket() as client:
        client.settimeout(1)
        client.connect(("127.0.0.1", port))


def _write(folder: str) -> None:
    place = f"{folder}/logitless-spy-{os.getpid()}"
    os.close(os.open(place, os.O_WRONLY | os.O_CREAT, 0o600))
    os.unlink(place)  # noqa: PTH108


def _fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    print(json.dumps(reached(*json.loads(sys.stdin.read()))))
