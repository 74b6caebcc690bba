"""The entropy bonus and its controller."""

import math

import pytest
import torch

from logitless.errors import CheckpointError, InputError
from logitless.objective.entropy import AdaptiveEntropy, EntropyBonus, EntropyController, entropy_mean


def test_where_nothing_is_kept_the_mean_is_zero_and_has_no_gradient():
    entropy = torch.tensor([1.0, 2.0], requires_grad=True)
    kept = torch.tensor([False, False])
    mean = entropy_mean(entropy, torch.full((2,), 0.5), kept, renormalized=True)
    mean.backward()
    assert mean.item() == 0.0
    assert entropy.grad.tolist() == [0.0, 0.0]


def test_a_static_coefficient_never_moves():
    controller = EntropyController(EntropyBonus(0.01))
    for entropy in (0.1, 5.0):
        assert controller.applied == 0.01
        controller.update(entropy)


def test_an_adaptive_coefficient_rises_at_or_below_the_target_and_is_applied_there_only():
    controller = EntropyController(EntropyBonus(0.5, AdaptiveEntropy(1.0, 0.25, 0.25, 0.75)))
    history = [(controller.coefficient, controller.applied)]
    for entropy in (1.0, 0.9, 1.1, 1.1, 1.1):
        controller.update(entropy)
        history.append((controller.coefficient, controller.applied))
    # not applied before a measurement; up to the bound 0.75; down to the bound 0.25, not applied above the target
    assert history == [(0.5, 0.0), (0.75, 0.75), (0.75, 0.75), (0.5, 0.0), (0.25, 0.0), (0.25, 0.0)]


def test_bounds_that_meet_leave_the_target_to_switch_a_fixed_coefficient():
    controller = EntropyController(EntropyBonus(0.5, AdaptiveEntropy(1.0, 0.25, 0.5, 0.5)))
    applied = []
    for entropy in (0.9, 1.1):
        controller.update(entropy)
        applied.append(controller.applied)
    assert applied == [0.5, 0.0]


def test_a_controller_goes_on_from_its_state():
    bonus = EntropyBonus(0.5, AdaptiveEntropy(1.0, 0.25))
    controller, other = EntropyController(bonus), EntropyController(bonus)
    controller.update(0.5)
    other.load_state_dict(controller.state_dict())
    assert (other.coefficient, other.last_entropy, other.applied) == (0.75, 0.5, 0.75)
    with pytest.raises(CheckpointError, match="coefficient, last_entropy"):
        other.load_state_dict({"beta": 1.0})


def test_the_state_is_no_argument():
    with pytest.raises(TypeError, match="last_entropy"):
        EntropyController(EntropyBonus(0.1), last_entropy=0.0)
    with pytest.raises(TypeError, match="coefficient"):
        EntropyController(EntropyBonus(0.1), coefficient=0.0)


def test_an_entropy_that_is_not_finite_is_refused():
    with pytest.raises(InputError, match="finite"):
        EntropyController(EntropyBonus(0.01)).update(math.nan)
