"""A run that was stopped, anywhere and in any way, ends as one that was not."""

import json
import math
import os
import signal
import time

import pytest

from logitless.errors import ConfigurationError
from logitless.rollout.transformers import TransformersEngine
from logitless.train.record.run_folder import RunFolder
from logitless.train.store import checkpoint as checkpoints
from tests import warm
from tests.train.interrupting import before, stopped_at
from tests.train.tiny import assert_same_run, finished_run, start, tiny_recipe, warm_start


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> RunFolder:
    return finished_run(tmp_path_factory.mktemp("whole"))


def test_the_same_run_twice_is_the_same_run(uninterrupted, tmp_path):
    assert_same_run(uninterrupted, start(tiny_recipe(tmp_path))[0])


# In an epoch, by Ctrl-C; at a block's end, by a scheduler; after a block's first step, by a closed terminal.
@pytest.mark.parametrize(("step", "number"), [(2, signal.SIGINT), (4, signal.SIGTERM), (5, signal.SIGHUP)])
def test_a_signal_saves_and_resume_continues_bitwise_however_long_a_save_takes(
    uninterrupted, tmp_path, monkeypatch, step, number
):
    with monkeypatch.context() as patched:
        before(patched, checkpoints, "write_tensors", lambda *_: time.sleep(0.1))
        folder = stopped_at(step, tiny_recipe(tmp_path), number, resume="auto")  # there is no run yet
    assert folder.read_metrics()[-1]["step"] == step
    assert checkpoints.checkpoints(folder.checkpoints)[-1].name.endswith(f"step-{step:06d}")
    assert not folder.model.exists()
    for _ in range(2):  # a run that is complete stays so
        assert start(tiny_recipe(tmp_path), resume="auto") == (folder, True)
    assert_same_run(uninterrupted, folder)


# 1: the first evaluation, 3: the second block, 4: the evaluation after it, 6: the one after the last block.
@pytest.mark.parametrize("call", [1, 3, 4, 6])
def test_ctrl_c_while_sampling_leaves_no_trace(uninterrupted, tmp_path, monkeypatch, call):
    recipe, calls = tiny_recipe(tmp_path), []

    def pressed(*arguments, **options):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        before(patched, TransformersEngine, "sample", pressed)
        folder, complete = start(recipe)
    assert not complete
    start(recipe, resume=True)
    assert_same_run(uninterrupted, folder)


def test_ctrl_c_while_rollouts_are_written_counts_no_completion_twice(uninterrupted, tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path, checkpoint__every_blocks=2)  # none after the first block, but at the signal

    def pressed(_, block, *__):
        if block == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        before(patched, RunFolder, "write_rollouts", pressed)
        assert not start(recipe)[1]
    folder, _ = start(recipe, resume=True)
    assert_same_run(uninterrupted, folder)
    counted = [json.loads(each.summary.read_text())["completions"] for each in (uninterrupted, folder)]
    assert counted == [48, 48]


def test_the_seconds_of_a_resumed_run_are_those_of_both_processes_to_their_ends(tmp_path, monkeypatch):
    def seconds_of(folder):
        return json.loads(folder.summary.read_text())["seconds"]

    monkeypatch.setattr("logitless.train.run.write_report", lambda _: time.sleep(0.05))  # after the last checkpoint
    folder = stopped_at(2, tiny_recipe(tmp_path))
    first, began = seconds_of(folder), time.perf_counter()
    start(tiny_recipe(tmp_path), resume=True)
    took, both = time.perf_counter() - began, seconds_of(folder)
    assert both["report"] >= first["report"] + 0.05 >= 0.1
    assert all(both[name] >= seconds for name, seconds in first.items())
    assert 0.9 * took < math.fsum(both.values()) - math.fsum(first.values()) <= took


_KILLED_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
from logitless.train.store import checkpoint as checkpoints
from tests.train.tiny import start, tiny_recipe
import torch
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
write, calls = checkpoints.write_flushed, []
def dying_write(path, content):
    write(path, content)
    calls.append(path)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoints.write_flushed = dying_write
start(tiny_recipe(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_kill_9_during_a_save_loses_nothing_that_was_saved(uninterrupted, tmp_path):
    killed = warm.run("-c", _KILLED_WHILE_SAVING, str(tmp_path), environment=os.environ)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = RunFolder(tmp_path / "runs" / "tiny")
    assert list(folder.checkpoints.glob(".saving-*"))
    start(tiny_recipe(tmp_path), resume=True)
    assert not list(folder.checkpoints.glob(".saving-*"))
    assert_same_run(uninterrupted, folder)


def test_lora_resumes_bitwise_after_a_merged_warm_start(tmp_path):
    lora = {"rank": 2, "targets": ["q_proj", "v_proj", "down_proj"]}
    changes = {"model__lora": lora, "warm_start": warm_start(tmp_path)}
    whole = finished_run(tmp_path, name="whole", **changes)
    stopped_at(2, tiny_recipe(tmp_path, name="stopped", **changes))
    assert_same_run(whole, finished_run(tmp_path, resume=True, name="stopped", **changes))


@pytest.mark.parametrize("step", [2, 4])  # in the middle of a block, and at its end
def test_moving_averages_of_rewards_are_in_a_checkpoint(tmp_path, step):
    changes = {"algorithm__advantage": {"name": "rae", "columns": ["answer"]}}
    whole = finished_run(tmp_path, name="whole", **changes)
    stopped_at(step, tiny_recipe(tmp_path, name="stopped", **changes))
    again = finished_run(tmp_path, resume=True, name="stopped", **changes)
    assert_same_run(whole, again)
    assert len(again.read_metrics()) > 4


def test_a_run_does_not_become_a_shorter_one(uninterrupted):
    home = uninterrupted.path.parents[1]
    with pytest.raises(ConfigurationError, match=r"train\.blocks of at least 3"):
        start(tiny_recipe(home, train__blocks=2), resume=True)
