"""What ends a piece of work on one rank ends it on all, with one error that says what failed where."""

import gc
import threading
import time

import pytest
import torch
import torch.distributed as dist

from logitless.distributed import Ranks
from logitless.distributed.exit_reasons import ExitReasons, Node, in_one_line
from logitless.distributed.failing import failing_together
from logitless.distributed.ranks import _naming_lost_ranks
from logitless.errors import ConfigurationError, EngineError, LostRankError
from tests.ranks import run_on_ranks

FULL = OSError(28, "No space left on device", "/weights/3")
GONE = EngineError(needed="a server", given="HTTP 503", remedy="Look at it.")
WRONG = ConfigurationError(needed="a positive number", given="-1", remedy="Set another.")
PROMPTLY = 100  # seconds, of the 300 after which a collective gives up

# What the ranks raise, and what each of them then ends with: class and words.
CASES = {
    "nothing": ((None, None), (("", ""), ("", ""))),
    "a full disk": (
        (FULL, None),
        (("OSError", "/weights/3"), ("TrainingError", "needed weights on every rank; given OSError: [Errno 28] No")),
    ),
    "a bug": ((None, RuntimeError("a\nb")), (("TrainingError", "given RuntimeError: a b (on rank 1)"), ("Ru", "a\nb"))),
    "memory": ((MemoryError(), None), (("MemoryError", ""), ("TrainingError", "given MemoryError (on rank 0)"))),
    "Ctrl-C": ((KeyboardInterrupt(), None), (("Keyb", ""), ("TrainingError", "given KeyboardInterrupt (on rank 0)"))),
    "Ctrl-C twice": (
        (KeyboardInterrupt(), KeyboardInterrupt()),
        (("KeyboardInterrupt", ""), ("KeyboardInterrupt", "")),
    ),
    "Ctrl-C of another": ((GONE, KeyboardInterrupt()), (("EngineError", "503. "), ("KeyboardInterrupt", ""))),
    "an exit": ((None, SystemExit(3)), (("TrainingError", "given SystemExit: 3 (on rank 1)"), ("SystemExit", "3"))),
    "an engine": ((None, GONE), (("EngineError", "given HTTP 503 (on rank 1). Look at it."), ("EngineError", "503. "))),
    "a setting": ((WRONG, None), (("ConfigurationError", "-1. Set"), ("ConfigurationError", "-1 (on rank 0). Set"))),
    "two at once": ((FULL, GONE), (("OSError", "/weights/3"), ("TrainingError", "'/weights/3' (on rank 0)"))),
    "two others": ((GONE, FULL), (("EngineError", "503. "), ("EngineError", "HTTP 503 (on rank 0). Look at it."))),
}


def _ends(rank):
    """What each case ends with on this rank, one after the other in the same group."""
    ranks, found = Ranks(data=dist.group.WORLD), {}
    for name, (raised, _) in CASES.items():
        try:
            with failing_together(ranks, "weights"):
                if raised[rank] is not None:
                    raise raised[rank]
            found[name] = ("", "")
        except BaseException as error:
            found[name] = (type(error).__name__, str(error))
    return found


@pytest.fixture(scope="module")
def ends():
    return run_on_ranks(2, _ends)


@pytest.mark.parametrize("name", CASES)
def test_what_one_rank_raises_ends_all_of_them_with_an_error_that_says_what_and_where(name, ends):
    for (kind, words), of_rank in zip(CASES[name][1], ends, strict=True):
        found_kind, found_words = of_rank[name]
        assert found_kind.startswith(kind), found_words
        assert words in found_words
        assert bool(kind) == bool(found_kind)


def _in_a_collective(rank, leaves, raised):
    """One rank fails where the other waits for its tensor; what each ends with, and after how many seconds."""
    ranks = Ranks(data=dist.group.WORLD)
    exit_reasons = ExitReasons(dist.PrefixStore("exit_reasons", dist.distributed_c10d._get_default_store()), rank, 2)
    began = time.monotonic()
    try:
        with _naming_lost_ranks(exit_reasons), failing_together(ranks, "weights") as work, work.collective():
            if rank == leaves:
                raise raised
            dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2))
    except BaseException as error:
        found = type(error).__name__, str(error), time.monotonic() - began
        for each in (error, error.__cause__):
            if each is not None:
                each.__traceback__ = None  # a frame that has the group would keep its connections
    del ranks, exit_reasons, work
    gc.collect()
    return found


@pytest.mark.parametrize("leaves", [0, 1])
@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (RuntimeError("CUDA out of memory"), "RuntimeError", "RuntimeError: CUDA out of memory"),
        (KeyboardInterrupt(), "KeyboardInterrupt", "KeyboardInterrupt"),
        (GONE, "TrainingError", "needed a server; given HTTP 503"),  # no checkpoint, which the other would not save
    ],
    ids=["error", "Ctrl-C", "engine"],
)
def test_a_rank_that_fails_where_others_wait_for_its_tensor_leaves_and_they_say_why(leaves, raised, kind, words):
    found = run_on_ranks(2, _in_a_collective, leaves, raised)
    assert found[leaves][0] == kind
    assert found[1 - leaves][0] == "LostRankError"
    assert f"rank {leaves}: " in found[1 - leaves][1]
    assert words in found[1 - leaves][1]
    assert max(seconds for _, _, seconds in found) < PROMPTLY


def of_nccl(result, kind, last):
    """A failed call as torch 2.11 and 2.13 word it: the texts are in ``libtorch_cuda.so``, results in NCCL's."""
    place = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94"
    return dist.DistBackendError(f"{place}, {result}, NCCL version 2.28.9\n{kind}\nLast error:\n{last}")


BY_KEY = "is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0'"
OF_ANOTHER = {
    "NCCL": of_nccl(
        "remote process exited or there was a network error",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "Net : Connection closed by remote peer",
    ),
    "NCCL, next": dist.DistBackendError("NCCL communicator was aborted on rank 1."),
    "NCCL, first": dist.DistBackendError(f"[1] {BY_KEY}, but store->get('0') got error: wait timeout after 1800000ms"),
    "NCCL, waiting": dist.DistBackendError("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"),
    "store": dist.DistStoreError("wait timeout after 1800000ms, keys: /life-0/0"),
    "network": dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
    "gloo": RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
}
HERE = {
    "CUDA in NCCL": of_nccl(
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "ncclUnhandledCudaError: Call to CUDA function failed.",
        "Cuda failure 2 'out of memory'",
    ),
    "shared memory in NCCL": of_nccl(
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
        "Error while creating shared memory segment /dev/shm/nccl-a (size 9637888)",
    ),
    "one GPU twice": of_nccl(
        "invalid usage (run with NCCL_DEBUG=WARN for details)",
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
    ),
    "memory": torch.OutOfMemoryError("CUDA out of memory, of which NCCL takes 2 GiB"),
    "a bug": RuntimeError("The size of tensor a (2) must match the size of tensor b (3)"),
}


def exit_reasons_of_three():
    """Those of two ranks, and of a third that says nothing unless a test lets it."""
    store = dist.HashStore()
    return [ExitReasons(store, rank, 3) for rank in range(3)]


def ended_with(exit_reasons, error):
    """What a rank ends with that meets an error."""
    with pytest.raises(BaseException) as found, _naming_lost_ranks(exit_reasons):  # noqa: PT011
        raise error
    return found.value


@pytest.mark.parametrize("kind", OF_ANOTHER)
def test_whatever_torch_raises_where_another_rank_left_its_error_names_that_one(kind, monkeypatch):
    monkeypatch.setattr("logitless.distributed.exit_reasons.GRACE_SECONDS", 0.0)
    first, second, _ = exit_reasons_of_three()
    assert ended_with(first, MemoryError("of the host")).args == ("of the host",)
    found = ended_with(second, OF_ANOTHER[kind])
    assert type(found) is LostRankError
    said = "without rank 2, which says nothing: killed, or hung; rank 0: MemoryError: of the host ("
    assert f"needed all 3 ranks; given on rank 1, {said}{str(OF_ANOTHER[kind]).splitlines()[0]})" in str(found)
    assert found.__cause__ is OF_ANOTHER[kind]


@pytest.mark.parametrize("kind", HERE)
def test_a_rank_that_failed_itself_inside_a_collective_raises_that_and_is_named_by_the_others(kind, monkeypatch):
    monkeypatch.setattr("logitless.distributed.exit_reasons.GRACE_SECONDS", 0.0)
    first, second, _ = exit_reasons_of_three()
    assert ended_with(first, HERE[kind]) is HERE[kind]
    assert f"rank 0: {in_one_line(HERE[kind])} (" in str(ended_with(second, OF_ANOTHER["NCCL"]))


def test_where_every_rank_lost_a_connection_none_is_named():
    first, second, third = exit_reasons_of_three()
    for each in (first, third):
        each.record("RuntimeError: connection reset", lost=True)
    found = str(ended_with(second, OF_ANOTHER["gloo"]))
    assert "on rank 1, where a connection ended and no other rank says why (" in found


def test_a_node_all_of_whose_ranks_say_nothing_is_named_and_on_others_the_rank(monkeypatch):
    monkeypatch.setattr("logitless.distributed.exit_reasons.GRACE_SECONDS", 0.0)
    store, nodes = dist.HashStore(), [Node("a", (0, 1), True), Node("b", (2, 3), False), Node("c", (4, 5), False)]
    first, *_, last = (ExitReasons(store, rank, 6, nodes) for rank in range(6))
    last.record("RuntimeError: connection reset", lost=True)
    said = "node b (ranks 2, 3), which says nothing: lost, or hung"
    said += "".join(f"; rank {rank}, which says nothing: killed, or hung" for rank in (1, 4))
    assert f"given on rank 0, without {said} (" in str(ended_with(first, OF_ANOTHER["gloo"]))


class _Gone:
    """A store whose process is gone, or whose machine is silent until the event."""

    def __init__(self, answers):
        self._answers = answers

    def set(self, *_):
        self._answers.wait()
        raise RuntimeError("Broken pipe")


@pytest.mark.parametrize(("silent", "seconds"), [(False, 60.0), (True, 0.1)])
def test_where_no_store_answers_the_node_that_holds_it_is_named(silent, seconds, monkeypatch):
    monkeypatch.setattr("logitless.distributed.exit_reasons.GRACE_SECONDS", 0.0)
    monkeypatch.setattr("logitless.distributed.exit_reasons.STORE_SECONDS", seconds)
    answers = threading.Event()
    if not silent:
        answers.set()
    for hosts, named in (("ab", "node a (rank 0), which holds the ranks' store"), ("a", "the rank that started first")):
        nodes = [Node(host, (rank,), True) for rank, host in enumerate(hosts)]
        found = ended_with(ExitReasons(_Gone(answers), len(nodes) - 1, 2, nodes), OF_ANOTHER["gloo"])
        assert f"without {named}" in str(found)
    answers.set()


def _in_one_of_our_collectives(rank, error):
    """What a collective of ours makes of what torch raises in it."""

    def fails(*_, **__):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logitless.distributed.ranks.dist.broadcast", fails)
        try:
            Ranks(data=dist.group.WORLD).broadcast([torch.ones(2)])
        except RuntimeError as found:
            return type(found).__name__
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "end"),
    [("NCCL", "LostRankError"), ("CUDA in NCCL", "DistBackendError"), ("memory", "OutOfMemoryError")],
)
def test_a_collective_of_ours_blames_another_rank_for_what_is_not_its_own_fault(kind, end):
    assert run_on_ranks(2, _in_one_of_our_collectives, (OF_ANOTHER | HERE)[kind]) == [end, end]


def _after_the_other_left(rank):
    ranks = Ranks(data=dist.group.WORLD)
    if rank == 1:
        return None
    try:
        with failing_together(ranks, "weights"):
            raise FULL
    except OSError as error:
        return str(error), error.__suppress_context__


def test_a_rank_that_cannot_tell_its_error_any_more_still_raises_it():
    text, alone = run_on_ranks(2, _after_the_other_left)[0]
    assert "/weights/3" in text
    assert alone


def test_one_rank_alone_raises_what_it_meets():
    with pytest.raises(OSError, match="No space left"), failing_together(Ranks.alone(), "weights"):
        raise FULL
