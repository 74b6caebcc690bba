"""KL control: each rule by hand, its bounds and its guardrail."""

import math

import pytest

from logitless.errors import CheckpointError, InputError
from logitless.objective.kl_control import FixedKL, KLController, LinearKL, ProportionalKL, ZieglerKL


@pytest.mark.parametrize(
    ("control", "kls", "num_completions", "expected"),
    [
        (FixedKL(0.3), (0.0, 5.0), 64, [0.3, 0.3]),
        # target 0.1, k 2: error (0.11 - 0.1) / 0.1 = 0.1 -> e^0.2; then -0.1 -> back
        (ProportionalKL(2.0, beta=1.0, target=0.1), (0.11, 0.09), 64, [math.exp(0.2), 1.0]),
        # the relative error is held within a fifth
        (ProportionalKL(1.0, beta=1.0, target=0.1), (0.2,), 64, [math.exp(0.2)]),
        (ProportionalKL(1.0, beta=1.0, target=0.1), (0.0,), 64, [math.exp(-0.2)]),
        (ProportionalKL(beta=1.0, target=0.05), (0.1,), 64, [math.exp(0.02)]),
        # 0.5 + 2 (0.07 - 0.05) = 0.54; then 0.54 + 2 (0 - 0.05) = 0.44; never below 0
        (LinearKL(2.0, beta=0.5, target=0.05), (0.07, 0.0), 64, [0.54, 0.44]),
        (LinearKL(1.0, beta=0.01, target=0.05, beta_min=0.0), (0.0,), 64, [0]),
        # KL 0.11, 250 completions, horizon 500: 1 + 0.1 / 2; the default horizon is 10,000
        (ZieglerKL(500.0, beta=2.0, target=0.1), (0.11,), 250, [2.1]),
        (ZieglerKL(beta=1.0, target=0.1), (0.11,), 1000, [1.01]),
        (ZieglerKL(1000.0, beta=1.0, target=0.1), (0.2,), 100, [1.02]),
        (ZieglerKL(1000.0, beta=1.0, target=0.1), (0.0,), 100, [0.98]),
    ],
)
def test_each_rule_by_hand(control, kls, num_completions, expected):
    controller = KLController(control)
    assert [controller.update(kl, num_completions) for kl in kls] == pytest.approx(expected)


def test_above_twice_the_target_beta_is_raised_by_half_at_once():
    controller = KLController(ProportionalKL(beta=0.2, target=0.05))
    assert controller.update(0.1001, 64) == pytest.approx(0.3)
    assert controller.num_guarded == 1
    assert controller.rollout_factor == 1


def test_at_twice_the_target_the_rule_still_holds():
    controller = KLController(ProportionalKL(beta=0.2, target=0.05))
    assert controller.update(0.1, 64) == pytest.approx(0.2 * math.exp(0.02))
    assert controller.num_guarded == 0


def test_the_guardrail_can_shorten_the_next_rollout_instead():
    controller = KLController(ProportionalKL(beta=0.2, target=0.05, guardrail="shorten_rollout"))
    assert controller.update(0.2, 64) == pytest.approx(0.2 * math.exp(0.02))
    assert (controller.rollout_factor, controller.num_guarded) == (0.5, 1)
    controller.update(0.05, 64)
    assert (controller.rollout_factor, controller.num_guarded) == (1, 1)


def test_the_guardrail_can_be_off():
    controller = KLController(LinearKL(beta=0.2, target=0.05, gain=0.1, guardrail=None))
    assert controller.update(1.05, 64) == pytest.approx(0.3)
    assert controller.num_guarded == 0


def test_beta_stays_within_its_bounds_and_the_held_updates_are_counted():
    controller = KLController(ProportionalKL(beta=1.0, target=0.05, gain=1.0, beta_min=0.9, beta_max=1.05))
    assert controller.update(0.0, 64) == 0.9
    assert controller.update(0.06, 64) == 1.05
    assert controller.num_bounded == 2
    assert controller.update(0.05, 64) == 1.05
    assert controller.update(1.0, 64) == 1.05  # the guardrail too
    assert controller.num_bounded == 3


@pytest.mark.parametrize("name", ["beta", "rollout_factor", "num_guarded", "num_bounded"])
def test_a_controller_starts_from_its_rule_alone(name):
    start = {"beta": 0.1, "rollout_factor": 1.0, "num_guarded": 0, "num_bounded": 0}
    assert KLController(FixedKL(0.1)).state_dict() == start
    with pytest.raises(TypeError, match=name):
        KLController(FixedKL(0.1), **{name: start[name]})


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_is_refused_and_changes_nothing(kl):
    controller = KLController(ProportionalKL(beta=0.2))
    with pytest.raises(InputError, match="finite mean KL"):
        controller.update(kl, 64)
    assert controller.beta == 0.2


def test_a_resumed_controller_goes_on_where_it_stopped():
    control = ProportionalKL(beta=0.2, guardrail="shorten_rollout", beta_max=0.201)
    controller, resumed = KLController(control), KLController(control)
    controller.update(9.0, 64)
    resumed.load_state_dict(controller.state_dict())
    assert controller.state_dict() == {"beta": 0.201, "rollout_factor": 0.5, "num_guarded": 1, "num_bounded": 1}
    assert resumed == controller
    assert resumed.update(0.04, 64) == controller.update(0.04, 64)


def test_a_state_with_other_names_is_refused():
    with pytest.raises(CheckpointError, match="given beta"):
        KLController(FixedKL(0.1)).load_state_dict({"beta": 1.0})
    with pytest.raises(CheckpointError, match="an empty one"):
        KLController(FixedKL(0.1)).load_state_dict({})
