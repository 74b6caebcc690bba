"""What ends a piece of work on one rank ends it on all, with one error that says what failed where."""

import gc
import time

import pytest
import torch
import torch.distributed as dist

from logitless.distributed import Ranks
from logitless.distributed.failing import failing_together
from logitless.distributed.ranks import _called_by_name
from logitless.distributed.roll import Roll
from logitless.errors import ConfigurationError, EngineError
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
    roll = Roll(dist.PrefixStore("roll", dist.distributed_c10d._get_default_store()), rank, 2)
    began = time.monotonic()
    try:
        with _called_by_name(roll), failing_together(ranks, "weights") as work, work.collective():
            if rank == leaves:
                raise raised
            dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2))
    except BaseException as error:
        found = type(error).__name__, str(error), time.monotonic() - began
        for each in (error, error.__cause__):
            if each is not None:
                each.__traceback__ = (
                    None  # a frame that has the group would keep its connections; a process that ends has none
                )
    del ranks, roll, work
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
