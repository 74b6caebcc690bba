"""A pool of worker processes for everything that may hang, crash or use up memory: user code, math, patterns.

Each item has a deadline and a memory limit. A worker whose item goes over them is killed with every process that it
started, and replaced; the item gets a status, and other items are not affected. There are no signal handlers and no
threads: the thread that calls ``run`` watches the clock.

Processes start with an almost empty environment (``INHERITED``), so that no secret of the caller is in it.

    caller --socket--> worker ... worker        items; a line of JSON back for each
       `----socket--> supervisor, their parent  import a module, fork a worker, kill one with its descendants

Linux only (``/proc``, ``prctl``, pidfd).
"""

import json
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from logitless.errors import ConfigurationError, InputError, UnavailableError
from logitless.own_code import FORMS
from logitless.rewards.workers import worker as worker_script
from logitless.rewards.workers.worker import BUSY_SHARE, LATE_SECONDS, MAX_DEADLINES

OutcomeStatus: TypeAlias = Literal["done", "raised", "timeout", "idle", "crashed", "memory", "orphans"]

Way: TypeAlias = Literal["kept", "fresh", "confined"]
"""Which process an item runs in.

``kept``: a worker that runs further items too. For code of ours and of the standard library that does not execute the
text. ``fresh``: a new fork of a clean process, with the caller's files and network. For functions of users.
``confined``: a new fork in the sandbox of ``confinement``. For libraries that pass a text to ``eval`` or to a parser
built on it.
"""

INHERITED = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "NLTK_DATA", "PATH", "TMPDIR", "TZ")
"""The environment variables that processes inherit: paths and languages, never keys."""

START_SECONDS = 60.0
"""Limit on importing a module, and on forking a worker."""

STOP_SECONDS = 10.0
FIND_LAYERS = "logitless.rewards.workers.confinement:layers"
MAX_LINE_BYTES = 2 * worker_script.MAX_RESULT_CHARACTERS


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one item.

    Args:
        status: ``done``; ``raised`` (an exception, or a value that is not JSON); ``timeout`` (over its deadline by its
            own computing, or by sleeping in a sandbox); ``idle`` (over its deadline with little processor time: it
            waited for something outside, or the machine was busy); ``crashed`` (its process ended); ``memory`` (over
            the limit); ``orphans`` (it returned and left processes running).
        value: the task's return value, through JSON; None unless ``done``.
        message: why there is no value.
        traceback: of the exception, if it raised one.
    """

    status: OutcomeStatus
    value: Any = None
    message: str = ""
    traceback: str = ""


class WorkerPool:
    """Worker processes that call functions on items, each call within its own limits.

    Started by the first ``run`` or ``load``; ended by ``close``, by leaving ``with``, by the garbage collector, or by
    any end of the interpreter. Calls from several threads wait for each other.

    Args:
        workers: number of processes; None for one per usable CPU.
        name: of the processes in ``ps``.

    Raises:
        UnavailableError: not on Linux.
        InputError: fewer than one worker.

    Example:
        >>> with WorkerPool(workers=1) as pool:
        ...     [outcome.value for outcome in pool.run("math:sqrt", [(4.0,), (9.0,)])]
        [2.0, 3.0]
    """

    def __init__(self, workers: int | None = None, name: str = "logitless-rewards") -> None:
        if sys.platform != "linux":
            raise UnavailableError(
                needed="Linux, for worker processes that can be killed reliably",
                given=sys.platform,
                remedy="Run on Linux, or use rewards that need no worker (exact, format, length).",
            )
        if workers is not None and workers < 1:
            raise InputError(needed="at least one worker", given=str(workers), remedy="Raise `workers`.")
        self.num_workers = workers or len(os.sched_getaffinity(0))
        self.counts: Counter[OutcomeStatus] = Counter(dict.fromkeys(get_args(OutcomeStatus), 0))
        self._name = name
        self._lock = threading.Lock()
        self._loaded: list[tuple[str, bool]] = []
        self._processes = _Processes()
        self._workers = self._processes.workers
        weakref.finalize(self, self._processes.end)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the pool; a later ``run`` starts new ones."""
        with self._lock:
            self._processes.end()

    def load(self, *paths: str, call: bool = False) -> None:
        """Import the paths, once for all future workers.

        Args:
            paths: ``package.module:name``.
            call: also call each once, so that workers have its caches filled.

        Raises:
            ConfigurationError: a path cannot be imported or called in time.
            InputError: the pool was made in another process.
        """
        with self._lock:
            self._load(paths, call)

    def run(
        self,
        task: str,
        items: Sequence[tuple[Any, ...]],
        *,
        deadline_seconds: float = 10.0,
        memory_bytes: int = 1 << 30,
        needs: Sequence[str] = (),
        ways: Way | Sequence[Way] = "kept",
        environment: Mapping[str, str] | None = None,
    ) -> list[Outcome]:
        """Call the task on every item; the outcomes, in order.

        Args:
            task: ``package.module:name`` of a function whose result JSON can hold.
            items: one tuple of arguments a call; they must pickle.
            deadline_seconds: wall-clock time for one item, from when its worker starts it. Extended by as much again,
                ``MAX_DEADLINES`` times at most, if the item wants to compute and got little processor time.
            memory_bytes: that each of the item's processes may map beyond what its worker has mapped.
            needs: further paths to import before the first deadline starts.
            ways: one for all items, or one an item.
            environment: further variables of items that are not ``kept``.

        Raises:
            ConfigurationError: the task or one of ``needs`` cannot be imported.
            InputError: an item does not pickle, a limit is not positive, or the pool was made in another process.
            UnavailableError: worker processes cannot be started.
        """
        if not (deadline_seconds > 0 and memory_bytes > 0):
            raise InputError(
                needed="positive limits",
                given=f"deadline_seconds={deadline_seconds}, memory_bytes={memory_bytes}",
                remedy="Raise them.",
            )
        of_items = [ways] * len(items) if isinstance(ways, str) else ways
        added = dict(environment or {})
        frames = [
            _frame(task, way, deadline_seconds, memory_bytes, added, item)
            for way, item in zip(of_items, items, strict=True)
        ]
        if not frames:
            return []
        batch = _Batch(frames, of_items, waiting=deque(range(len(frames))))
        with self._lock:
            self._load((*needs, task))
            if "confined" in of_items:
                self._load((FIND_LAYERS,), call=True)
            try:
                while len(batch.outcomes) < len(batch.frames):
                    self._advance(batch, deadline_seconds)
            except BaseException:
                self._processes.end()
                raise
            outcomes = [batch.outcomes[index] for index in range(len(batch.frames))]
            self.counts.update(outcome.status for outcome in outcomes)
        return outcomes

    def _advance(self, batch: "_Batch", deadline_seconds: float) -> None:
        """Send items to workers, wait for the next event, and handle it."""
        try:
            for worker in [each for each in self._workers if each.item is None]:
                self._receive(worker, batch)  # replaces one that was killed while it waited: no item is to blame
            while len(self._workers) < min(self.num_workers, len(batch.frames)):
                self._workers.append(self._started().spawn())
            batch.suspects -= batch.outcomes.keys()
            if not batch.suspects:
                for worker in self._workers:
                    worker.feed(batch)
            elif all(worker.item is None for worker in self._workers):
                batch.waiting.remove(min(batch.suspects))
                batch.waiting.appendleft(min(batch.suspects))
                self._workers[0].feed(batch)
            for worker in self._wait(deadline_seconds):
                self._receive(worker, batch)
            now = time.monotonic()
            for worker in list(self._workers):
                late = now - worker.granted - self._limit(worker, deadline_seconds)
                if worker.item is not None and late >= 0:
                    self._overdue(worker, batch, deadline_seconds, late)
        except _SupervisorLostError:
            self._recover(batch)

    def _limit(self, worker: "_Worker", deadline_seconds: float) -> float:
        return deadline_seconds if worker.ready else START_SECONDS

    def _wait(self, deadline_seconds: float) -> list["_Worker"]:
        """Wait for workers that send something or end, or for the first deadline; those workers."""
        poll = select.poll()
        by_descriptor: dict[int, _Worker] = {}
        for worker in self._workers:
            poll.register(worker.channel, select.POLLIN | (select.POLLOUT if worker.outgoing else 0))
            poll.register(worker.pidfd, select.POLLIN)
            by_descriptor |= {worker.channel.fileno(): worker, worker.pidfd: worker}
        due = [
            worker.granted + self._limit(worker, deadline_seconds)
            for worker in self._workers
            if worker.item is not None
        ]
        events = poll.poll(max(0.0, min(due) - time.monotonic()) * 1000)
        return list({worker.pid: worker for worker in (by_descriptor[fd] for fd, _ in events)}.values())

    def _receive(self, worker: "_Worker", batch: "_Batch") -> bool:
        """Receive a worker's results, or its end; whether it still runs the same item."""
        before = worker.item, worker.granted
        state = worker.receive(batch)
        if state == "ended":
            self._fail(worker, batch, "crashed", "its process ended")
        elif state == "spent":
            self._started().end(worker.pid)
            self._remove(worker)
        return state == "working" and (worker.item, worker.granted) == before

    def _fail(self, worker: "_Worker", batch: "_Batch", status: OutcomeStatus, why: str) -> None:
        """End a worker; its item gets the status."""
        ended = self._started().end(worker.pid)  # first: if the supervisor is gone, the item is not to blame
        if worker.item is not None:
            batch.outcomes[worker.item] = Outcome(status, message=f"{why} ({ended})")
        self._remove(worker)

    def _overdue(self, worker: "_Worker", batch: "_Batch", deadline_seconds: float, late: float) -> None:
        """Handle an item over its deadline: extend the deadline, or end the worker with ``timeout`` or ``idle``.

        The deadline is extended if the item wants to compute and got little processor time, or if this check comes
        late, so that a busy or suspended machine changes no outcome.
        """
        limit = self._limit(worker, deadline_seconds)
        usage = self._started().usage(worker.pid)
        if not self._receive(worker, batch):  # it was done before the check
            return
        busy = usage.seconds - worker.seconds >= BUSY_SHARE * deadline_seconds
        starved = (worker.ready and usage.running) or late > LATE_SECONDS
        if starved and not (worker.ready and busy) and worker.deadlines < MAX_DEADLINES:
            worker.granted, worker.deadlines = time.monotonic(), worker.deadlines + 1
            return
        assert worker.item is not None, "only an item can be overdue"
        to_blame = busy or (usage.asleep and batch.ways[worker.item] == "confined")
        why = f"over {deadline_seconds:g} s" if worker.ready else f"its worker did not start in {limit:g} s"
        self._fail(worker, batch, "timeout" if to_blame and worker.ready else "idle", why)

    def _remove(self, worker: "_Worker") -> None:
        """Remove a worker that has ended."""
        self._workers.remove(worker)
        worker.close()

    def _recover(self, batch: "_Batch") -> None:
        """After the supervisor was killed, by an item or from outside: try the started items again, one by one.

        If the supervisor ends while one of them runs alone, that item has crashed.
        """
        for worker in self._workers:
            worker.receive(batch)
        begun = [worker.item for worker in self._workers if worker.item is not None]
        if len(begun) == 1 and begun[0] in batch.suspects:
            batch.outcomes[begun.pop()] = Outcome("crashed", message="its supervisor ended")
        batch.waiting.extendleft(begun)
        batch.suspects |= set(begun)
        self._processes.end()
        if batch.recovered_at == (len(batch.outcomes), len(batch.suspects)):
            raise UnavailableError(
                needed="a supervisor of worker processes that stays alive",
                given="one that ended twice without any work done",
                remedy="Look for a memory limit or a process limit of this machine.",
            )
        batch.recovered_at = len(batch.outcomes), len(batch.suspects)

    def _load(self, paths: Sequence[str], call: bool = False) -> None:
        if os.getpid() != self._processes.owner:
            raise InputError(
                needed="a pool made in this process",
                given=f"one of process {self._processes.owner}",
                remedy="Make pools after forking.",
            )
        for path in paths:
            if (path, call) in self._loaded:
                continue
            error = self._import(path, call)
            if error:
                raise ConfigurationError(
                    needed=f"a function that workers can import, as {FORMS}",
                    given=f"{path!r} ({error})",
                    remedy="Correct the path or what its import raises; a module is looked for where Python is started "
                    "and in PYTHONPATH.",
                )
            self._loaded.append((path, call))
            while self._workers:
                worker = self._workers.pop()
                worker.close()
                try:
                    self._started().end(worker.pid)
                except _SupervisorLostError:  # killed from outside; the next call starts another
                    self._processes.end()

    def _import(self, path: str, call: bool) -> str:
        """Have the supervisor import a path; an error message, or an empty string."""
        started_before = self._processes.supervisor is not None
        try:
            return self._started().load(path, call)
        except _SupervisorLostError:
            self._processes.end()
            if started_before:  # it may have been killed from outside since the last request
                return self._import(path, call)
            return f"importing it ends the process or takes over {START_SECONDS:g} s"

    def _started(self) -> "_Supervisor":
        if self._processes.supervisor is None:
            self._processes.supervisor = _Supervisor(self._name)
            for path, call in self._loaded:
                self._processes.supervisor.load(path, call)
        return self._processes.supervisor


def program_pool() -> WorkerPool:
    """The shared pool that runs programs, with the machine's sandbox layers detected."""
    pool = shared_pool("programs")
    pool.load(FIND_LAYERS, call=True)
    return pool


_shared: dict[tuple[int, str], WorkerPool] = {}


def shared_pool(purpose: str = "texts") -> WorkerPool:
    """The pool that all rewards of this process share for one purpose, with one worker per usable CPU.

    Every import makes forks slower, so that purposes with large imports have pools of their own.

    Example:
        >>> shared_pool() is shared_pool("texts"), shared_pool() is shared_pool("programs")
        (True, False)
    """
    key = os.getpid(), purpose
    # Threads that come first at the same time get one pool; `functools.cache` would give each its own.
    return _shared.get(key) or _shared.setdefault(key, WorkerPool(name=f"logitless-{purpose}"))


@dataclass
class _Batch:
    """The items of one ``run``: those that wait, and the outcomes of the others.

    ``suspects`` were running when a supervisor ended: each is tried again alone.
    """

    frames: list[bytes]
    ways: Sequence[Way]
    waiting: deque[int]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    recovered_at: tuple[int, int] | None = None
    suspects: set[int] = field(default_factory=set)


@dataclass(eq=False)
class _Worker:
    """A worker process, seen from the caller: bytes to and from it, and its item.

    ``seconds`` is the processor time that it had used before the item, ``deadlines`` how many deadlines the item has
    been given, and ``granted`` when it got the last.
    """

    pid: int
    pidfd: int
    channel: socket.socket
    granted: float = field(default_factory=time.monotonic)
    ready: bool = False
    seconds: float = 0.0
    deadlines: int = 1
    item: int | None = None
    outgoing: bytearray = field(default_factory=bytearray)
    incoming: bytearray = field(default_factory=bytearray)

    def feed(self, batch: _Batch) -> None:
        """Give the worker an item if it has none, and send what the socket takes."""
        if self.item is None and batch.waiting:
            self.item = batch.waiting.popleft()
            self.outgoing += batch.frames[self.item]
            if self.ready:
                self._begin()
        try:
            while self.outgoing:
                del self.outgoing[: self.channel.send(self.outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self.outgoing.clear()

    def _begin(self) -> None:
        self.granted, self.deadlines = time.monotonic(), 1

    def receive(self, batch: _Batch) -> Literal["working", "spent", "ended"]:
        """Receive results; ``spent``: the worker must be replaced; ``ended``: its process has ended."""
        ended = bool(select.select([self.pidfd], [], [], 0)[0])
        try:
            while len(self.incoming) < MAX_LINE_BYTES:
                data = self.channel.recv(1 << 16)
                if not data:
                    ended = True
                    break
                self.incoming += data
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        *lines, self.incoming = self.incoming.split(b"\n")
        for line in lines:
            if not line and not self.ready:
                self.ready = True
                self._begin()
                continue
            try:
                status, value, trace, reusable, self.seconds = json.loads(line)
                done = status == "done"
                outcome = Outcome("done", value) if done else Outcome(status, message=value, traceback=trace)
            except (ValueError, TypeError):
                return "ended"
            if self.item is None:
                return "ended"
            batch.outcomes[self.item], self.item = outcome, None
            if not reusable:
                return "spent"
        return "ended" if ended or len(self.incoming) >= MAX_LINE_BYTES else "working"

    def close(self) -> None:
        """Close the descriptors."""
        self.channel.close()
        os.close(self.pidfd)


@dataclass(eq=False)
class _Processes:
    """The processes of a pool, in an object of their own that its finalizer can hold."""

    workers: list[_Worker] = field(default_factory=list)
    supervisor: "_Supervisor | None" = None
    owner: int = field(default_factory=os.getpid)

    def end(self) -> None:
        """End all processes; in a fork of the owner, only close the descriptors."""
        for worker in self.workers:
            worker.close()
        self.workers.clear()
        if self.supervisor is not None:
            self.supervisor.stop(ours=os.getpid() == self.owner)
            self.supervisor = None


class _SupervisorLostError(Exception):
    """The supervisor ended, and its workers with it."""


class _Supervisor:
    """The process that imports, forks workers and kills them; each call is one request and one reply."""

    def __init__(self, name: str) -> None:
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", worker_script.__file__, str(other.fileno()), name],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=_environment(),
            )
        self._control.settimeout(2 * START_SECONDS)

    def load(self, path: str, call: bool) -> str:
        """Import a path in the supervisor, and call it if ``call``; an error message, or an empty string."""
        limits = {"seconds": START_SECONDS, "sys_path": [str(p) for p in sys.path]}
        request = {"kind": "load", "path": path, "call": call, **limits}
        return self._reply(request)["error"]

    def spawn(self) -> _Worker:
        """Fork a worker."""
        channel, other = socket.socketpair()
        try:
            with other:
                pid = self._reply({"kind": "spawn"}, [other.fileno()])["pid"]
            channel.setblocking(False)
            return _Worker(pid, os.pidfd_open(pid), channel)
        except ProcessLookupError as error:  # the supervisor ended after its reply, and the worker with it
            channel.close()
            raise _SupervisorLostError from error
        except BaseException:
            channel.close()
            raise

    def end(self, pid: int) -> str:
        """Kill a worker with all processes that it started, and describe how it ended."""
        return self._reply({"kind": "end", "pid": pid})["ended"]

    def usage(self, pid: int) -> worker_script.Usage:
        """Processor time and state of a worker and all processes that it started."""
        return worker_script.Usage(*self._reply({"kind": "usage", "pid": pid})["usage"])

    def stop(self, ours: bool) -> None:
        """Close the control socket, which makes the supervisor kill its workers and end; wait for that if it is ours.

        A supervisor that does not end, for example in a slow import, is killed with its descendants.
        """
        self._control.close()
        if not ours:
            self._process.poll()
            return
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            worker_script.kill_tree(self._process.pid)
            self._process.wait()

    def _reply(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            reply = self._control.recv(1 << 16)
        except OSError as error:
            raise _SupervisorLostError from error
        if not reply:
            raise _SupervisorLostError
        return json.loads(reply)


def _environment() -> dict[str, str]:
    """The environment of the processes."""
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return inherited | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}


def _frame(
    task: str, way: Way, deadline_seconds: float, memory_bytes: int, environment: dict[str, str], item: tuple[Any, ...]
) -> bytes:
    """An item as bytes for a worker: its length, then the fields of ``worker.Item``."""
    try:
        arguments = pickle.dumps(item)
    except Exception as error:
        raise InputError(
            needed="arguments that can be sent to another process",
            given=f"{type(error).__name__}: {error}",
            remedy="Give columns of plain values (text, numbers, lists, mappings).",
        ) from error
    payload = pickle.dumps((task, way, deadline_seconds, memory_bytes, environment, arguments))
    return worker_script.FRAME_HEADER.pack(len(payload)) + payload
