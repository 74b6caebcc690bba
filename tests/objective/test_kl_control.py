"""KL control: each rule by hand, its bounds and its guardrail."""

import math
from typing import Annotated, get_args

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from logitless.errors import CheckpointError, ConfigurationError, InputError
from logitless.objective.kl_control import (
    FixedKL,
    KLControl,
    KLController,
    LinearKL,
    ProportionalKL,
    ZieglerKL,
)


def betas(control, *kls, num_completions=64):
    controller = KLController(control)
    return [controller.update(kl, num_completions) for kl in kls]


def test_fixed_stays():
    assert betas(FixedKL(0.3), 0.0, 5.0) == [0.3, 0.3]
    assert KLController(FixedKL(0.0)).beta == 0


def test_proportional_by_hand():
    # target 0.1, k 2: error (0.11 - 0.1) / 0.1 = 0.1 -> e^0.2; then -0.1 -> back.
    assert betas(ProportionalKL(beta=1.0, target=0.1, gain=2.0), 0.11, 0.09) == pytest.approx([math.exp(0.2), 1.0])


def test_the_relative_error_is_held_within_a_fifth():
    proportional = ProportionalKL(beta=1.0, target=0.1, gain=1.0)
    assert betas(proportional, 0.2) == pytest.approx([math.exp(0.2)])
    assert betas(proportional, 0.0) == pytest.approx([math.exp(-0.2)])
    ziegler = ZieglerKL(beta=1.0, target=0.1, horizon=1000.0)
    assert betas(ziegler, 0.2, num_completions=100) == pytest.approx([1.02])
    assert betas(ziegler, 0.0, num_completions=100) == pytest.approx([0.98])


def test_the_default_gain_moves_beta_by_two_percent_at_most():
    assert betas(ProportionalKL(beta=1.0, target=0.05), 0.1) == pytest.approx([math.exp(0.02)])


def test_linear_by_hand():
    # 0.5 + 2 (0.07 - 0.05) = 0.54; then 0.54 + 2 (0 - 0.05) = 0.44
    assert betas(LinearKL(beta=0.5, target=0.05, gain=2.0), 0.07, 0.0) == pytest.approx([0.54, 0.44])


def test_linear_never_goes_below_zero():
    assert betas(LinearKL(beta=0.01, target=0.05, gain=1.0, beta_min=0.0), 0.0) == [0]


def test_ziegler_by_hand():
    # target 0.1, KL 0.11, 250 completions, horizon 500: 1 + 0.1 / 2
    assert betas(ZieglerKL(beta=2.0, target=0.1, horizon=500.0), 0.11, num_completions=250) == pytest.approx([2.1])


def test_ziegler_s_default_horizon_is_ten_thousand_completions():
    assert betas(ZieglerKL(beta=1.0, target=0.1), 0.11, num_completions=1000) == pytest.approx([1.01])


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


def test_a_hundred_steps_at_twice_the_target_do_not_explode():
    # k = 1 gives e^20 = 4.9e8; the default gives e^2.
    assert betas(ProportionalKL(beta=0.05, target=0.05), *[0.1] * 100)[-1] == pytest.approx(0.05 * math.exp(2))


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


def test_the_state_of_something_else_is_refused():
    with pytest.raises(CheckpointError, match="given beta"):
        KLController(FixedKL(0.1)).load_state_dict({"beta": 1.0})
    with pytest.raises(CheckpointError, match="an empty one"):
        KLController(FixedKL(0.1)).load_state_dict({})


adapter = TypeAdapter(Annotated[KLControl, Field(discriminator="name")])


def test_every_rule_is_chosen_by_name():
    for kind in get_args(KLControl):
        assert adapter.validate_python({"name": kind.name, "beta": 0.3}) == kind(beta=0.3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "fixed", "beta": 0.1, "target": 0.05}, "Unexpected keyword argument"),
        ({"name": "linear", "horizon": 5}, "Unexpected keyword argument"),
        ({"name": "fixed", "beta": -0.1}, "beta of at least 0"),
        ({"name": "proportional", "target": 0}, "positive KL target"),
        ({"name": "proportional", "gain": 0}, "positive gain"),
        ({"name": "linear", "gain": 0}, "positive gain"),
        ({"name": "ziegler", "horizon": 0}, "positive horizon"),
        ({"name": "proportional", "beta": 0, "beta_min": 0}, "positive beta"),
        ({"name": "ziegler", "beta": 0, "beta_min": 0}, "positive beta"),
        ({"name": "linear", "beta_min": -0.1}, "0 <= beta_min"),
        ({"name": "linear", "beta": 0.1, "beta_min": 0.2}, "0 <= beta_min"),
        ({"name": "ziegler", "beta": 11}, "0 <= beta_min"),
        ({"name": "ziegler", "target": -1}, "positive KL target"),
        ({"name": "linear", "target": -1}, "positive KL target"),
        ({"name": "linear", "guardrail": "stop"}, "'raise_beta' or 'shorten_rollout'"),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong(config, message):
    with pytest.raises(ValidationError, match=message):
        adapter.validate_python(config)


def test_bounds_may_be_touched():
    assert LinearKL(beta=0.0, beta_min=0.0, beta_max=0.0).beta == 0
    assert ZieglerKL(horizon=1.0).horizon == 1
    with pytest.raises(ConfigurationError, match="KL control"):
        FixedKL(-1.0)


def test_defaults():
    control = LinearKL()
    assert (control.target, control.beta, control.beta_min, control.beta_max) == (0.05, 0.05, 1e-4, 10)
    assert (control.guardrail, control.gain, ProportionalKL().gain, ZieglerKL().horizon) == (
        "raise_beta",
        0.1,
        0.1,
        1e4,
    )
