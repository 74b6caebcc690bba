"""What is saved comes back bit for bit; a checkpoint is there as a whole or not at all."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from logitless.errors import CheckpointError
from logitless.train import checkpoint as checkpoints
from logitless.train.checkpoint import checkpoints as complete
from logitless.train.checkpoint import load_checkpoint, save_checkpoint


def _save(root, step, *, keep=10, tensors=None, state=None):
    return save_checkpoint(
        root,
        step,
        save_model=lambda folder: (folder / "weights").write_text(f"of step {step}"),
        tensors=tensors or {"a": torch.tensor([step])},
        state=state or {"step": step},
        keep=keep,
    )


def test_the_latest_checkpoint_is_read_back(tmp_path):
    value = torch.tensor([[0.1, float("inf")]], dtype=torch.float64).T  # not contiguous
    _save(tmp_path, 2)
    _save(tmp_path, 10, tensors={"x/y.z": value}, state={"beta": 0.1, "list": [1, None]})
    found = load_checkpoint(tmp_path)
    assert found.folder.name == "step-000010"
    assert torch.equal(found.tensors["x/y.z"], value)
    assert found.state == {"beta": 0.1, "list": [1, None]}
    assert (found.folder / "model" / "weights").read_text() == "of step 10"


def test_only_the_latest_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        _save(tmp_path, step, keep=2)
    assert [path.name for path in complete(tmp_path)] == ["step-000003", "step-000004"]


def test_a_step_that_is_saved_already_is_left_as_it_is(tmp_path):
    _save(tmp_path, 1)
    _save(tmp_path, 1, state={"step": "another"})
    assert load_checkpoint(tmp_path).state == {"step": 1}


def test_remains_of_an_interrupted_save_are_neither_read_nor_kept(tmp_path):
    _save(tmp_path, 1)
    partial = tmp_path / ".saving-step-000002"
    (partial / "model").mkdir(parents=True)
    assert load_checkpoint(tmp_path).folder.name == "step-000001"
    assert not partial.exists()


def test_a_save_that_fails_leaves_earlier_ones_and_no_remains(tmp_path):
    _save(tmp_path, 1)

    def full(folder):
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        save_checkpoint(tmp_path, 2, save_model=full, tensors={}, state={}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_no_checkpoint_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(CheckpointError, match="Start without --resume"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_damaged_checkpoint_is_named_and_not_half_used(tmp_path, name, damage):
    path = _save(tmp_path, 1) / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:5])
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"step-000001.*Delete this checkpoint"):
        load_checkpoint(tmp_path)


def _trained(seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    model.unused = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_the_optimizer_goes_on_as_if_it_had_not_stopped(tmp_path):
    model, optimizer = _trained(0)
    other, fresh = _trained(1)
    other.load_state_dict(model.state_dict())
    fresh.state.clear()
    _save(tmp_path, 1, tensors=checkpoints.optimizer_tensors(dict(model.named_parameters()), optimizer))
    checkpoints.restore_optimizer(dict(other.named_parameters()), fresh, load_checkpoint(tmp_path).tensors)
    for each, steps in ((model, optimizer), (other, fresh)):
        each.zero_grad()
        each(torch.tensor([1.0, -2.0, 0.5])).square().sum().backward()
        steps.step()
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


def test_every_random_generator_goes_on_where_it_was(tmp_path):
    def draw():
        return torch.rand(3).tolist(), random.random(), np.random.random(), np.random.standard_normal()

    np.random.standard_normal()  # leaves the second value of a pair behind
    tensors, state = checkpoints.random_tensors(), checkpoints.random_state()
    expected = draw()
    draw()
    _save(tmp_path, 1, tensors=tensors, state=state)
    found = load_checkpoint(tmp_path)
    checkpoints.restore_random(found.tensors, found.state)
    assert draw() == expected
