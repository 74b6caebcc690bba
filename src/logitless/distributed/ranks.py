"""The processes that train one policy together, and their collectives.

Every rank runs the same code in the same order. On a single rank every method returns its argument. The loss is the sum
of the ranks' parts, and gradients are summed, never averaged. Objects travel as JSON, not as pickles, so that no rank
can make another run code.
"""

import atexit
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from logitless.distributed import gradient_sums
from logitless.distributed.arrangement import Arrangement
from logitless.distributed.collectives import gather_over_group, sum_over_group
from logitless.distributed.exit_reasons import ExitReasons, Node, in_one_line
from logitless.errors import ConfigurationError, LostRankError, UnavailableError

_Item = TypeVar("_Item")
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it
_PR_SET_PDEATHSIG = 1
_NCCL_DUMP_SIGNAL = "exception_dump"  # torch's kStoreDumpKey
_RESTORES_SIGTERM = threading.Event()
ABORT_SECONDS = 15.0
"""How long a rank waits for NCCL to abort, which has no deadline of its own."""

NCCL_FAULTS_HERE = (
    "unhandled cuda error",
    "unhandled system error",
    "internal error",
    "invalid argument",
    "invalid usage",
)
"""NCCL results (``ncclGetErrorString``) that mean that this rank failed, not another."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run. Methods are collectives unless they say otherwise: all ranks call them, in the same order.

    Args:
        data: ranks with different sequences; None for a single rank.
        sequence: ranks with parts of the same sequences; None if every sequence is on one rank.
        all: every rank of the run; None if ``data`` is all of them.
        timeout: of one collective; None for torch's own.

    Example:
        >>> ranks = Ranks.alone()
        >>> ranks.rank, ranks.world, ranks.is_first, ranks.any(True), ranks.all_gather_object("a")
        (0, 1, True, True, ['a'])
    """

    data: dist.ProcessGroup | None = None
    sequence: dist.ProcessGroup | None = None
    all: dist.ProcessGroup | None = None
    timeout: timedelta | None = None
    _derived: "list[Ranks]" = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def alone(cls) -> "Ranks":
        """One process, without a process group."""
        return cls()

    def arranged(self, arrangement: Arrangement) -> "Ranks":
        """The same ranks with a group for each dimension of the arrangement."""
        if arrangement.sequence == 1:
            return self
        data, sequence = arrangement.groups(self.timeout)
        self._derived.append(Ranks(data, sequence, self._everyone, self.timeout))
        return self._derived[-1]

    def subset(self, members: Sequence[int]) -> "Ranks | None":
        """Some of these ranks as ranks of their own, numbered in this order; None on all others.

        Args:
            members: their numbers, ascending.
        """
        group = dist.new_group(list(members), timeout=self.timeout) if len(members) > 1 else None
        if self.rank not in members:
            return None
        self._derived.append(Ranks(group, timeout=self.timeout))
        return self._derived[-1]

    @property
    def rank(self) -> int:
        """This process among all, from 0."""
        return 0 if self._everyone is None else dist.get_rank(self._everyone)

    @property
    def world(self) -> int:
        """Number of processes."""
        return 1 if self._everyone is None else dist.get_world_size(self._everyone)

    @property
    def data_rank(self) -> int:
        """This process among those with different sequences, from 0."""
        return 0 if self.data is None else dist.get_rank(self.data)

    @property
    def data_world(self) -> int:
        """Number of ranks with different sequences."""
        return 1 if self.data is None else dist.get_world_size(self.data)

    @property
    def is_first(self) -> bool:
        """Whether this process writes files, metrics and the live view."""
        return self.rank == 0

    @property
    def _everyone(self) -> dist.ProcessGroup | None:
        return self.data if self.all is None else self.all

    def sum(self, part: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Differentiable sum over ranks with different sequences; see ``sum_over_group``."""
        with _all_present():
            return sum_over_group(self.data)(part)

    def sum_over_all(self, part: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Sum over every rank, those with parts of the same sequences included."""
        with _all_present():
            return sum_over_group(self._everyone)(part)

    def gather(self, rows: Shaped[Tensor, "n *rest"]) -> Shaped[Tensor, "m *rest"]:
        """The rows of all ranks with different sequences; see ``gather_over_group``."""
        with _all_present():
            return gather_over_group(self.data)(rows)

    def max(self, number: float | int) -> float | int:
        """The maximum over ranks."""
        return max(self.all_gather_object(number))

    def any(self, condition: bool) -> bool:
        """Whether the condition holds on any rank."""
        return any(self.all_gather_object(bool(condition)))

    def all_gather_object(self, value: Any) -> list[Any]:
        """The value of each rank, by rank; sent as JSON, so that tuples come back as lists.

        Raises:
            TypeError: a value that is not JSON.
        """
        if self._everyone is None:
            return [value]
        return [json.loads(text) for text in self.all_gather_bytes(json.dumps(value).encode())]

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        """The bytes of each rank, by rank."""
        if self._everyone is None:
            return [mine]
        gather = gather_over_group(self._everyone)
        with _all_present():
            lengths = gather(torch.tensor([len(mine)])).tolist()
            whole = gather(torch.from_numpy(np.frombuffer(bytearray(mine), np.uint8)))
            return [part.numpy().tobytes() for part in torch.split(whole, lengths)]

    def broadcast_object(self, value: Any) -> Any:
        """The value of rank 0, on every rank."""
        return self.all_gather_object(value if self.rank == 0 else None)[0]

    def count(self, name: str, more: int = 0) -> int:
        """Add to a counter of this name that all ranks of the run share, and read it. Not a collective."""
        if self._everyone is None:
            return more
        with _all_present():
            return int(_get_default_store().add(f"count/{name}", more))

    def nodes(self, environment: Mapping[str, str] = os.environ) -> tuple[Node, ...]:
        """The machines of the run: torchrun's nodes, without torchrun the hosts."""
        here = [environment.get("GROUP_RANK", ""), socket.gethostname()]
        of_ranks = self.all_gather_object([here, _is_here(environment.get("MASTER_ADDR", ""))])
        found: dict[tuple[str, str], list[int]] = {}
        for rank, ((number, host), _) in enumerate(of_ranks):
            found.setdefault((number, host), []).append(rank)
        return tuple(Node(host, tuple(ranks), of_ranks[ranks[0]][1]) for (_, host), ranks in found.items())

    def shared(self, count: int, among: Sequence[int]) -> range:
        """Indices of this rank's share of items of unknown cost, such as prompts to sample for. Not a collective."""
        return range(among.index(self.rank), count, len(among)) if self.rank in among else range(0)

    def rows_of(self, rows: Sequence[_Item]) -> Sequence[_Item]:
        """This rank's rows of a list that interleaves the rows of all ranks. Not a collective."""
        return rows[self.data_rank :: self.data_world]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast the tensors of rank 0, in place."""
        if self._everyone is not None:
            with _all_present(), torch.no_grad():
                for tensor in tensors:
                    sent = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor  # gloo sends no bool
                    dist.broadcast(sent, group=self._everyone, group_src=0)

    def wait_for(self, device: torch.device) -> None:
        """Wait until this stream's collectives are over, at most half as long as NCCL for one. Not a collective.

        Raises:
            LostRankError: another rank did not take part; NCCL's kernels, which wait for it, are ended.
        """
        if device.type != "cuda" or self._everyone is None:
            return
        over: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # NCCL's watchdog looks for late collectives when a group is aborted, too; where it finds one, it ends the
        # process a minute later without a word. After half of the time none is late.
        deadline = time.monotonic() + (self.timeout or default_pg_timeout).total_seconds() / 2
        over.record()
        while not over.query():
            if time.monotonic() > deadline:
                _returns(self._everyone._get_backend(device).abort)
                raise LostRankError(
                    needed=f"all {self.world} ranks in a collective of NCCL",
                    given=f"one that did not come, on rank {self.rank}",
                    remedy="Look for the message of the rank that failed first.",
                )
            time.sleep(0.0002)

    def begin_gather(self, whole: Shaped[Tensor, "m"], part: Shaped[Tensor, "n"]) -> Callable[[], None]:
        """Begin to gather the parts of all ranks, which are equally long, end to end into ``whole``.

        Returns:
            A function that waits for it: on a GPU this stream, which NCCL's own runs beside; on a CPU the host.

        Example:
            >>> whole = torch.zeros(2)
            >>> Ranks.alone().begin_gather(whole, torch.ones(2))()
            >>> whole
            tensor([1., 1.])
        """
        if self._everyone is None:
            whole.copy_(part)
            return lambda: None
        with _all_present():
            work = _gather_into(whole, part, group=self._everyone, async_op=True)

        def wait() -> None:
            with _all_present():
                work.wait()

        return wait

    def check_same(self, what: Mapping[str, str], remedy: str) -> None:
        """Raise where a value differs between ranks.

        Raises:
            ConfigurationError: on every rank, with the names that differ and the ranks that differ from rank 0.
        """
        of_ranks = self.all_gather_object(dict(what))
        differ = [name for name in what if any(each.get(name) != of_ranks[0].get(name) for each in of_ranks)]
        if differ:
            others = [rank for rank, each in enumerate(of_ranks) if each != of_ranks[0]]
            raise ConfigurationError(
                needed=f"the same {', '.join(differ)} on all {self.world} ranks",
                given=f"others on rank {', '.join(map(str, others))} than on rank 0",
                remedy=remedy,
            )

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_gather_object(None)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """All-reduce (sum) of every ``.grad``, in place.

        A missing gradient counts as 0; one that is missing on every rank stays None. Accumulates in float32, or float64
        for float64 parameters, in a fixed order.

        Args:
            parameters: the same on every rank, in the same order; frozen and sharded ones are skipped.
        """
        if self._everyone is not None:
            with _all_present():
                gradient_sums.sum_gradients(parameters, self._everyone)

    def sum_gradients_in_order(self, parameters: Iterable[nn.Parameter]) -> None:
        """``sum_gradients`` along the tree of ``tree.py``: the sum is bitwise the same for any number of ranks.

        Every rank receives the gradients of all the others.

        Args:
            parameters: unsharded; each ``.grad`` is the sum of this rank's subtree.
        """
        if self._everyone is not None:
            with _all_present():
                gradient_sums.sum_gradients_in_order(parameters, self._everyone)


@contextmanager
def ranks_of_environment(
    device: str, environment: Mapping[str, str] = os.environ, *, timeout_seconds: int = 1800
) -> Iterator[Ranks]:
    """The ranks that ``torchrun`` started, connected until the end of the block; a single rank without torchrun.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. CPU tensors travel by gloo, CUDA tensors by NCCL. A
    rank that fails leaves the block, so that the others' next collective raises.

    Args:
        device: ``"cuda"`` or ``"cpu"``. On CUDA the GPU numbered LOCAL_RANK becomes the current one.
        timeout_seconds: of one collective; must be longer than any rank's rollout or checkpoint. After it, waiting
            ranks end with an error that names the missing ones.

    Raises:
        ConfigurationError: variables are missing or do not fit together.
        UnavailableError: fewer GPUs than ranks on this machine.
        LostRankError: another rank did not come, or was lost.

    Example:
        >>> with ranks_of_environment("cpu", {}) as ranks:
        ...     ranks.world
        1
    """
    if "WORLD_SIZE" not in environment and "RANK" not in environment:
        yield Ranks.alone()
        return
    rank, world, local = _numbers(environment)
    if world == 1:
        yield Ranks.alone()
        return
    if "TORCHELASTIC_RUN_ID" in environment:
        _end_with_parent()
    backend = "gloo"
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise UnavailableError(
                needed=f"a GPU for local rank {local}",
                given=f"{torch.cuda.device_count()} on this machine",
                remedy="Start as many processes as there are GPUs (torchrun --nproc-per-node).",
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    address = f"tcp://{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    timeout = timedelta(seconds=timeout_seconds)
    life = environment.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives a restart
    ranks, failed, before = Ranks.alone(), True, signal.getsignal(signal.SIGTERM)
    _RESTORES_SIGTERM.set()
    try:
        store = _store(address, rank, world, timeout)
        exit_reasons = ExitReasons(PrefixStore(f"exit-{life}", store), rank, world)
        # After a timeout NCCL's watchdog sets this below all prefixes. A rank that was started again would find it, and
        # its heartbeat monitor would sleep for 8 minutes, for which the end of the groups waits.
        prefixed: Any = PrefixStore(life, store)
        prefixed._underlying_non_prefix_store.delete_key(_NCCL_DUMP_SIGNAL)
        with _naming_lost_ranks(exit_reasons):
            dist.init_process_group(
                backend, store=PrefixStore(f"life-{life}", store), rank=rank, world_size=world, timeout=timeout
            )
            ranks = Ranks(data=dist.group.WORLD, timeout=timeout)
            exit_reasons.nodes = ranks.nodes(environment)
            yield ranks
        failed = False
    finally:
        # Threads of a group that is still referred to would end with the interpreter, which can abort the process.
        for each in (ranks, *ranks._derived):
            for name in ("data", "sequence", "all"):
                object.__setattr__(each, name, None)
        # To destroy a group waits for its NCCL collectives: for ever, where another rank waits for this one in one.
        if not failed:
            dist.destroy_process_group()
        elif dist.is_initialized() and not _returns(dist.distributed_c10d._abort_process_group):
            atexit.register(_leave)  # the interpreter's end would wait for the groups again
        on_sigterm(before)
        _RESTORES_SIGTERM.clear()


def restores_sigterm() -> bool:
    """Whether this process is inside ``ranks_of_environment``, which at its end sets what SIGTERM did before."""
    return _RESTORES_SIGTERM.is_set()


def _store(address: str, rank: int, world: int, timeout: timedelta) -> Store:
    """The ranks' common store, which without torchrun waits for all of them.

    Raises:
        LostRankError: one did not come, or the one that holds the store.
    """
    try:
        return next(rendezvous(address, rank, world, timeout=timeout))[0]
    except dist.DistError as error:
        raise LostRankError(
            needed=f"all {world} ranks",
            given=f"on rank {rank}, no store that all of them have reached at {address} ({_in_short(error)})",
            remedy="Look for the message of the rank that failed first, or start all of them with the same address.",
        ) from error


def on_sigterm(handler: Any) -> None:
    """Set what SIGTERM does; nothing outside the main thread, where no handler can be set.

    torchrun sends it as soon as one rank has ended, before another can have said which one that was.

    Args:
        handler: of ``signal.getsignal``; None, of another language than Python, is left.

    Example:
        >>> on_sigterm(signal.getsignal(signal.SIGTERM))
    """
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _returns(abort: Callable[[], None]) -> bool:
    """Whether a call that aborts NCCL returns in time, with an error or not; else it goes on in its thread."""

    def called() -> None:
        with suppress(RuntimeError):  # what is reported is why it is aborted
            abort()

    thread = threading.Thread(target=called, name="abort", daemon=True)
    thread.start()
    thread.join(ABORT_SECONDS)
    return not thread.is_alive()


def _leave() -> None:
    """End the process at once. All that torchrun needs is a status other than 0."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _is_here(address: str) -> bool:
    """Whether an address is one of this machine's, to which alone it lets a socket be bound."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as own:
            own.bind(place)
    except OSError:
        return False
    return True


def _end_with_parent() -> None:
    """Have Linux kill this process when torchrun ends, even while it hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def restarted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``torchrun --max-restarts`` has restarted these processes.

    Example:
        >>> restarted({}), restarted({"TORCHELASTIC_RESTART_COUNT": "1"})
        (False, True)
    """
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")


@contextmanager
def _naming_lost_ranks(exit_reasons: ExitReasons) -> Iterator[None]:
    """Record why this rank ends; if that is a lost connection, raise an error that says which rank is gone."""
    try:
        yield
    except BaseException as error:
        lost, before = isinstance(error, LostRankError) or _is_of_connection(error), signal.getsignal(signal.SIGTERM)
        on_sigterm(signal.SIG_IGN)
        try:
            others = exit_reasons.exchanged(in_one_line(error), lost=lost)
        finally:
            on_sigterm(before)
        if not lost:
            raise
        missing = f"without {'; '.join(others)}" if others else "where a connection ended and no other rank says why"
        raise LostRankError(
            needed=f"all {exit_reasons.world} ranks",
            given=f"on rank {exit_reasons.rank}, {missing} ({_in_short(error)})",
            remedy="Look for the message of the rank that failed first; --resume goes on from the last checkpoint.",
        ) from error


def _in_short(error: BaseException) -> str:
    """The first line of torch's message."""
    cause = error.__cause__ if isinstance(error.__cause__, RuntimeError) else error
    return str(cause).strip().split("\n")[0][:200]


def _is_of_connection(error: BaseException) -> bool:
    """Whether torch reports a lost process, in a collective of FSDP2 too."""
    text = str(error).lower()
    words = ("gloo", "nccl", "connection closed", "connection reset", "timed out")
    return _is_of_collectives(error) and (isinstance(error, dist.DistError) or any(word in text for word in words))


def _is_of_collectives(error: BaseException) -> bool:
    """Whether a collective raised because another process is gone.

    gloo raises a plain ``RuntimeError``; NCCL and the store raise a ``DistError``.
    """
    text = str(error)
    here = "NCCL" in text and any(result in text for result in NCCL_FAULTS_HERE)
    return (type(error) is RuntimeError or isinstance(error, dist.DistError)) and not here


def _numbers(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """RANK, WORLD_SIZE and LOCAL_RANK, checked."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    values = {name: environment.get(name, "") for name in names}
    numbers = [int(values[name]) if values[name].isdecimal() else -1 for name in names[:3]]
    rank, world, local = numbers
    if min(numbers) < 0 or not rank < world or not (values["MASTER_ADDR"] and values["MASTER_PORT"].isdecimal()):
        raise ConfigurationError(
            needed=f"{', '.join(names)} as torchrun sets them, or none of them",
            given=", ".join(f"{name}={value or '(unset)'}" for name, value in values.items()),
            remedy="Start with torchrun --nproc-per-node N -m logitless train RECIPE, or unset them to train alone.",
        )
    return rank, world, local


@contextmanager
def _all_present() -> Iterator[None]:
    """Turn the error of a failed collective into a ``LostRankError``."""
    try:
        yield
    except RuntimeError as error:
        if not (dist.is_initialized() and _is_of_collectives(error)):
            raise
        raise LostRankError(
            needed=f"all {dist.get_world_size()} ranks",
            given=f"a lost connection to one of them, on rank {dist.get_rank()} ({error})",
            remedy="Look for the message of the rank that failed first.",
        ) from error
