"""Runs that are killed at random moments end as one that was left alone."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kills

ROOT = Path(__file__).parents[2]


def _measured(number, out, seed, *more):
    command = [sys.executable, "benchmarks/kills.py", "--kills", str(number), "--seed", str(seed), "--out", str(out)]
    command += more
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def _check(found, number, signals=("SIGKILL", "SIGTERM")):
    assert set(found["signals"]) == {*signals}
    for numbers in found["signals"].values():
        assert numbers["kills"] >= number
        assert numbers["runs"] >= 1
        assert numbers["runs_that_differ"] == numbers["failures"] == []


@pytest.mark.slow
def test_a_killed_run_goes_on_bitwise(tmp_path):
    _check(_measured(2, tmp_path / "kills.json", seed=1), 2)


def test_a_signal_before_the_first_block_ends_a_run_as_the_command_line_does(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt(signal.SIGTERM)

    monkeypatch.setattr(kills.run, "run_recipe", interrupted)
    assert kills.ended(kills.fork(kills.recipe_in(tmp_path, kills.SMALL), tmp_path / "log")) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_run_of_which_one_of_two_processes_is_killed_goes_on_bitwise(tmp_path):
    _check(_measured(2, tmp_path / "kills.json", 1, "--beside"), 2, ["SIGKILL"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_kills_of_each_kind_change_no_bit(tmp_path):
    _check(_measured(100, tmp_path / "kills.json", seed=2), 100)
