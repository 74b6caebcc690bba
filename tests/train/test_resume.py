"""A run that was stopped, anywhere and in any way, ends as one that was not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from logitless.errors import CheckpointError, ConfigurationError
from logitless.train import checkpoint as checkpoints
from logitless.train.metrics import repeatable
from logitless.train.run import start
from logitless.train.run_folder import RunFolder
from tests.train.interrupting import stop_at
from tests.train.tiny import tiny_recipe


def _assert_equal(one: RunFolder, other: RunFolder) -> None:
    """Weights, optimizer and random state bit for bit; metrics and rollouts number for number."""
    ends = [checkpoints.load_checkpoint(folder.checkpoints) for folder in (one, other)]
    assert ends[0].folder.name == ends[1].folder.name
    assert ends[0].tensors.keys() == ends[1].tensors.keys()
    for name, tensor in ends[0].tensors.items():
        assert torch.equal(tensor, ends[1].tensors[name]), name
    assert [repeatable(r) for r in one.read_metrics()] == [repeatable(r) for r in other.read_metrics()]
    assert list(one.read_rollouts()) == list(other.read_rollouts())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> RunFolder:
    torch.use_deterministic_algorithms(True)  # as every test has it
    folder, complete = start(tiny_recipe(tmp_path_factory.mktemp("whole")))
    assert complete
    return folder


def test_the_same_run_twice_is_the_same_run(uninterrupted, tmp_path):
    folder, _ = start(tiny_recipe(tmp_path))
    _assert_equal(uninterrupted, folder)


@pytest.mark.parametrize("step", [2, 4, 5])  # in an epoch, at a block's end, after a block's first step
def test_ctrl_c_saves_and_resume_continues_bitwise(uninterrupted, tmp_path, monkeypatch, step):
    recipe = tiny_recipe(tmp_path)
    with monkeypatch.context() as patched:
        stop_at(step, patched)
        folder, complete = start(recipe)
    assert not complete
    assert folder.read_metrics()[-1]["step"] == step
    _, complete = start(recipe, resume=True)
    assert complete
    _assert_equal(uninterrupted, folder)


def test_ctrl_c_while_rolling_out_leaves_no_trace(uninterrupted, tmp_path, monkeypatch):
    from logitless.rollout.transformers import TransformersEngine

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
    _assert_equal(uninterrupted, folder)


_KILLED_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
from logitless.train import checkpoint as checkpoints
from logitless.train.run import start
from tests.train.tiny import tiny_recipe
import torch
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
write, calls = checkpoints._write_file, []
def dying_write(path, content):
    write(path, content)
    calls.append(path)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoints._write_file = dying_write
start(tiny_recipe(Path(sys.argv[1])))
"""


def test_kill_9_during_a_save_loses_nothing_that_was_saved(uninterrupted, tmp_path):
    child = subprocess.run(
        [sys.executable, "-c", _KILLED_WHILE_SAVING, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    folder = RunFolder(tmp_path / "runs" / "tiny")
    assert list(folder.checkpoints.glob(".saving-*"))
    start(tiny_recipe(tmp_path), resume=True)
    assert not list(folder.checkpoints.glob(".saving-*"))
    _assert_equal(uninterrupted, folder)


def test_lora_resumes_bitwise_after_a_merged_warm_start(tmp_path, monkeypatch):
    def recipe(name: str):
        return tiny_recipe(
            tmp_path,
            name=name,
            model__lora={"rank": 2, "targets": ["q_proj", "v_proj", "down_proj"]},
            warm_start={"data": {"name": "file", "path": str(tmp_path / "train.jsonl")}, "steps": 3},
        )

    whole, _ = start(recipe("whole"))
    with monkeypatch.context() as patched:
        stop_at(2, patched)
        stopped, _ = start(recipe("stopped"))
    start(recipe("stopped"), resume=True)
    ends = [checkpoints.load_checkpoint(folder.checkpoints) for folder in (whole, stopped)]
    for name, tensor in ends[0].tensors.items():
        assert torch.equal(tensor, ends[1].tensors[name]), name
    assert [repeatable(r) for r in whole.read_metrics()] == [repeatable(r) for r in stopped.read_metrics()]


def test_an_existing_run_is_not_overwritten(tmp_path):
    recipe = tiny_recipe(tmp_path, train__blocks=1, kl=None)
    start(recipe)
    with pytest.raises(ConfigurationError, match=r"--resume"):
        start(recipe)


def test_resuming_with_another_recipe_names_what_changed(tmp_path):
    start(tiny_recipe(tmp_path, train__blocks=1, kl=None))
    with pytest.raises(ConfigurationError, match=r"train\.optimizer"):
        start(tiny_recipe(tmp_path, train__blocks=1, kl=None, train__optimizer={"learning_rate": 0.5}), resume=True)


def test_resume_auto_starts_a_run_that_is_not_there_and_goes_on_with_one_that_is(uninterrupted, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        stop_at(5, patched)
        folder, complete = start(tiny_recipe(tmp_path), resume="auto")
    assert not complete
    for _ in range(2):  # a run that is complete stays so
        assert start(tiny_recipe(tmp_path), resume="auto") == (folder, True)
    _assert_equal(uninterrupted, folder)


def test_a_longer_run_of_the_same_recipe_may_be_resumed(tmp_path):
    start(tiny_recipe(tmp_path, train__blocks=1, kl=None))
    folder, complete = start(tiny_recipe(tmp_path, train__blocks=2, kl=None), resume=True)
    assert complete
    assert folder.read_metrics()[-1]["block"] == 2


def test_a_shorter_run_than_was_trained_is_refused_on_resume(tmp_path):
    start(tiny_recipe(tmp_path, train__blocks=2, kl=None))
    with pytest.raises(ConfigurationError, match=r"train\.blocks of at least 2"):
        start(tiny_recipe(tmp_path, train__blocks=1, kl=None), resume=True)


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


def test_old_checkpoints_are_removed_and_a_finished_run_leaves_weights_that_load_with_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = start(tiny_recipe(tmp_path, checkpoint__keep=2, kl=None))
    left = checkpoints.checkpoints(folder.checkpoints)
    assert len(left) == 2
    loaded = AutoModelForCausalLM.from_pretrained(folder.model)
    assert loaded.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(folder.model).eos_token == "<eos>"
    trained = checkpoints.read_checkpoint(left[-1]).tensors
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trained[f"parameter/{name}"]), name
