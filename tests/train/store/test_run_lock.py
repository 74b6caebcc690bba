"""A run folder has one writer; a dead one's lock does not stop the next."""

import json
import os
import signal
import subprocess
import sys
import time
from socket import gethostname

import pytest
from filelock import Timeout

from logitless.errors import ConfigurationError, TrainingError
from logitless.train.store.run_lock import LOCK, locked

HOLD = """
import sys
from pathlib import Path
from logitless.train.store.run_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def started(folder, script=HOLD, **pipes):
    """Another process, of this script."""
    return subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True, **pipes)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    with started(tmp_path, stdin=subprocess.PIPE) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_with_the_firsts_number_and_machine(tmp_path, holder):
    words = rf"process {holder.pid} on {gethostname()}.*delete .*lock\.json"
    with pytest.raises(ConfigurationError, match=words), locked(tmp_path):
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


def test_a_lock_of_another_machine_is_kept(tmp_path):
    (tmp_path / LOCK).write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "yesterday"}))
    with pytest.raises(ConfigurationError, match="process 1 on elsewhere"), locked(tmp_path):
        pass


FORKS = """
import os, sys, time
from pathlib import Path
from logitless.train.store.run_lock import locked
with locked(Path(sys.argv[1])):
    if not os.fork():
        print(os.getpid(), flush=True)
    time.sleep(1000)
"""


def test_a_forked_child_that_outlives_the_owner_does_not_keep_the_lock(tmp_path):
    with started(tmp_path, FORKS) as owner:
        child = int(owner.stdout.readline())
        owner.kill()
    try:
        with locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("text", ["", '{"pid": 12', "[]", '{"pid": 12}'])
def test_a_lock_that_its_writers_end_cut_is_taken_over(tmp_path, text):
    (tmp_path / LOCK).write_text(text)
    with locked(tmp_path):
        pass


def test_a_lock_that_a_run_itself_meets_elsewhere_is_not_taken_for_this_one(tmp_path):
    with pytest.raises(Timeout), locked(tmp_path):
        raise Timeout("another file")


def test_the_lock_is_given_back_after_an_error(tmp_path):
    with pytest.raises(RuntimeError), locked(tmp_path):
        raise RuntimeError
    assert not (tmp_path / LOCK).exists()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match=r"lock\.json"), locked(tmp_path / "file"):
        pass


def test_of_many_that_come_at_once_one_gets_it(tmp_path):
    (tmp_path / LOCK).write_text(json.dumps({"pid": 1, "host": gethostname(), "since": "yesterday"}))  # stale
    processes = [started(tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
    while sum(process.poll() is None for process in processes) > 1:  # who gets it holds it until we say so
        time.sleep(0.01)
    said = sorted(process.communicate() for process in processes)
    assert [out for out, _ in said] == ["", "", "", "held\n"]
    assert all("ConfigurationError" in err for _, err in said[:3])
