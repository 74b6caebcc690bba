"""A run folder has one writer; a dead one's lock does not stop the next."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from logitless.errors import ConfigurationError, TrainingError
from logitless.train import run_lock
from logitless.train.run_lock import LOCK, locked, this_process

HOLD = """
import sys
from pathlib import Path
from logitless.train.run_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def _write(folder, owner):
    (folder / LOCK).write_text(json.dumps(asdict(owner)))


def test_a_second_process_is_refused_with_the_firsts_number_and_machine(tmp_path, holder):
    host = this_process().host
    with (
        pytest.raises(ConfigurationError, match=rf"process {holder.pid} on {host}.*delete .*lock\.json"),
        locked(tmp_path),
    ):
        pass
    assert (tmp_path / LOCK).exists()


def test_a_killed_processes_lock_is_taken_over(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / LOCK).exists()
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not (tmp_path / LOCK).exists()


def test_one_process_cannot_have_it_twice(tmp_path):
    with locked(tmp_path), pytest.raises(ConfigurationError, match=f"process {os.getpid()}"), locked(tmp_path):
        pass


@pytest.mark.parametrize("kernel", [True, None])
def test_a_number_that_another_process_got_later_is_not_the_owner(tmp_path, monkeypatch, kernel):
    monkeypatch.setattr(run_lock, "_lock", lambda file: kernel)
    _write(tmp_path, replace(this_process(), started="1"))
    with locked(tmp_path):
        pass


def test_where_the_file_system_has_no_locks_a_living_owner_keeps_its(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_lock", lambda file: None)
    _write(tmp_path, this_process())
    with pytest.raises(ConfigurationError, match=f"process {os.getpid()}"), locked(tmp_path):
        pass


def test_a_lock_from_before_the_machine_was_restarted_is_taken_over(tmp_path):
    _write(tmp_path, replace(this_process(), boot="earlier"))
    with locked(tmp_path):
        pass


def test_a_lock_of_another_machine_is_kept(tmp_path):
    _write(tmp_path, replace(this_process(), boot="another", host="elsewhere", pid=1))
    with pytest.raises(ConfigurationError, match="process 1 on elsewhere"), locked(tmp_path):
        pass


def test_a_forked_child_that_outlives_the_owner_does_not_keep_the_lock(tmp_path):
    script = """
import os, sys, time
from pathlib import Path
from logitless.train.run_lock import locked
with locked(Path(sys.argv[1])):
    if not (pid := os.fork()):
        time.sleep(1000)
    print(pid, flush=True)
    os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        process.stdout.close()
    try:
        with locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_whose_owner_goes_away_while_it_is_looked_at_is_made_again(tmp_path, monkeypatch):
    plain, looks = os.fstat, []

    def looked_at(descriptor):
        looks.append(descriptor)
        if len(looks) == 1:
            (tmp_path / LOCK).unlink()
        return plain(descriptor)

    monkeypatch.setattr(os, "fstat", looked_at)
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("text", ["", '{"pid": 12', "[]", '{"pid": 12}'])
def test_a_lock_that_its_writers_end_cut_is_taken_over(tmp_path, text):
    (tmp_path / LOCK).write_text(text)
    with locked(tmp_path):
        pass


def test_the_lock_is_given_back_after_an_error(tmp_path):
    with pytest.raises(RuntimeError), locked(tmp_path):
        raise RuntimeError
    assert not (tmp_path / LOCK).exists()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(TrainingError, match=r"lock\.json"), locked(tmp_path / "absent"):
        pass


def test_of_many_that_come_at_once_one_gets_it(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    _write(tmp_path, replace(this_process(), started="1"))  # stale
    processes = [subprocess.Popen(command, **pipes, text=True) for _ in range(4)]
    while sum(process.poll() is None for process in processes) > 1:  # who gets it holds it until we say so
        time.sleep(0.01)
    said = sorted(process.communicate() for process in processes)
    assert [out for out, _ in said] == ["", "", "", "held\n"]
    assert all("ConfigurationError" in err for _, err in said[:3])
