"""A rank that is killed, hangs, or has something else: all ranks end with status 1, and the last checkpoint holds."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from logitless.distributed import Ranks
from logitless.errors import CheckpointError, ConfigurationError
from logitless.train.record.run_folder import RunFolder
from logitless.train.store import checkpoint as checkpoints
from logitless.train.store import shared_checkpoint
from logitless.train.store.shared_checkpoint import SharedSaver
from tests import warm
from tests.ranks import run_on_ranks
from tests.train.tiny import program_in, repeated, start, start_without_report, tiny_raw, tiny_recipe

# What rank 1 does wrong in the middle of a run: it is killed the first time that it is started, and hangs the second.
# Up to there a rank waits for the other as long as the recipe says, for a start may take long; then not for long.
PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from logitless.cli.main import main
from logitless.distributed import exit_reasons
from logitless.train.learn.learner import Learner

exit_reasons.GRACE_SECONDS = 1.0
plain, start = Learner.step, int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def faulty(self):
    if self.progress.step == (3, 5)[start]:
        if os.environ["RANK"] == "1":
            if start == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or torchrun waits half a minute before it ends this rank
            time.sleep(1000)
        if start == 1:
            print("waits", dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout, flush=True)
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    return plain(self)

Learner.step = faulty
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
ENVIRONMENT = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")


COPIES = {"parallel": {"replicate": 2}}  # processes that hold shards import FSDP2, which takes seconds


def _run(rank, folder, resume):
    return start_without_report(tiny_recipe(folder, **COPIES), ranks=Ranks(data=dist.group.WORLD), resume=resume)[1]


def _metrics(folder):
    return repeated(RunFolder(folder / "runs" / "tiny"))


def _undisturbed(folder, resume):
    """The metrics of a run on two ranks to its end."""
    assert run_on_ranks(2, _run, folder, resume) == [True, True]
    return _metrics(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The metrics of the same run on two ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    tiny_raw(folder)
    return _undisturbed(folder, False)


@pytest.fixture(scope="module", params=["forks", pytest.param("torchrun", marks=pytest.mark.slow)])
def disturbed(request, tmp_path_factory):
    """The folder of a run that is started twice, and what became of it."""
    folder = tmp_path_factory.mktemp("disturbed")
    program = program_in(folder, PROGRAM, tiny_raw(folder) | COPIES)
    program += ["--set", "parallel.timeout_seconds=660"]
    if request.param == "forks":
        return folder, warm.run("-m", "tests.torchrun", "1", *program, environment=os.environ)
    options = ("--max-restarts", "1", "--shutdown-timeout", "2")
    launcher = [sys.executable, *TORCHRUN, *options, *program]
    return folder, subprocess.run(launcher, env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_torchrun_starts_a_run_again_whose_rank_was_killed_and_it_goes_on_bit_for_bit(disturbed, undisturbed):
    folder, done = disturbed
    assert len(json.loads(RunFolder(folder / "runs" / "tiny").provenance.read_text())["starts"]) == 2, done.stderr
    found = _metrics(folder)
    assert found[-1]["step"] == 5  # where the second fault comes
    assert found == undisturbed[: len(found)]


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_past_the_deadline_and_ends_all(disturbed):
    _, done = disturbed
    assert done.returncode == 1
    assert done.stdout.count("waits 0:11:00") == 1, done.stdout
    assert "rank 1, which says nothing: killed, or hung" in done.stderr, done.stderr


@pytest.mark.slow
def test_what_a_fault_ended_goes_on_from_its_last_checkpoint(disturbed, undisturbed, tmp_path):
    shutil.copytree(disturbed[0], tmp_path, dirs_exist_ok=True)
    run = RunFolder(tmp_path / "runs" / "tiny")
    assert checkpoints.load_checkpoint(run.checkpoints).state["progress"]["block"] >= 1
    assert _undisturbed(tmp_path, True) == undisturbed


# Rank 1 is stopped amid a run, while rank 0 waits for it, and killed unless it is to hang. Both score in workers.
STOPPED = """
import json, os, pathlib, signal, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from logitless.cli.main import main
from logitless.distributed import exit_reasons
from logitless.rewards.workers.worker import _parents, _states, _tree
from logitless.train.learn.learner import Learner

folder, is_killed = pathlib.Path(sys.argv.pop(1)), sys.argv.pop(1) == "killed"
exit_reasons.GRACE_SECONDS = 1.0
plain = Learner.step

def kill(pid):
    while set(_states(pid)) != {"T"}:
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)

def faulty(self):
    if self.progress.step == 3:
        ranks = self.ranks.all_gather_object(os.getpid())
        if self.ranks.is_first:
            (folder / "processes").write_text(json.dumps([sorted(_tree(pid, _parents())) for pid in ranks]))
        self.ranks.barrier()
        if not self.ranks.is_first:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif is_killed:
            threading.Thread(target=kill, args=ranks[1:], daemon=True).start()
        else:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    return plain(self)

Learner.step = faulty
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def scored(completions, **columns):
    """Score by length, in a worker."""
    return [float(len(each)) for each in completions]


IN_WORKERS = [{"name": "function", "path": f"{Path(__file__)}:scored"}]


def _run_with_workers(rank, folder, resume):
    recipe = tiny_recipe(folder, rewards=IN_WORKERS, **COPIES)
    return start_without_report(recipe, ranks=Ranks(data=dist.group.WORLD), resume=resume)[1]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["killed", "hangs"])
def test_a_rank_that_is_stopped_is_named_nothing_of_the_run_stays_and_it_goes_on_bit_for_bit(what, tmp_path):
    program = program_in(tmp_path, STOPPED, tiny_raw(tmp_path) | COPIES | {"rewards": IN_WORKERS}, str(tmp_path), what)
    started = ["-m", "tests.torchrun", "0", *program]
    done = warm.run(*started, environment=os.environ)
    of_ranks = json.loads((tmp_path / "processes").read_text())
    assert min(map(len, of_ranks)) > 1  # workers
    _waited_for(lambda: {_state(Path("/proc", str(pid), "stat")) for pids in of_ranks for pid in pids} == {"Z"})
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert "rank 1, which says nothing: killed, or hung" in last, done.stderr
    assert last.endswith("--resume goes on from the last checkpoint.")
    assert "Traceback" not in done.stderr, done.stderr
    assert run_on_ranks(2, _run_with_workers, tmp_path, True) == [True, True]
    tiny_raw(whole := tmp_path / "whole")
    assert run_on_ranks(2, _run_with_workers, whole, False) == [True, True]
    assert _metrics(tmp_path) == _metrics(whole)


NOT_CONNECTED = """
import os, signal, sys
from logitless.cli.main import main
from logitless.distributed import exit_reasons, ranks

exit_reasons.GRACE_SECONDS = 0.5
plain = ranks.dist.init_process_group

def stopped(*arguments, **options):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    plain(*arguments, **options)

ranks.dist.init_process_group = stopped
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_rank_that_never_connects_is_named_past_the_deadline(tmp_path):
    program = program_in(tmp_path, NOT_CONNECTED, tiny_raw(tmp_path) | {"parallel": {"timeout_seconds": 5}})
    done = warm.run("-m", "tests.torchrun", "0", *program, environment=os.environ)
    assert done.returncode == 1
    assert "needed all 2 ranks; given on rank 0, without rank 1, which says nothing: killed, or hung" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr


WAITING = """
import os, pathlib, signal, sys, time
from logitless.distributed.ranks import ranks_of_environment

folder = pathlib.Path(sys.argv[1])
with ranks_of_environment("cpu") as ranks:
    ranks.barrier()
    (folder / str(ranks.rank)).write_text(str(os.getpid()))
    ranks.barrier()
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while ") T " not in pathlib.Path("/proc", (folder / "1").read_text(), "stat").read_text():
        time.sleep(0.05)
    os.kill(os.getppid(), signal.SIGKILL)
    ranks.barrier()
"""


def _waited_for(there):
    until = time.monotonic() + 120
    while not there():
        assert time.monotonic() < until
        time.sleep(0.05)


def _state(place):
    """Of a process, a letter: Z where it has ended and nobody has asked how, as where it is gone."""
    try:
        return place.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.slow
def test_ranks_end_with_what_started_them_also_one_that_is_stopped(tmp_path):
    (tmp_path / "program.py").write_text(WAITING)
    done = warm.run("-m", "tests.torchrun", "0", str(tmp_path / "program.py"), str(tmp_path), environment=os.environ)
    assert done.returncode == -signal.SIGKILL, done.stderr
    ranks = [Path("/proc", (tmp_path / str(rank)).read_text(), "stat") for rank in range(2)]
    try:
        _waited_for(lambda: {_state(rank) for rank in ranks} == {"Z"})
    finally:
        for rank in ranks:
            if _state(rank) != "Z":
                os.kill(int(rank.parent.name), signal.SIGKILL)


def _with_another(rank, folder, which):
    recipe = tiny_recipe(folder, **({"seed": 1} if which == "recipe" and rank == 1 else {}))
    if which == "data (train)" and rank == 1:
        (folder / "other.jsonl").write_text((folder / "train.jsonl").read_text().replace("bg", "bh"))
        recipe = tiny_recipe(folder, data__train={"name": "file", "path": str(folder / "other.jsonl")})
    with pytest.raises(ConfigurationError) as error:
        start(recipe, ranks=Ranks(data=dist.group.WORLD))
    return str(error.value)


@pytest.mark.parametrize("which", ["recipe", "data (train)"])
def test_a_rank_with_another_recipe_or_other_data_is_refused_at_the_start(which, tmp_path):
    tiny_raw(tmp_path)
    for message in run_on_ranks(2, _with_another, tmp_path, which):
        assert which in message
        assert "on rank 1 than on rank 0" in message
    assert not (tmp_path / "runs").exists()


def _starts(rank, folder, resume, changes):
    with pytest.raises(ConfigurationError) as error:
        start(tiny_recipe(folder, **COPIES, **changes), ranks=Ranks(data=dist.group.WORLD), resume=resume)
    return str(error.value)


@pytest.mark.parametrize(
    ("resume", "changes", "words"), [(False, {}, "name"), (True, {"seed": 1}, "seed")], ids=["taken", "another"]
)
def test_what_the_first_rank_alone_finds_in_the_folder_all_of_them_refuse(resume, changes, words, disturbed, tmp_path):
    shutil.copytree(disturbed[0], tmp_path, dirs_exist_ok=True)
    first, other = run_on_ranks(2, _starts, tmp_path, resume, changes)
    assert words in first
    assert other == first.replace(". ", " (on rank 0). ", 1)


def _full_disk(rank, root, full_on):
    ranks = Ranks(data=dist.group.WORLD)
    saver = SharedSaver(root, keep=5, ranks=ranks)
    saver.save(block=1, step=1, tensors={"x": torch.ones(2)}, state={"ok": 1})
    saver.wait()
    plain = shared_checkpoint.write_pieces

    def write_pieces(folder, tensors, **options):
        if ranks.rank == full_on:
            raise OSError(28, "No space left on device")
        return plain(folder, tensors, **options)

    with mock.patch.object(shared_checkpoint, "write_pieces", write_pieces):
        saver.save(block=2, step=2, tensors={"x": torch.ones(2)}, state={"ok": 2})
        with pytest.raises(CheckpointError) as error:
            saver.wait()
    return str(error.value)


@pytest.mark.parametrize("full_on", [0, 1])
def test_a_full_disk_on_one_rank_ends_all_and_the_last_checkpoint_holds(full_on, tmp_path):
    for message in run_on_ranks(2, _full_disk, tmp_path, full_on):
        assert f"on rank {full_on}" in message
        assert "No space left" in message
    assert [path.name for path in tmp_path.iterdir()] == ["block-000001-step-000001"]
    assert checkpoints.load_checkpoint(tmp_path).state == {"ok": 1}
