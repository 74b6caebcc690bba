"""A run's weights, optimizer state and random generators come back bit for bit from a checkpoint."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from logitless.errors import CheckpointError
from logitless.train.store.checkpoint import BackgroundSaver, load_checkpoint
from logitless.train.store.training_state import (
    optimizer_tensors,
    parameter_tensors,
    random_state,
    random_tensors,
    restore_optimizer,
    restore_parameters,
    restore_random,
)
from tests.train.tiny import assert_equal


def _save(root, tensors, state=None):
    saver = BackgroundSaver(root, keep=1)
    saver.save(block=0, step=1, tensors=tensors, state=state or {})
    saver.wait()


def _trained(seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    model.unused = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_weights_and_optimizer_go_on_as_if_they_had_not_stopped(tmp_path):
    model, optimizer = _trained(0)
    other, fresh = _trained(1)
    fresh.state.clear()
    named, others = dict(model.named_parameters()), dict(other.named_parameters())
    _save(tmp_path, parameter_tensors(named) | optimizer_tensors(named, optimizer))
    stored = load_checkpoint(tmp_path).tensors
    places = {name: parameter.data_ptr() for name, parameter in others.items()}
    restore_parameters(others, stored)
    restore_optimizer(others, fresh, stored)
    assert places == {name: parameter.data_ptr() for name, parameter in others.items()}, "no second model"
    for each, steps in ((model, optimizer), (other, fresh)):
        each.zero_grad()
        each(torch.tensor([1.0, -2.0, 0.5])).square().sum().backward()
        steps.step()
    assert_equal(named, others)


def test_frozen_weights_are_not_in_a_checkpoint():
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    assert list(parameter_tensors(dict(model.named_parameters()))) == ["parameter/bias"]


@pytest.mark.parametrize("change", ["shape", "name", "dtype", "missing"])
def test_a_checkpoint_of_another_model_is_refused_by_name(change):
    named = dict(nn.Linear(3, 2).named_parameters())
    tensors = parameter_tensors(named)
    weight = tensors.pop("parameter/weight")
    others = {"shape": torch.zeros(2, 4), "dtype": torch.zeros(2, 3, dtype=torch.bfloat16)}
    if change == "name":
        tensors["parameter/heavy"] = weight
    elif change in others:
        tensors["parameter/weight"] = others[change]
    with pytest.raises(CheckpointError, match="weight"):
        restore_parameters(named, tensors)


def test_every_random_generator_goes_on_where_it_was(tmp_path):
    def draw():
        return torch.rand(3).tolist(), random.random(), np.random.random(), np.random.standard_normal()

    np.random.standard_normal()  # leaves the second value of a pair behind
    tensors, state = random_tensors(), random_state()
    expected = draw()
    draw()
    _save(tmp_path, tensors, state)
    found = load_checkpoint(tmp_path)
    restore_random(found.tensors, found.state)
    assert draw() == expected
