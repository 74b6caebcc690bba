"""The processes that tests of several ranks run on."""

import importlib
import os
import signal
import time
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks


def rank_and_sum(rank):
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return rank, total.item()


def test_ranks_talk_to_each_other():
    assert run_on_ranks(2, rank_and_sum) == [(0, 3.0), (1, 3.0)]


def test_no_module_that_was_collected_skips_them():
    importlib.import_module("tests.mutation")
    assert "LOGITLESS_ONE_PROCESS" not in os.environ


def wait_for_the_other(rank):
    if rank == 0:
        dist.all_reduce(torch.zeros(1))  # as a rank whose collectives run in another order
    time.sleep(600)


def end_without_a_word(rank):
    if rank == 1:
        os.abort()  # as NCCL's watchdog does


def end_in_two_ways(rank):
    if rank == 0:
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)  # as a machine without memory does


def fail(rank):
    if rank == 1:
        raise ValueError("rank 1 fails")
    dist.all_reduce(torch.zeros(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "error"),
    [(wait_for_the_other, TimeoutError), (end_without_a_word, BrokenProcessPool), (fail, ValueError)],
)
def test_a_test_that_hangs_aborts_or_fails_takes_no_other_along(what, error):
    started = time.monotonic()
    with pytest.raises(error):
        run_on_ranks(2, what, timeout_seconds=10 if error is TimeoutError else 300)
    assert time.monotonic() - started < 300  # and not as long as the rank sleeps
    assert run_on_ranks(2, rank_and_sum) == [(0, 3.0), (1, 3.0)]


def test_a_rank_whose_process_ended_is_named_with_its_signal_or_exit_status():
    with pytest.raises(BrokenProcessPool) as caught:
        run_on_ranks(2, end_in_two_ways)
    assert caught.value.__notes__ == ["rank 0 ended with exit status 3", "rank 1 was ended by SIGKILL"]
