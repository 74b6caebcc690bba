"""Every second of a run has a name, and the names add up to the time since its process began."""

import json
import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from torch._dynamo.callback import CallbackTrigger, callback_handler

from logitless.train.record.wall_clock import WallClock, compilations_counted
from logitless.train.run import run_recipe
from tests import warm
from tests.train.tiny import tiny_raw, tiny_recipe


class Hands:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def hands():
    """A clock that is moved by hand."""
    return Hands()


def test_a_second_is_of_the_innermost_phase_and_outside_of_all_of_none(hands):
    clock = WallClock(imports=5.0, clock=hands)
    hands.now = 1.0
    with clock.phase("training") as training:
        hands.now = 3.0
        with suppress(KeyError), clock.phase("checkpoint") as checkpoint:
            hands.now = 7.0
            raise KeyError
        hands.now = 15.0
    clock.outside("start")
    hands.now = 31.0
    assert (training, checkpoint) == ([10.0], [4.0])
    expected = {"imports": 5.0, "training": 10.0, "checkpoint": 4.0, "start": 16.0, "unnamed": 1.0}  # in this order
    assert list(clock.seconds().items()) == list(expected.items())


def test_compilations_have_their_own_seconds_and_those_side_by_side_count_once(hands):
    clock = WallClock(clock=hands)
    with clock.phase("training") as training:
        for hands.now, seconds in ((4.0, 3.0), (6.0, 4.0), (8.0, 0.5)):  # 1 to 4, 2 to 6, 7.5 to 8
            clock.compiled(seconds)
        hands.now = 10.0
    assert training == [4.5]
    assert clock.seconds() == {"training": 4.5, "compilation": 5.5, "unnamed": 0.0}


def test_a_compilation_that_began_before_a_phase_does_not_take_seconds_of_another_twice(hands):
    clock = WallClock(clock=hands)
    hands.now = 2.0
    with clock.phase("rollout"):
        hands.now = 5.0
        clock.compiled(4.0)  # since 1.0, of which the first second is another phase's already
    assert clock.seconds() == {"rollout": 0.0, "compilation": 3.0, "unnamed": 2.0}


def test_a_resumed_run_adds_up_to_the_clocks_of_all_its_processes(hands):
    clock = WallClock(imports=1.0, clock=hands)
    hands.now = 2.0
    clock.add({"imports": 3.0, "rollout": 4.0, "unnamed": 0.5})
    assert clock.seconds() == {"imports": 4.0, "rollout": 4.0, "unnamed": 2.5}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not tell when a process began")
def test_the_seconds_of_a_process_go_on_while_it_waits():
    before = WallClock.of_process().seconds()["imports"]
    time.sleep(0.3)
    assert WallClock.of_process().seconds()["imports"] - before > 0.299


COMPILES = """
import torch
from logitless.train.record.wall_clock import WallClock, compilations_counted

clock = WallClock()
with compilations_counted(clock):
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
told = clock.seconds()["compilation"]
assert told > 0
torch.compile(lambda x: x - 1, backend="eager")(torch.ones(1))
assert clock.seconds()["compilation"] == told
"""


@pytest.mark.slow
def test_torch_compile_says_what_it_compiles_and_nobody_listens_afterwards():
    done = warm.run("-c", COMPILES, environment=os.environ)  # other tests leave Dynamo in states in which it is silent
    assert done.returncode == 0, done.stderr


def test_triton_says_what_it_compiles_to_whoever_listened_before_too():
    triton = pytest.importorskip("triton")
    heard, clock = [], WallClock(clock=(hands := Hands()))
    other = triton.knobs.compilation.listener = lambda **told: heard.append(told)
    try:
        with compilations_counted(clock), clock.phase("rollout"):
            hands.now = 3.0
            times = triton.knobs.CompileTimes(500_000, [("ttir", 1_000_000)], 500_000)
            triton.knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=False)
        assert triton.knobs.compilation.listener is other
    finally:
        triton.knobs.compilation.listener = None
    assert [told["times"] for told in heard] == [times]
    assert clock.seconds() == {"rollout": 1.0, "compilation": 2.0, "unnamed": 0.0}


def test_the_phases_of_a_run_add_up_to_its_wall_clock_and_leave_little_unnamed(tmp_path, monkeypatch):
    def report(_):
        time.sleep(0.05)
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):  # as torch.compile does, on any device
            time.sleep(0.05)

    monkeypatch.setattr("logitless.train.run.write_report", report)
    began = time.perf_counter()
    result = run_recipe(tiny_recipe(tmp_path))
    took = time.perf_counter() - began
    seconds = json.loads(result.folder.summary.read_text())["seconds"]
    assert {
        *("start", "data", "model", "engine", "weights", "rollout", "scoring", "preparation", "training", "evaluation"),
        *("checkpoint", "writing", "export", "closing", "report", "compilation"),
    } <= set(seconds)
    assert min(seconds["report"], seconds["compilation"]) >= 0.05
    assert 0.9 * took < math.fsum(seconds.values()) <= took
    assert seconds["unnamed"] < 0.05 * took
    assert all(value >= 0 for value in seconds.values())


@pytest.mark.slow
def test_a_command_accounts_for_its_process_from_the_start_imports_included(tmp_path):
    raw = tiny_raw(tmp_path) | {"writers": []}
    raw["train"]["blocks"] = 1
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(raw))
    began = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "logitless", "train", str(tmp_path / "tiny.yaml")],
        check=True,
        capture_output=True,
        text=True,
    )
    took = time.time() - began
    seconds = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())["seconds"]
    total = math.fsum(seconds.values())
    assert 0.6 * took < total < took  # what is left is the interpreter's end
    assert seconds["imports"] > 0.2 * total
    time_line = next(line for line in done.stdout.splitlines() if line.startswith("  time "))
    assert f"  time               {total:.1f} s: " in time_line
    assert f" imports {seconds['imports']:.1f}, " in time_line
    assert "report" in seconds
