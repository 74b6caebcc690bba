"""The processes of ``pool.WorkerPool``: a supervisor, and the workers that it forks.

This file is started as a script and imports the standard library only, so that a worker costs a fork and no import. The
supervisor imports the tasks' modules once; workers are forks of it. Every process that a task starts stays below the
supervisor in the process tree (``PR_SET_CHILD_SUBREAPER``), even if it leaves its session or outlives its parent, so
that it is found and killed. Linux only.

An item runs in one of three ways. ``kept``: in the worker, which runs the next item too. ``fresh``: in a fork of the
worker, which itself runs no such item, so that an item cannot affect the process of another. ``confined``: the same in
the sandbox of ``confinement.confine_grader``.
"""

import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import os
import pickle
import random
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

FRAME_HEADER = struct.Struct("!I")
MAX_RESULT_CHARACTERS = 1 << 20
MAX_MESSAGE_CHARACTERS = 500
MAX_TRACEBACK_CHARACTERS = 4000
CONFINE = "logitless.rewards.workers.confinement:confine_grader"
CHILD_GRACE_SECONDS = 0.1
MORE_GRACE = 20
BUSY_SHARE = 0.5
"""An item that used this share of its deadline in processor time is to blame for missing the deadline."""
MAX_DEADLINES = 10
"""How often the deadline of an item is extended that wants to compute and got less than that share."""
LATE_SECONDS = 0.1
"""If a deadline is checked this late, the machine was busy or suspended, and the item may not have run either."""
LOOKS = 8
"""Average number of times within its deadline that an item in a sandbox is checked for sleeping."""
MOST_THREADS = 64
"""Threads of a process that are looked at: with enough of them one would run while the others are read."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
WANTING = {"R", "D"}
"""States of a thread that runs or waits for the processor (R), or waits for a disk (D)."""
_RANDOM = random.SystemRandom()  # a fork would have a copy of any other generator, and could predict it


def supervise(control: socket.socket) -> None:
    """Answer requests (load, spawn, usage, end) until the pool closes its end; then kill all workers."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _LIBC.prctl(_PR_SET_DUMPABLE, 0)  # only root can read or debug this process and its forks
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
            elif request["kind"] == "usage":
                reply = {"usage": usage(request["pid"])}
            else:
                workers.discard(request["pid"])
                reply = {"ended": _end(request["pid"], workers)}
            control.sendall(json.dumps(reply).encode())
    finally:
        end_children()


def resolve(path: str) -> Callable[..., Any]:
    """The function that ``package.module:name`` or ``folder/file.py:name`` names."""
    from logitless.own_code import imported  # `_load` must have set sys.path first

    found: Callable[..., Any] = imported(path)
    if not callable(found):
        raise TypeError(f"a value of type {type(found).__name__}, which cannot be called")
    return found


def _load(request: dict[str, Any]) -> str:
    """Import a path; an error message, or an empty string."""
    sys.path[:] = request["sys_path"]
    importlib.invalidate_caches()
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])  # an import that never ends is killed, with this process
    try:
        found = resolve(request["path"])
        if request["call"]:
            found()
        gc.freeze()  # a garbage collection in a fork would copy every page
        return ""
    except BaseException as error:
        return _described(error, with_line=True)
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
    """Run items, and reply to each with a line of JSON, until the pool closes its end or this process is not reusable.

    The line is [status, value or message, traceback, whether this process is reusable, processor seconds].
    """
    functions: dict[str, Callable[..., Any]] = {}
    worker, threads = os.getpid(), threading.active_count()
    mapped = mapped_at_first = _mapped_bytes()
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    with channel.makefile("rb") as incoming:
        channel.sendall(b"\n")
        while frame := _frame(incoming):
            item = Item(*pickle.loads(frame))
            limit = mapped + item.memory_bytes
            if item.way == "kept":
                line = _run(functions, item, limit)
                if os.getpid() != worker:
                    return  # this is a child that the item forked, and that returned from it
                signal.setitimer(signal.ITIMER_REAL, 0)
            else:
                line = _run_in_a_fork(functions, item, limit, channel)
            status = line[0]
            if _has_live_children():
                end_children()
                status, line = "orphans", ("orphans", json.dumps("it left processes running"), "")
            if item.way == "kept":
                mapped = _mapped_bytes()
            reusable = item.way != "kept" or (
                status not in ("memory", "orphans")
                and threading.active_count() <= threads
                and mapped <= mapped_at_first + item.memory_bytes
                and resource.getrlimit(resource.RLIMIT_AS) == unlimited
            )
            times = os.times()
            seconds = times.user + times.system + times.children_user + times.children_system
            rest = f"{json.dumps(line[2])},{'true' if reusable else 'false'},{seconds:.3f}"
            channel.sendall(f'["{status}",{line[1]},{rest}]\n'.encode())
            if not reusable:
                return


class Item(NamedTuple):
    """An item as the pool sends it: a function's path, the way to run it, limits, and its pickled arguments."""

    path: str
    way: str
    deadline_seconds: float
    memory_bytes: int
    environment: dict[str, str]
    arguments: bytes


def _frame(incoming: BinaryIO) -> bytes:
    header = incoming.read(FRAME_HEADER.size)
    return incoming.read(FRAME_HEADER.unpack(header)[0]) if header else b""


def _run(functions: dict[str, Callable[..., Any]], item: Item, mapped_limit: int) -> tuple[str, str, str]:
    """(status, value or error message as JSON, traceback) of one item."""
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    try:
        try:
            if item.path not in functions:
                functions[item.path] = resolve(item.path)
            resource.setrlimit(resource.RLIMIT_AS, (mapped_limit, unlimited[1]))
            text = json.dumps(functions[item.path](*pickle.loads(item.arguments)), allow_nan=False)
        finally:
            with contextlib.suppress(ValueError):
                resource.setrlimit(resource.RLIMIT_AS, unlimited)
    except MemoryError:
        return "memory", json.dumps("it went over its memory limit"), ""
    except BaseException as error:
        return "raised", json.dumps(_described(error)), _traceback(error)
    if len(text) > MAX_RESULT_CHARACTERS:
        return "raised", json.dumps(f"it returned {len(text)} characters, over {MAX_RESULT_CHARACTERS}"), ""
    return "done", text, ""


def _run_in_a_fork(
    functions: dict[str, Callable[..., Any]], item: Item, mapped_limit: int, channel: socket.socket
) -> tuple[str, str, str]:
    """``_run`` in a fork. The item may have taken the fork over, so its reply is not trusted."""
    if item.path not in functions:
        functions[item.path] = resolve(item.path)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _become_an_item(item, channel)
            message = json.dumps(_run(functions, item, mapped_limit)).encode() + b"\n"
            if os.getpid() == _Forked.pid:
                while message:
                    message = message[os.write(writing, message) :]
        finally:
            os._exit(0)
    os.close(writing)
    sleep = Sleep(item.deadline_seconds) if item.way == "confined" else None
    line = _read_line(reading, pid, sleep)
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if sleep is not None and sleep.is_over:
        return "timeout", json.dumps(f"it slept for {item.deadline_seconds:g} s"), ""
    try:
        reported, value, trace = json.loads(line)
        if reported in ("done", "raised", "memory"):
            json.loads(value)
            return reported, value.replace("\n", " "), str(trace)[:MAX_TRACEBACK_CHARACTERS]
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    return "crashed", json.dumps(f"its process ended ({_ending(status)})"), ""


class _Forked:
    """The process that runs an item: a child that the item forks must not reply for it."""

    pid = 0


def _become_an_item(item: Item, channel: socket.socket) -> None:
    """In the fork: close the worker's channel, set the environment, and enter the sandbox."""
    _Forked.pid = os.getpid()
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(channel.detach())
    os.environ.update(item.environment)
    if item.way == "confined":
        resolve(CONFINE)()


def _read_line(reading: int, pid: int, sleep: "Sleep | None") -> bytes:
    """A line from the item; incomplete if its process ends, sleeps too long or writes too much."""
    line = b""
    descriptor = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    poll.register(descriptor, select.POLLIN)
    try:
        while not line.endswith(b"\n") and len(line) < 4 * MAX_RESULT_CHARACTERS:
            ready = [fd for fd, _ in poll.poll(None if sleep is None else 1000 * sleep.seconds_to_look)]
            if sleep is not None and not ready:
                sleep.look(lambda: _is_asleep(_states(pid)))
                if sleep.is_over:
                    break
                continue
            data = os.read(reading, 1 << 16) if reading in ready else b""
            if not data:
                if descriptor in ready:
                    break
                poll.unregister(reading)
            line += data
    finally:
        os.close(descriptor)
    return line


def _described(error: BaseException, with_line: bool = False) -> str:
    try:
        if with_line:
            from logitless.own_code import described

            return described(error)[:MAX_MESSAGE_CHARACTERS]
        return f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARACTERS]
    except BaseException:
        return f"{type(error).__name__}, which cannot be printed"


def _traceback(error: BaseException) -> str:
    """The traceback of an error, without the calls in this folder."""
    try:
        calls = error.__traceback__
        folder = os.path.dirname(__file__)  # noqa: PTH120
        while calls is not None and calls.tb_next is not None:
            if os.path.dirname(calls.tb_frame.f_code.co_filename) != folder:  # noqa: PTH120
                break
            calls = calls.tb_next
        text = "".join(traceback.format_exception(type(error), error, calls))
        return text[-MAX_TRACEBACK_CHARACTERS:]
    except BaseException:
        return ""


def _mapped_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123
        return int(file.read().split(b" ", 1)[0]) * _PAGE_BYTES


def _has_live_children() -> bool:
    """Whether a child still runs after a grace period; ended ones are collected.

    The period is extended, ``MORE_GRACE`` times at most, while a child wants to compute and gets no processor time: it
    may be about to end.
    """
    end, extensions = time.monotonic() + CHILD_GRACE_SECONDS, MORE_GRACE
    try:
        while True:
            late = time.monotonic() > end
            starved = late and any(_is_starved(pid) for pid in _children())
            if os.waitpid(-1, os.WNOHANG) == (0, 0):  # after `_is_starved`, during which a child may have ended
                if late:
                    if not extensions or not starved:
                        return True
                    end, extensions = time.monotonic() + CHILD_GRACE_SECONDS, extensions - 1
                time.sleep(0.002)
    except ChildProcessError:
        return False


def _is_starved(pid: int) -> bool:
    used = usage(pid)
    return used.running and used.seconds < CHILD_GRACE_SECONDS / 2


def _end(pid: int, workers: set[int]) -> str:
    """Kill a worker with all processes that it started, and describe how it ended."""
    kill_tree(pid)
    _, status = os.waitpid(pid, 0)
    end_children(spared=frozenset(workers))
    return _ending(status)


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.WEXITSTATUS(status)}"


class Usage(NamedTuple):
    """Processor time of a process and its descendants; whether a thread of them wants to run, or all sleep."""

    seconds: float
    running: bool
    asleep: bool


def usage(root: int) -> Usage:
    """Read it from ``/proc``; 0 seconds if the process is gone."""
    found = _processes()
    tree = _tree(root, {pid: entry.parent for pid, entry in found.items()}) & found.keys()
    states = "".join(_states(pid) for pid in tree)
    asleep = _is_asleep(states)
    return Usage(sum(found[pid].seconds for pid in tree), bool(states) and not asleep, asleep)


def _is_asleep(states: str) -> bool:
    """Whether there are threads and none wants to run; a stopped thread does not."""
    return bool(states) and not set(states) & WANTING


class Sleep:
    """Estimates how long an item has slept, by looking at it at random times.

    Random, because an item could run at a time that it can predict. If an item sleeps at a look, the whole pause before
    the look counts as sleep. A late look counts nothing: the machine may have been suspended.

    Args:
        most_seconds: that it may sleep.
        clock: in seconds.

    Attributes:
        seconds: that it slept.
    """

    def __init__(self, most_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock, self.seconds = most_seconds, clock, 0.0
        self._plan()

    def _plan(self) -> None:
        self._pause = _RANDOM.uniform(0, 2 * self._most / LOOKS)
        self._due = self._clock() + self._pause

    @property
    def seconds_to_look(self) -> float:
        """Seconds until the next look; 0 if it is due."""
        return max(0.0, self._due - self._clock())

    @property
    def is_over(self) -> bool:
        """Whether it has slept as long as it may."""
        return self.seconds >= self._most

    def look(self, is_asleep: Callable[[], bool]) -> None:
        """Look at the item, and plan the next look."""
        in_time = self._clock() <= self._due + LATE_SECONDS
        if is_asleep() and in_time:
            self.seconds += self._pause
        self._plan()


def end_children(spared: frozenset[int] = frozenset()) -> None:
    """Kill and collect every child of this process except the spared ones, inherited orphans included."""
    while children := [pid for pid in _children() if pid not in spared]:
        for pid in children:
            kill_tree(pid)
            os.waitpid(pid, 0)


def kill_tree(root: int) -> None:
    """Kill a process and its descendants. All are stopped first, until none is new, so that none escapes by forking."""
    stopped: set[int] = set()
    while new := _tree(root, _parents()) - stopped:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    return [pid for pid, parent in _parents().items() if parent == os.getpid()]


def _tree(root: int, parents: dict[int, int]) -> set[int]:
    tree = {root}
    while below := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= below
    return tree


def _parents() -> dict[int, int]:
    """The parent of every process of this machine."""
    return {pid: entry.parent for pid, entry in _processes().items()}


class _Process(NamedTuple):
    parent: int
    seconds: float


def _processes() -> dict[int, _Process]:
    """Every process of this machine; seconds include its collected children."""
    found = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if entry.isdigit():
            with contextlib.suppress(OSError):
                _, parent, *rest = _stat(f"/proc/{entry}")
                found[int(entry)] = _Process(int(parent), sum(map(int, rest[9:13])) / _TICKS)
    return found


def _states(pid: int) -> str:
    """The state letters of a process's threads; empty if it is gone."""
    states = ""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/task") as threads:
        for thread in itertools.islice(threads, MOST_THREADS):
            with contextlib.suppress(OSError):
                states += _stat(thread.path)[0]
    return states


def _stat(place: str) -> list[str]:
    """Fields of ``/proc/.../stat`` of a process or a thread, from the state on."""
    with open(f"{place}/stat", "rb") as file:  # noqa: PTH123
        return file.read().decode(errors="replace").rpartition(")")[2].split()


if __name__ == "__main__":
    supervise(socket.socket(fileno=int(sys.argv[1])))
