"""A rank that is killed, hangs, or has something else: all ranks end with status 1, and the last checkpoint holds."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from logitless.distributed import Ranks
from logitless.errors import CheckpointError, ConfigurationError
from logitless.train import checkpoint as checkpoints
from logitless.train import shared_checkpoint
from logitless.train.metrics import repeatable
from logitless.train.run import start
from logitless.train.run_folder import RunFolder
from logitless.train.shared_checkpoint import SharedSaver
from tests.ranks import run_on_ranks
from tests.train.tiny import start_without_report, tiny_raw, tiny_recipe

# What rank 1 does wrong in the middle of a run: it is killed the first time that it is started, and hangs the second.
# Up to there a rank waits for the other as long as the recipe says, for a start may take long; then not for long.
PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from logitless.cli.main import main
from logitless.distributed import roll
from logitless.train.learner import Learner

roll.GRACE_SECONDS = 1.0
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
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")


def _run(rank, folder, resume):
    return start_without_report(tiny_recipe(folder), ranks=Ranks(data=dist.group.WORLD), resume=resume)[1]


def _metrics(folder):
    return [repeatable(record) for record in RunFolder(folder / "runs" / "tiny").read_metrics()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The metrics of the same run on two ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    tiny_raw(folder)
    assert run_on_ranks(2, _run, folder, False) == [True, True]
    return _metrics(folder)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """The folder of a run that torchrun starts twice, and what became of it."""
    folder = tmp_path_factory.mktemp("disturbed")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tiny_raw(folder)))
    (folder / "program.py").write_text(PROGRAM)
    launcher = [sys.executable, *TORCHRUN, "--max-restarts", "1", "--shutdown-timeout", "2", str(folder / "program.py")]
    done = subprocess.run(
        [*launcher, "train", str(folder / "recipe.yaml"), "--set", "parallel.timeout_seconds=660"],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return folder, done


def test_torchrun_starts_a_run_again_whose_rank_was_killed_and_it_goes_on_bit_for_bit(disturbed, undisturbed):
    folder, done = disturbed
    assert len(json.loads(RunFolder(folder / "runs" / "tiny").provenance.read_text())["starts"]) == 2, done.stderr
    found = _metrics(folder)
    assert found[-1]["step"] == 5  # where the second fault comes
    assert found == undisturbed[: len(found)]


def test_a_rank_that_hangs_is_named_past_the_deadline_and_ends_all(disturbed):
    _, done = disturbed
    assert done.returncode == 1
    assert done.stdout.count("waits 0:11:00") == 1, done.stdout
    assert "rank 1, which says nothing: killed, or hung" in done.stderr, done.stderr


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_a_fault_ended_goes_on_from_its_last_checkpoint(num_ranks, disturbed, undisturbed, tmp_path):
    shutil.copytree(disturbed[0], tmp_path, dirs_exist_ok=True)
    run = RunFolder(tmp_path / "runs" / "tiny")
    assert checkpoints.load_checkpoint(run.checkpoints).state["progress"]["block"] >= 1
    if num_ranks == 1:
        assert start(tiny_recipe(tmp_path), resume=True)[1]
        assert len(_metrics(tmp_path)) == len(undisturbed)
    else:
        assert run_on_ranks(2, _run, tmp_path, True) == [True, True]
        assert _metrics(tmp_path) == undisturbed


WAITING = """
import os, signal, sys
from logitless.distributed.ranks import ranks_of_environment

with ranks_of_environment("cpu") as ranks:
    ranks.barrier()
    with open(f"{sys.argv[1]}/{ranks.rank}", "w") as file:
        file.write(str(os.getpid()))
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
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


def test_ranks_end_with_the_torchrun_that_started_them_also_one_that_is_stopped(tmp_path):
    (tmp_path / "program.py").write_text(WAITING)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *TORCHRUN, str(tmp_path / "program.py"), str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as torchrun:
        places = [tmp_path / str(rank) for rank in range(2)]
        _waited_for(lambda: all(place.exists() and place.read_text() for place in places))
        ranks = [Path("/proc", place.read_text(), "stat") for place in places]
        _waited_for(lambda: _state(ranks[1]) == "T")
        torchrun.kill()
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
    try:
        start(recipe, ranks=Ranks(data=dist.group.WORLD))
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize("which", ["recipe", "data (train)"])
def test_a_rank_with_another_recipe_or_other_data_is_refused_at_the_start(which, tmp_path):
    tiny_raw(tmp_path)
    for message in run_on_ranks(2, _with_another, tmp_path, which):
        assert which in message
        assert "on rank 1 than on rank 0" in message
    assert not (tmp_path / "runs").exists()


def _versions(rank):
    try:
        Ranks(data=dist.group.WORLD).check_same({"version of torch": f"2.{rank}", "x": "y"}, "Install the same.")
    except ConfigurationError as error:
        return str(error)


def test_a_rank_with_another_version_is_refused():
    for message in run_on_ranks(2, _versions):
        assert message.startswith("needed the same version of torch on all 2 ranks")


def _starts(rank, folder, resume, changes):
    try:
        start(tiny_recipe(folder, **changes), ranks=Ranks(data=dist.group.WORLD), resume=resume)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("resume", "changes", "words"), [(False, {}, "name"), (True, {"seed": 1}, "seed")], ids=["taken", "another"]
)
def test_what_the_first_rank_alone_finds_in_the_folder_all_of_them_refuse(resume, changes, words, disturbed, tmp_path):
    shutil.copytree(disturbed[0], tmp_path, dirs_exist_ok=True)
    (kind, first), (other_kind, other) = run_on_ranks(2, _starts, tmp_path, resume, changes)
    assert kind == other_kind == "ConfigurationError"
    assert words in first
    assert other == first.replace(". ", " (on rank 0). ", 1)


def _full_disk(rank, root, full_on):
    import torch

    ranks = Ranks(data=dist.group.WORLD)
    saver = SharedSaver(root, keep=5, ranks=ranks)
    saver.save(block=1, step=1, tensors={"x": torch.ones(2)}, state={"ok": 1})
    saver.wait()
    plain = shared_checkpoint.write_pieces

    def write_pieces(folder, tensors, **options):
        if ranks.rank == full_on:
            raise OSError(28, "No space left on device")
        return plain(folder, tensors, **options)

    shared_checkpoint.write_pieces = write_pieces
    try:
        saver.save(block=2, step=2, tensors={"x": torch.ones(2)}, state={"ok": 2})
        saver.wait()
    except CheckpointError as error:
        return str(error)
    finally:
        shared_checkpoint.write_pieces = plain


@pytest.mark.parametrize("full_on", [0, 1])
def test_a_full_disk_on_one_rank_ends_all_and_the_last_checkpoint_holds(full_on, tmp_path):
    for message in run_on_ranks(2, _full_disk, tmp_path, full_on):
        assert f"on rank {full_on}" in message
        assert "No space left" in message
    assert [path.name for path in tmp_path.iterdir()] == ["block-000001-step-000001"]
    assert checkpoints.load_checkpoint(tmp_path).state == {"ok": 1}
