"""One pool of worker processes for everything that may hang, crash or eat memory: user code, math, patterns.

Each item has a deadline and a memory limit of its own. A worker that misses them is killed with every process it
started, and replaced; the item gets a status and the others never notice. No signal handler, no thread: the thread
that calls ``run`` watches the clock.

    caller --socket--> worker ... worker        items, and a line of JSON back for each
       `----socket--> supervisor, their parent  import a module, fork a worker, kill one with its descendants

Workers see the files and the network of the caller: this bounds accidents, it is not a security boundary.
Gives up: anything but Linux (``/proc``, ``prctl``, pidfd).
"""

import functools
import json
import math
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from logitless.errors import ConfigurationError, InputError, UnavailableError
from logitless.rewards import worker as worker_script

OutcomeStatus: TypeAlias = Literal["done", "raised", "timeout", "crashed", "memory", "orphans"]

QUEUED_PER_WORKER = 8
QUICK_SECONDS = 0.01
PATIENCE_SECONDS = 0.1
STOP_SECONDS = 2.0
MAX_LINE_BYTES = 2 * worker_script.MAX_RESULT_CHARACTERS


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one item.

    Args:
        status: ``done``; ``raised`` (an exception, or a value that is not JSON); ``timeout``; ``crashed`` (its process
            ended); ``memory`` (over the limit); ``orphans`` (it returned and left processes running).
        value: what the task returned, through JSON; None unless ``done``.
        message: why there is no value.

    Example:
        >>> Outcome("timeout", message="over 2 s").value is None
        True
    """

    status: OutcomeStatus
    value: Any = None
    message: str = ""


class WorkerPool:
    """Worker processes that run named functions on items, each within its own limits.

    Started by the first ``run`` or ``load``; ended by ``close``, by leaving ``with``, by the garbage collector, or
    when the interpreter ends, however it ends. Calls from several threads wait for each other.

    Args:
        workers: number of processes; None for one per usable CPU.
        start_seconds: limit on importing a module, and on forking a worker.

    Raises:
        UnavailableError: not on Linux.
        InputError: fewer than one worker.

    Example:
        >>> with WorkerPool(workers=1) as pool:
        ...     [outcome.value for outcome in pool.run("math:sqrt", [(4.0,), (9.0,)])]
        [2.0, 3.0]
    """

    def __init__(self, workers: int | None = None, start_seconds: float = 60.0) -> None:
        if sys.platform != "linux":
            raise UnavailableError(
                needed="Linux, for worker processes that die on time",
                given=sys.platform,
                remedy="Run on Linux, or use rewards that need no worker (exact, format, length).",
            )
        if workers is not None and workers < 1:
            raise InputError(needed="at least one worker", given=str(workers), remedy="Raise `workers`.")
        self.num_workers = workers or len(os.sched_getaffinity(0))
        self.counts: Counter[OutcomeStatus] = Counter(dict.fromkeys(get_args(OutcomeStatus), 0))
        self._start_seconds = start_seconds
        self._lock = threading.Lock()
        self._loaded: list[str] = []
        self._processes = _Processes()
        self._workers = self._processes.workers
        weakref.finalize(self, self._processes.end)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the pool; a later ``run`` starts it anew."""
        with self._lock:
            self._processes.end()

    def load(self, *paths: str) -> None:
        """Import what the paths name, once and for all workers to come.

        Args:
            paths: ``package.module:name``.

        Raises:
            ConfigurationError: a path cannot be imported or called, or its import does not end.
            InputError: the pool was made in another process.
        """
        with self._lock:
            self._load(paths)

    def run(
        self,
        task: str,
        items: Sequence[tuple[Any, ...]],
        *,
        deadline_seconds: float = 10.0,
        memory_bytes: int = 1 << 30,
        needs: Sequence[str] = (),
    ) -> list[Outcome]:
        """Call the task on every item and say what became of each, in order.

        Args:
            task: ``package.module:name`` of a function whose result survives JSON.
            items: one tuple of arguments a call; they must pickle.
            deadline_seconds: wall clock for one item, from the moment its worker turns to it.
            memory_bytes: what one item may map beyond what its worker has mapped already, in each of its processes.
            needs: further paths to import before the first deadline starts.

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
        batch = _Batch([_frame(task, memory_bytes, item) for item in items])
        with self._lock:
            self._load((task, *needs))
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
        """Hand out items, wait for the next event, and deal with it."""
        try:
            while len(self._workers) < min(self.num_workers, len(batch.frames)):
                self._workers.append(self._started().spawn())
            share = max(1, min(QUEUED_PER_WORKER, len(batch.waiting) // (4 * self.num_workers)))
            for worker in self._workers:
                worker.feed(batch, share)
            patience = self._patience(batch)
            for worker in self._awake(deadline_seconds, patience):
                state = worker.receive(batch)
                if state == "ended":
                    self._fail(worker, batch, "crashed", "its process ended")
                elif state == "spent":
                    self._dismiss(worker, batch)
            now = time.monotonic()
            for worker in list(self._workers):
                limit = self._limit(worker, deadline_seconds)
                if worker.queued and now >= worker.since + limit:
                    self._fail(worker, batch, "timeout", f"over {limit:g} s")
                elif len(worker.queued) > 1 and now >= worker.since + patience:
                    worker.give_back(batch)
        except _SupervisorLostError:
            self._recover(batch)

    def _limit(self, worker: "_Worker", deadline_seconds: float) -> float:
        return deadline_seconds if worker.ready else self._start_seconds

    def _patience(self, batch: "_Batch") -> float:
        """How long items may wait behind a slow one: for ever, unless a worker without any could take them.

        Giving them back costs the worker that has them, and with it what it has loaded on first use.
        """
        starving = not batch.waiting and not all(worker.queued for worker in self._workers)
        return PATIENCE_SECONDS if starving else math.inf

    def _awake(self, deadline_seconds: float, patience: float) -> list["_Worker"]:
        """The workers that said something or ended; none when the first of them is overdue."""
        poll = select.poll()
        by_descriptor: dict[int, _Worker] = {}
        for worker in self._workers:
            poll.register(worker.channel, select.POLLIN | (select.POLLOUT if worker.outgoing else 0))
            poll.register(worker.pidfd, select.POLLIN)
            by_descriptor |= {worker.channel.fileno(): worker, worker.pidfd: worker}
        due = [
            worker.since + min(self._limit(worker, deadline_seconds), patience if worker.queued[1:] else math.inf)
            for worker in self._workers
            if worker.queued
        ]
        events = poll.poll(max(0.0, min(due) - time.monotonic()) * 1000)
        return list({worker.pid: worker for worker in (by_descriptor[fd] for fd, _ in events)}.values())

    def _fail(self, worker: "_Worker", batch: "_Batch", status: OutcomeStatus, why: str) -> None:
        """End a worker; the item it was at gets the status, those behind it go back."""
        failed = None
        if worker.queued:
            failed = worker.queued.pop(0)
            batch.outcomes[failed] = Outcome(status, message=why)
        ended = self._dismiss(worker, batch)
        if failed is not None:
            batch.outcomes[failed] = Outcome(status, message=f"{why} ({ended})")

    def _dismiss(self, worker: "_Worker", batch: "_Batch") -> str:
        """End a worker and give back the items it did not begin; say how its process ended."""
        self._workers.remove(worker)
        batch.waiting.extendleft(reversed(worker.queued))
        worker.close()
        return self._started().end(worker.pid)

    def _recover(self, batch: "_Batch") -> None:
        """The supervisor was killed, by an item or from outside: what its workers were at has crashed."""
        for worker in self._workers:
            worker.receive(batch)
            if worker.queued:
                batch.outcomes[worker.queued.pop(0)] = Outcome("crashed", message="its supervisor ended")
            batch.waiting.extendleft(reversed(worker.queued))
        self._processes.end()
        if batch.recovered_at == len(batch.outcomes):
            raise UnavailableError(
                needed="a supervisor of worker processes that stays alive",
                given="one that ended twice without any work done",
                remedy="Look for a memory limit or a process limit of this machine.",
            )
        batch.recovered_at = len(batch.outcomes)

    def _load(self, paths: Sequence[str]) -> None:
        if os.getpid() != self._processes.owner:
            raise InputError(
                needed="a pool made in this process",
                given=f"one of process {self._processes.owner}",
                remedy="Make pools after forking.",
            )
        for path in paths:
            if path in self._loaded:
                continue
            error = self._import(path)
            if error:
                raise ConfigurationError(
                    needed="a function that workers can import, as 'package.module:name'",
                    given=f"{path!r} ({error})",
                    remedy="Correct the path; start Python where the module can be found, or set PYTHONPATH.",
                )
            self._loaded.append(path)
            while self._workers:
                worker = self._workers.pop()
                worker.close()
                self._started().end(worker.pid)

    def _import(self, path: str) -> str:
        """Have the supervisor import a path; why it cannot, or nothing."""
        started_before = self._processes.supervisor is not None
        try:
            return self._started().load(path)
        except _SupervisorLostError:
            self._processes.end()
            if started_before:  # it may have been killed from outside since the last request
                return self._import(path)
            return f"importing it ends the process or takes over {self._start_seconds:g} s"

    def _started(self) -> "_Supervisor":
        if self._processes.supervisor is None:
            self._processes.supervisor = _Supervisor(self._start_seconds)
            for path in self._loaded:
                self._processes.supervisor.load(path)
        return self._processes.supervisor


def shared_pool() -> WorkerPool:
    """The pool that all rewards of this process use, one worker per usable CPU.

    Example:
        >>> shared_pool() is shared_pool()
        True
    """
    return _pool_of_process(os.getpid())


@functools.cache
def _pool_of_process(_pid: int) -> WorkerPool:
    return WorkerPool()


@dataclass
class _Batch:
    """Items on their way: which wait to be handed out, and what became of the others."""

    frames: list[bytes]
    waiting: deque[int] = field(init=False)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    recovered_at: int | None = None

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.frames)))


@dataclass(eq=False)
class _Worker:
    """A worker process, seen from the caller: bytes to and from it, and the items it holds, in order.

    ``since`` is when it turned to the first of them. Only a worker whose last item was quick holds more than one, so
    that quick items need not wait for the caller; where another worker has none left, those behind a slow one go there.
    """

    pid: int
    pidfd: int
    channel: socket.socket
    since: float = field(default_factory=time.monotonic)
    ready: bool = False
    quick: bool = False
    spent: bool = False
    queued: list[int] = field(default_factory=list)
    outgoing: bytearray = field(default_factory=bytearray)
    incoming: bytearray = field(default_factory=bytearray)

    def feed(self, batch: _Batch, share: int) -> None:
        """Fill the queue of the worker up to its share."""
        if self.spent:
            return
        if not self.queued and self.ready:
            self.since = time.monotonic()
        while batch.waiting and len(self.queued) < (share if self.quick else 1):
            index = batch.waiting.popleft()
            self.queued.append(index)
            self.outgoing += batch.frames[index]
        try:
            while self.outgoing:
                del self.outgoing[: self.channel.send(self.outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self.outgoing.clear()

    def give_back(self, batch: _Batch) -> None:
        """Give back the items behind the first; the worker, which has them already, is replaced after that one."""
        batch.waiting.extendleft(reversed(self.queued[1:]))
        del self.queued[1:]
        self.spent = True

    def receive(self, batch: _Batch) -> Literal["working", "spent", "ended"]:
        """Take in results; ``spent``: the worker asks to be replaced; ``ended``: its process is no more."""
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
            now = time.monotonic()
            self.quick = self.ready and now < self.since + QUICK_SECONDS
            self.since = now
            if not line and not self.ready:
                self.ready = True
                continue
            try:
                status, value, reusable = json.loads(line)
                outcome = Outcome("done", value) if status == "done" else Outcome(status, message=value)
                batch.outcomes[self.queued.pop(0)] = outcome
            except (ValueError, TypeError, IndexError):
                return "ended"
            if self.spent or not reusable:
                return "spent"
        return "ended" if ended or len(self.incoming) >= MAX_LINE_BYTES else "working"

    def close(self) -> None:
        """Let go of the process."""
        self.channel.close()
        os.close(self.pidfd)


@dataclass(eq=False)
class _Processes:
    """What a pool has started, apart from the pool, so that it can be ended after the pool is no more."""

    workers: list[_Worker] = field(default_factory=list)
    supervisor: "_Supervisor | None" = None
    owner: int = field(default_factory=os.getpid)

    def end(self) -> None:
        """End everything; in a process forked from the owner, only let go of it."""
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

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-P", worker_script.__file__, str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={"PYTHONHASHSEED": "0", **os.environ},
            )
        self._control.settimeout(2 * seconds)

    def load(self, path: str) -> str:
        """Import a path in the supervisor; why that failed, or nothing."""
        request = {"kind": "load", "path": path, "seconds": self._seconds, "sys_path": [str(p) for p in sys.path]}
        return self._reply(request)["error"]

    def spawn(self) -> _Worker:
        """Fork a worker."""
        channel, other = socket.socketpair()
        with other:
            pid = self._reply({"kind": "spawn"}, [other.fileno()])["pid"]
        channel.setblocking(False)
        return _Worker(pid, os.pidfd_open(pid), channel)

    def end(self, pid: int) -> str:
        """Kill a worker with all it started, and say how its process ended."""
        return self._reply({"kind": "end", "pid": pid})["ended"]

    def stop(self, ours: bool) -> None:
        """Close the control socket, at which the process kills its workers and ends; wait for it if it is ours."""
        self._control.close()
        if not ours:
            self._process.poll()
            return
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
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


def _frame(task: str, memory_bytes: int, item: tuple[Any, ...]) -> bytes:
    """An item as it goes to a worker: length, then task, limit and pickled arguments."""
    try:
        arguments = pickle.dumps(item)
    except Exception as error:
        raise InputError(
            needed="arguments that can be sent to another process",
            given=f"{type(error).__name__}: {error}",
            remedy="Give columns of plain values (text, numbers, lists, mappings).",
        ) from error
    payload = pickle.dumps((task, memory_bytes, arguments))
    return worker_script.FRAME_HEADER.pack(len(payload)) + payload
