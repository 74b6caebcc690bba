"""The value loss, by hand in value and gradient."""

import pytest
import torch

from logitless.errors import ConfigurationError
from logitless.objective.value import ValueLoss, clipped_value_loss, value_is_clipped, value_loss

# V_old 0, clip 0.5, R 2:   V = 1 (past the clip, nearing R), 0.25 (inside), -1 (past it, going away), 5 (over R)
VALUE = [1.0, 0.25, -1.0, 5.0]
OLD = torch.zeros(4, dtype=torch.float64)
TARGET = torch.full((4,), 2.0, dtype=torch.float64)


def test_clipped_value_loss_by_hand():
    # max of (V - 2)^2 and (clip(V) - 2)^2, halved: 1, 2.25 | both 3.0625 | 9, 6.25 | 9, 2.25
    loss = clipped_value_loss(torch.tensor(VALUE, dtype=torch.float64), OLD, TARGET, clip=0.5)
    assert loss.tolist() == [1.125, 1.53125, 4.5, 4.5]


def test_a_prediction_that_moved_far_enough_towards_its_target_has_no_gradient():
    value = torch.tensor(VALUE, dtype=torch.float64, requires_grad=True)
    clipped_value_loss(value, OLD, TARGET, clip=0.5).sum().backward()
    assert value.grad.tolist() == [0, -1.75, -3, 3]
    assert value_is_clipped(value, OLD, TARGET, clip=0.5).tolist() == [True, False, False, False]


def test_the_clip_is_around_the_old_prediction_on_both_sides():
    value = torch.tensor([3.0, 5.0, 3.9], dtype=torch.float64)
    old = torch.full((3,), 4.0, dtype=torch.float64)
    # clip 0.25 -> held 3.75, 4.25, 3.9; R = 0, 9, 4
    loss = clipped_value_loss(value, old, torch.tensor([0.0, 9.0, 4.0], dtype=torch.float64), clip=0.25)
    assert loss.tolist() == pytest.approx([3.75**2 / 2, 4.75**2 / 2, 0.005])


def test_value_loss_is_half_the_squared_error():
    value = torch.tensor([3.0, -1.0], requires_grad=True)
    loss = value_loss(value, torch.tensor([1.0, 0.0]))
    assert loss.tolist() == [2, 0.5]
    loss.sum().backward()
    assert value.grad.tolist() == [2, -1]


def test_neither_targets_nor_old_predictions_are_trained():
    value, old, target = (torch.tensor([x], requires_grad=True) for x in (1.0, 0.0, 2.0))
    clipped_value_loss(value, old, target, clip=0.5).sum().backward()
    value_loss(value, target).sum().backward()
    assert old.grad is None
    assert target.grad is None


@pytest.mark.parametrize("wrong", [{"coefficient": -0.1}, {"clip": 0.0}, {"clip": -1.0}])
def test_a_wrong_configuration_is_refused(wrong):
    with pytest.raises(ConfigurationError, match="value coefficient"):
        ValueLoss(**wrong)


def test_defaults():
    assert ValueLoss() == ValueLoss(coefficient=0.5, clip=0.2)
    assert ValueLoss(coefficient=0.0, clip=None).clip is None
