"""A run that was stopped, anywhere and in any way, ends as one that was not."""

import os
import signal
import time

import pytest
import torch

from logitless.errors import CheckpointError, ConfigurationError
from logitless.rollout.transformers import TransformersEngine
from logitless.train.record.run_folder import RunFolder
from logitless.train.run import start
from logitless.train.store import checkpoint as checkpoints
from tests import warm
from tests.train.interrupting import stop_at
from tests.train.tiny import assert_same_run, tiny_recipe


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> RunFolder:
    folder, complete = start(tiny_recipe(tmp_path_factory.mktemp("whole")))
    assert complete
    return folder


def test_the_same_run_twice_is_the_same_run(uninterrupted, tmp_path):
    assert_same_run(uninterrupted, start(tiny_recipe(tmp_path))[0])


# In an epoch, by Ctrl-C; at a block's end, by a scheduler; after a block's first step, by a closed terminal.
@pytest.mark.parametrize(("step", "number"), [(2, signal.SIGINT), (4, signal.SIGTERM), (5, signal.SIGHUP)])
def test_a_signal_saves_and_resume_continues_bitwise_however_long_a_save_takes(
    uninterrupted, tmp_path, monkeypatch, step, number
):
    plain = checkpoints.write_tensors

    def slow(path, tensors):
        time.sleep(0.1)
        return plain(path, tensors)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "write_tensors", slow)
        stop_at(step, patched, number)
        folder, complete = start(tiny_recipe(tmp_path), resume="auto")  # there is no run yet
    assert not complete
    assert folder.read_metrics()[-1]["step"] == step
    assert checkpoints.checkpoints(folder.checkpoints)[-1].name.endswith(f"step-{step:06d}")
    assert not folder.model.exists()
    for _ in range(2):  # a run that is complete stays so
        assert start(tiny_recipe(tmp_path), resume="auto") == (folder, True)
    assert_same_run(uninterrupted, folder)


def test_ctrl_c_while_rolling_out_leaves_no_trace(uninterrupted, tmp_path, monkeypatch):
    recipe, plain, calls = tiny_recipe(tmp_path), TransformersEngine.sample, []

    def sample(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 3:  # the initial evaluation, the first block, the second block
            signal.raise_signal(signal.SIGINT)
        return plain(self, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(TransformersEngine, "sample", sample)
        folder, complete = start(recipe)
    assert not complete
    start(recipe, resume=True)
    assert_same_run(uninterrupted, folder)


_KILLED_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
from logitless.train.store import checkpoint as checkpoints
from logitless.train.run import start
from tests.train.tiny import tiny_recipe
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


def test_lora_resumes_bitwise_after_a_merged_warm_start(tmp_path, monkeypatch):
    tiny_recipe(tmp_path)
    lora = {"rank": 2, "targets": ["q_proj", "v_proj", "down_proj"]}
    warm_start = {"data": {"name": "file", "path": str(tmp_path / "train.jsonl")}, "steps": 3}
    changes = {"model__lora": lora, "warm_start": warm_start}
    whole, _ = start(tiny_recipe(tmp_path, name="whole", **changes))
    with monkeypatch.context() as patched:
        stop_at(2, patched)
        stopped, _ = start(tiny_recipe(tmp_path, name="stopped", **changes))
    start(tiny_recipe(tmp_path, name="stopped", **changes), resume=True)
    assert_same_run(whole, stopped)


@pytest.mark.parametrize(
    ("changes", "resume", "match"),
    [
        ({}, False, "--resume"),
        ({"train__optimizer": {"learning_rate": 0.5}}, True, r"train\.optimizer"),
        ({"train__blocks": 2}, True, r"train\.blocks of at least 3"),
    ],
    ids=["another start", "another recipe", "fewer blocks"],
)
def test_a_run_is_neither_overwritten_nor_another_one(uninterrupted, changes, resume, match):
    home = uninterrupted.path.parents[1]
    with pytest.raises(ConfigurationError, match=match):
        start(tiny_recipe(home, **changes), resume=resume)


def test_a_full_disk_is_an_error_and_earlier_checkpoints_stay(tmp_path, monkeypatch):
    recipe, write, calls = tiny_recipe(tmp_path), checkpoints.write_tensors, []

    def full(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(checkpoints, "write_tensors", full)
    with pytest.raises(CheckpointError, match="No space left"):
        start(recipe)
    root = tmp_path / "runs" / "tiny" / "checkpoints"
    assert [path.name for path in checkpoints.checkpoints(root)] == ["block-000000-step-000000"]
    assert not list(root.glob(".saving-*"))


def test_a_finished_run_leaves_weights_that_load_with_transformers(uninterrupted):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(uninterrupted.model)
    assert loaded.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(uninterrupted.model).eos_token == "<eos>"
    trained = checkpoints.load_checkpoint(uninterrupted.checkpoints).tensors
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trained[f"parameter/{name}"]), name
