"""What runs inside the processes of ``pool.WorkerPool``: a supervisor, and the workers it forks.

This file is started as a script and imports the standard library only, so that a worker costs a fork and not an
import. The supervisor imports what the tasks need once; workers are its copies. Every process that a task starts, also
one that leaves its session or outlives its parent, stays below the supervisor in the process tree (``PR_SET_CHILD_
SUBREAPER``), which is how it is found and killed. Linux only.

An item runs in one of three ways. ``kept``: in the worker, which goes on to the next item. ``fresh``: in a fork of the
worker, which has run no such item itself and only hands the result on, so that nothing an item does to its process
reaches another item. ``confined``: the same in the sandbox of ``confinement.confine_grader``.
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
"""An item that had the processor for this share of its deadline is itself to blame for missing it."""
MAX_DEADLINES = 10
"""How many times its deadline an item may take that wants to compute and gets less than that share."""
LATE_SECONDS = 0.1
"""Who looks at a deadline so much after it has not had the processor itself, and the item perhaps neither."""
LOOKS = 8
"""How many times within its deadline an item in a sandbox is looked at, more or less, to see whether it sleeps."""
MOST_THREADS = 64
"""Of a process that are looked at: an item may have so many that one of them runs in the time that a look takes."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
WANTING = {"R", "D"}
"""States of a thread that runs or waits for the processor, and that waits for a disk."""
_CHANCE = random.SystemRandom()  # which a fork cannot foresee: of any other it would have a copy


def supervise(control: socket.socket) -> None:
    """Answer one request after the other (load, spawn, kill) until the pool closes its end; then kill all workers."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _LIBC.prctl(_PR_SET_DUMPABLE, 0)  # nobody but root reads or debugs this process and its forks
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
    from logitless.own_code import imported  # not before this script knows where modules are, see `_load`

    found: Callable[..., Any] = imported(path)
    if not callable(found):
        raise TypeError(f"a value of type {type(found).__name__}, which cannot be called")
    return found


def _load(request: dict[str, Any]) -> str:
    """Import what a path names; why it cannot, or nothing.

    An import that never ends is ended by the alarm's default action, and this process with it.
    """
    sys.path[:] = request["sys_path"]
    importlib.invalidate_caches()
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    try:
        found = resolve(request["path"])
        if request["call"]:
            found()
        gc.freeze()  # or a collection in a fork would copy every page
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
    """Run one item after the other, a line of JSON each, until the pool closes its end or an item left a trace."""
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
                    return  # a child that the item forked came back from it
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
    """What the pool sends: whose function, how it runs, within what limits, and its arguments."""

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
    """Status, the value or the reason as JSON, and the traceback of one item."""
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
    """The same of an item that may do anything to its process: what comes back from that is not trusted."""
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
    said = _said(reading, pid, sleep)
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it has said what it had to say, or too much
    _, status = os.waitpid(pid, 0)
    if sleep is not None and sleep.is_over:
        return "timeout", json.dumps(f"it slept for {item.deadline_seconds:g} s"), ""
    try:
        first, second, third = json.loads(said)
        if first in ("done", "raised", "memory"):
            json.loads(second)
            return first, second.replace("\n", " "), str(third)[:MAX_TRACEBACK_CHARACTERS]
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    return "crashed", json.dumps(f"its process ended ({_ending(status)})"), ""


class _Forked:
    """Which process an item was given, so that a fork that the item makes says nothing in its place."""

    pid = 0


def _become_an_item(item: Item, channel: socket.socket) -> None:
    """In the fork: let go of everything but the pipe, and enter the sandbox."""
    _Forked.pid = os.getpid()
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(channel.detach())
    os.environ.update(item.environment)
    if item.way == "confined":
        resolve(CONFINE)()


def _said(reading: int, pid: int, sleep: "Sleep | None") -> bytes:
    """A line from the item, or what there is of it when its process ends, sleeps too long or goes over the bounds."""
    said = b""
    descriptor = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    poll.register(descriptor, select.POLLIN)
    try:
        while not said.endswith(b"\n") and len(said) < 4 * MAX_RESULT_CHARACTERS:
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
            said += data
    finally:
        os.close(descriptor)
    return said


def _described(error: BaseException, with_line: bool = False) -> str:
    try:
        if with_line:
            from logitless.own_code import described

            return described(error)[:MAX_MESSAGE_CHARACTERS]
        return f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARACTERS]
    except BaseException:
        return f"{type(error).__name__}, which cannot be printed"


def _traceback(error: BaseException) -> str:
    """Of an item's own code: the calls that led there from this folder are left out."""
    try:
        calls = error.__traceback__
        while calls is not None and calls.tb_next is not None and _is_here(calls.tb_frame.f_code.co_filename):
            calls = calls.tb_next
        text = "".join(traceback.format_exception(type(error), error, calls))
        return text[-MAX_TRACEBACK_CHARACTERS:]
    except BaseException:
        return ""


def _is_here(file: str) -> bool:
    return os.path.dirname(file) == os.path.dirname(__file__)  # noqa: PTH120


def _mapped_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123
        return int(file.read().split(b" ", 1)[0]) * _PAGE_BYTES


def _has_live_children() -> bool:
    """Whether a child still runs after a moment's grace; ended ones are collected.

    The moment begins anew, some times, where a child wants to compute and has not been let: it may be about to end.
    """
    patience, more = time.monotonic() + CHILD_GRACE_SECONDS, MORE_GRACE
    try:
        while True:
            late = time.monotonic() > patience
            not_let = late and any(_was_not_let(pid) for pid in _children())
            if os.waitpid(-1, os.WNOHANG) == (0, 0):  # after the look, during which it may have ended
                if late:
                    if not more or not not_let:
                        return True
                    patience, more = time.monotonic() + CHILD_GRACE_SECONDS, more - 1
                time.sleep(0.002)
    except ChildProcessError:
        return False


def _was_not_let(pid: int) -> bool:
    seen = usage(pid)
    return seen.running and seen.seconds < CHILD_GRACE_SECONDS / 2


def _end(pid: int, workers: set[int]) -> str:
    """Kill a worker with all that it started; say how it had ended, if it had."""
    kill_tree(pid)
    _, status = os.waitpid(pid, 0)
    end_children(spared=frozenset(workers))
    return _ending(status)


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.WEXITSTATUS(status)}"


class Usage(NamedTuple):
    """What a process and its descendants have had of the processor; whether a thread of them wants it, or all sleep."""

    seconds: float
    running: bool
    asleep: bool


def usage(root: int) -> Usage:
    """Read it from ``/proc``; nothing used where the process is gone."""
    found = _processes()
    tree = _tree(root, {pid: entry.parent for pid, entry in found.items()}) & found.keys()
    states = "".join(_states(pid) for pid in tree)
    asleep = _is_asleep(states)
    return Usage(sum(found[pid].seconds for pid in tree), bool(states) and not asleep, asleep)


def _is_asleep(states: str) -> bool:
    """Whether there is a thread and none wants to compute; one that was stopped, by itself or another, does not."""
    return bool(states) and not set(states) & WANTING


class Sleep:
    """For how long an item has slept, as looks at moments show that it cannot foresee.

    At its deadline alone an item could show itself running. Each look speaks for the pause before it, so that none is
    found to have slept longer than it has been there; one that comes late speaks for nothing, for the machine may have
    stood still in between.

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
        self._pause = _CHANCE.uniform(0, 2 * self._most / LOOKS)
        self._due = self._clock() + self._pause

    @property
    def seconds_to_look(self) -> float:
        """Until the next look; 0 where it is due."""
        return max(0.0, self._due - self._clock())

    @property
    def is_over(self) -> bool:
        """Whether it has slept as long as it may."""
        return self.seconds >= self._most

    def look(self, is_asleep: Callable[[], bool]) -> None:
        """See what it does now, and plan the next look."""
        in_time = self._clock() <= self._due + LATE_SECONDS
        if is_asleep() and in_time:
            self.seconds += self._pause
        self._plan()


def end_children(spared: frozenset[int] = frozenset()) -> None:
    """Kill and collect every child of this process but the spared ones, orphans that it has inherited included."""
    while children := [pid for pid in _children() if pid not in spared]:
        for pid in children:
            kill_tree(pid)
            os.waitpid(pid, 0)


def kill_tree(root: int) -> None:
    """Kill a process and its descendants: stop all first, until a look finds no new one, so that none escapes."""
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
    """Parent of every process of this machine."""
    return {pid: entry.parent for pid, entry in _processes().items()}


class _Process(NamedTuple):
    parent: int
    seconds: float


def _processes() -> dict[int, _Process]:
    """Every process of this machine, with the processor time of it and of the children that it has collected."""
    found = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if entry.isdigit():
            with contextlib.suppress(OSError):
                _, parent, *rest = _stat(f"/proc/{entry}")
                found[int(entry)] = _Process(int(parent), sum(map(int, rest[9:13])) / _TICKS)
    return found


def _states(pid: int) -> str:
    """A letter for each thread of a process; none where it is gone."""
    states = ""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/task") as threads:
        for thread in itertools.islice(threads, MOST_THREADS):
            with contextlib.suppress(OSError):
                states += _stat(thread.path)[0]
    return states


def _stat(place: str) -> list[str]:
    """What the kernel says of a process or a thread, from its state on."""
    with open(f"{place}/stat", "rb") as file:  # noqa: PTH123
        return file.read().decode(errors="replace").rpartition(")")[2].split()


if __name__ == "__main__":
    supervise(socket.socket(fileno=int(sys.argv[1])))
