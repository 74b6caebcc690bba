"""Detecting sleep by looks at random times; all else of a worker is tested in ``test_pool.py``."""

import math
import os
import random
import subprocess
import sys

import pytest

from logitless.rewards.workers import programs, worker
from logitless.rewards.workers.worker import LATE_SECONDS, LOOKS, Sleep, usage

DEADLINE = 5.0
NEVER = math.inf


class Clock:
    """A clock that a test advances."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def looks(monkeypatch):
    """``looks(is_asleep)``: the times at which ``Sleep`` was over, for many seeds of its random looks."""

    def over(is_asleep, late=lambda _: 0.0):
        ends = []
        for seed in range(50):
            monkeypatch.setattr(worker, "_RANDOM", random.Random(seed))
            clock = Clock()
            sleep = Sleep(DEADLINE, clock)
            while not sleep.is_over and clock.now < 100 * DEADLINE:
                clock.now += sleep.seconds_to_look
                clock.now += late(clock.now)
                sleep.look(lambda now=clock.now: is_asleep(now))
            ends.append(clock.now if sleep.is_over else NEVER)
        return ends

    return over


def test_an_item_that_sleeps_is_found_out_soon_after_its_deadline_and_not_before(looks):
    ends = looks(lambda _: True)
    assert DEADLINE <= min(ends) < max(ends) < DEADLINE * (1 + 2 / LOOKS)


def test_an_item_that_runs_whenever_its_deadline_is_looked_at_is_found_out(looks):
    near = 0.05 * DEADLINE  # a tenth of the time in all
    ends = looks(lambda now: near < now % DEADLINE < DEADLINE - near)
    assert DEADLINE <= min(ends) < max(ends) < 3 * DEADLINE


def test_an_item_that_wants_to_compute_never_sleeps(looks):
    assert set(looks(lambda _: False)) == {NEVER}


def test_an_item_that_sleeps_for_less_than_its_deadline_and_then_computes_is_not_found_to_sleep(looks):
    assert set(looks(lambda now: now < 0.99 * DEADLINE)) == {NEVER}


def test_looks_that_come_late_find_no_sleeper(looks):
    """The machine stood still before each of them, and stopped processes go on one after the other."""
    assert set(looks(lambda _: True, late=lambda _: 2 * LATE_SECONDS)) == {NEVER}


def test_a_machine_that_stands_still_for_ten_deadlines_makes_no_sleeper(looks):
    """Nor where the item, which was stopped with all others, goes on half a deadline after those that look."""

    def late(now):
        return 10 * DEADLINE if 0.5 * DEADLINE < now < DEADLINE else 0.0

    assert set(looks(lambda now: 10 * DEADLINE < now < 11 * DEADLINE, late)) == {NEVER}


def test_moments_of_looks_are_drawn_from_what_a_fork_has_no_copy_of():
    assert isinstance(worker._RANDOM, random.SystemRandom)


def test_a_process_sleeps_that_was_stopped_and_none_sleeps_that_is_gone():
    with subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        seen = usage(process.pid)
        process.kill()
    assert (seen.running, seen.asleep) == (False, True)
    seen = usage(process.pid)
    assert (seen.seconds, seen.running, seen.asleep) == (0, False, False)


def test_a_process_wants_to_compute_whose_second_thread_does():
    code = "import threading; threading.Thread(target=lambda: all(iter(lambda: 1, 0))).start(); print(flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            assert any(usage(process.pid).running for _ in range(1000))
        finally:
            process.kill()


def test_a_program_that_sleeps_and_runs_whenever_its_deadline_is_looked_at_fails(monkeypatch):
    monkeypatch.setattr(programs, "MAX_DEADLINES", 1000)  # a machine may stand still in many of them
    monkeypatch.setattr(programs, "usage", lambda _: worker.Usage(0.0, running=True, asleep=True))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as process:
        try:
            assert not programs._ends_within(process.pid, 0.2)
        finally:
            process.kill()
