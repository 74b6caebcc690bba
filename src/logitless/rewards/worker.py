"""What runs inside the processes of ``pool.WorkerPool``: a supervisor, and the workers it forks.

This file is started as a script and imports the standard library only, so that a worker costs a fork and not an
import. The supervisor imports what the tasks need once; workers are its copies. Every process that a task starts, also
one that leaves its session or outlives its parent, stays below the supervisor in the process tree (``PR_SET_CHILD_
SUBREAPER``), which is how it is found and killed. Linux only.
"""

import contextlib
import ctypes
import importlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

FRAME_HEADER = struct.Struct("!I")
MAX_RESULT_CHARACTERS = 1 << 20
MAX_MESSAGE_CHARACTERS = 500
CHILD_GRACE_SECONDS = 0.1

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def supervise(control: socket.socket) -> None:
    """Answer one request after the other (load, spawn, kill) until the pool closes its end; then kill all workers."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    workers: set[int] = set()
    try:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 1)
            if not message:
                return
            request = json.loads(message)
            if request["kind"] == "spawn":
                pid = _fork_worker(descriptors[0], control)
                os.close(descriptors[0])
                workers.add(pid)
                reply: dict[str, Any] = {"pid": pid}
            elif request["kind"] == "load":
                reply = {"error": _load(request)}
            else:
                workers.discard(request["pid"])
                reply = {"ended": _end(request["pid"], workers)}
            control.sendall(json.dumps(reply).encode())
    finally:
        end_children()


def resolve(path: str) -> Callable[..., Any]:
    """The object that ``package.module:name`` or ``package.module:name.attribute`` names."""
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    if not callable(found):
        raise TypeError(f"{path} is a {type(found).__name__}, which cannot be called")
    return found


def _load(request: dict[str, Any]) -> str:
    """Import what a path names; why it cannot, or nothing.

    An import that never ends is ended by the alarm's default action, and this process with it.
    """
    sys.path[:] = request["sys_path"]
    importlib.invalidate_caches()
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    try:
        resolve(request["path"])
        return ""
    except BaseException as error:
        return _described(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _fork_worker(descriptor: int, control: socket.socket) -> int:
    supervisor = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        control.close()
        os.setsid()
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if os.getppid() == supervisor:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            _work(socket.socket(fileno=descriptor))
    finally:
        os._exit(0)


def _work(channel: socket.socket) -> None:
    """Run one item after the other, a line of JSON each, until the pool closes its end or an item left a trace."""
    functions: dict[str, Callable[..., Any]] = {}
    worker, threads = os.getpid(), threading.active_count()
    mapped = mapped_at_first = _mapped_bytes()
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    with channel.makefile("rb") as incoming:
        channel.sendall(b"\n")
        while frame := _frame(incoming):
            path, memory_bytes, arguments = pickle.loads(frame)
            status, text = _run(functions, path, mapped + memory_bytes, arguments)
            if os.getpid() != worker:
                return  # a child that the item forked came back from it
            signal.setitimer(signal.ITIMER_REAL, 0)
            if _has_live_children():
                status, text = "orphans", json.dumps("it left processes running")
            mapped = _mapped_bytes()
            reusable = (
                status not in ("memory", "orphans")
                and threading.active_count() <= threads
                and mapped <= mapped_at_first + memory_bytes
                and resource.getrlimit(resource.RLIMIT_AS) == unlimited
            )
            channel.sendall(f'["{status}",{text},{"true" if reusable else "false"}]\n'.encode())
            if not reusable:
                return


def _frame(incoming: BinaryIO) -> bytes:
    header = incoming.read(FRAME_HEADER.size)
    return incoming.read(FRAME_HEADER.unpack(header)[0]) if header else b""


def _run(functions: dict[str, Callable[..., Any]], path: str, mapped_limit: int, arguments: bytes) -> tuple[str, str]:
    """Status and, as JSON, the value or the reason of one item."""
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    try:
        try:
            if path not in functions:
                functions[path] = resolve(path)
            resource.setrlimit(resource.RLIMIT_AS, (mapped_limit, unlimited[1]))
            text = json.dumps(functions[path](*pickle.loads(arguments)), allow_nan=False)
        finally:
            with contextlib.suppress(ValueError):
                resource.setrlimit(resource.RLIMIT_AS, unlimited)
    except MemoryError:
        return "memory", json.dumps("it went over its memory limit")
    except BaseException as error:
        return "raised", json.dumps(_described(error))
    if len(text) > MAX_RESULT_CHARACTERS:
        return "raised", json.dumps(f"it returned {len(text)} characters, over {MAX_RESULT_CHARACTERS}")
    return "done", text


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARACTERS]
    except BaseException:
        return f"{type(error).__name__}, which cannot be printed"


def _mapped_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123
        return int(file.read().split(b" ", 1)[0]) * _PAGE_BYTES


def _has_live_children() -> bool:
    """Whether a child still runs after a moment's grace; ended ones are collected."""
    patience = time.monotonic() + CHILD_GRACE_SECONDS
    try:
        while True:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                if time.monotonic() > patience:
                    return True
                time.sleep(0.002)
    except ChildProcessError:
        return False


def _end(pid: int, workers: set[int]) -> str:
    """Kill a worker with all that it started; say how it had ended, if it had."""
    _kill_tree(pid)
    _, status = os.waitpid(pid, 0)
    end_children(spared=frozenset(workers))
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.WEXITSTATUS(status)}"


def end_children(spared: frozenset[int] = frozenset()) -> None:
    """Kill and collect every child of this process but the spared ones, orphans that it has inherited included."""
    while children := [pid for pid, parent in _parents().items() if parent == os.getpid() and pid not in spared]:
        for pid in children:
            _kill_tree(pid)
            os.waitpid(pid, 0)


def _kill_tree(root: int) -> None:
    """Kill a process and its descendants: stop all first, until a look finds no new one, so that none escapes."""
    stopped: set[int] = set()
    while True:
        parents = _parents()
        tree = {root}
        grown = True
        while grown:
            below = {pid for pid, parent in parents.items() if parent in tree} - tree
            tree |= below
            grown = bool(below)
        new = tree - stopped
        if not new:
            break
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _parents() -> dict[int, int]:
    """Parent of every process of this machine."""
    found = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:  # noqa: PTH123
                found[int(entry)] = int(file.read().rpartition(b")")[2].split()[1])
    return found


if __name__ == "__main__":
    supervise(socket.socket(fileno=int(sys.argv[1])))
