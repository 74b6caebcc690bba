"""The controllers alone: which coefficient is in force, and when it moves."""

import math
from dataclasses import replace

import pytest
import torch

from logitless.objective.advantage import GroupCentered
from logitless.objective.entropy import AdaptiveEntropy, EntropyBonus
from logitless.objective.kl_control import ProportionalKL
from logitless.objective.presets import grpo
from logitless.train.learn.control import Controllers
from logitless.train.recipe.algorithm import KLInLoss, KLInReward
from logitless.types import TokenBatch
from tests.train.groups import advantaged, group_of

CONTROL = ProportionalKL(beta=0.05, target=0.05, gain=1.0, guardrail=None)
RAISED = 0.05 * math.exp(0.2)  # one update with a KL far above the target: the relative error is held at 0.2


def controllers(section=None, bonus=None) -> Controllers:
    algorithm = grpo()
    objective = replace(algorithm.objective, entropy_bonus=bonus)
    if section is not None and section.placement == "loss":
        objective = replace(objective, kl=section.penalty)
    changed = replace(
        algorithm,
        objective=objective,
        kl_control=None if section is None else section.control,
        kl_in_reward=section is not None and section.placement == "reward",
    )
    return Controllers(section, changed)


def in_loss(update="step") -> Controllers:
    return controllers(KLInLoss(placement="loss", control=CONTROL, update=update))


def drifted(first: float, second: float) -> TokenBatch:
    """Two completions of a token that the old policy likes better than the reference, by so much."""
    block = advantaged([group_of("7", [0.0, 1.0], [1, 1])], GroupCentered(), logp_ref=-torch.tensor([first, second]))
    return block.tokens(trained=torch.ones(2, dtype=torch.bool))


READ = drifted(0.0, 0.0), (0, 1)


def test_the_coefficient_is_where_the_recipe_puts_the_kl_and_nowhere_else():
    reward = controllers(KLInReward(placement="reward", control=CONTROL))
    assert (in_loss().beta_in_loss, in_loss().beta_in_reward) == (0.05, 0)
    assert (reward.beta_in_loss, reward.beta_in_reward) == (0, 0.05)
    none = controllers()
    assert (none.beta_in_loss, none.beta_in_reward, none.length_factor, none.entropy_coefficient) == (0, 0, 1.0, None)


def test_a_step_is_told_the_coefficient_it_was_taken_with_and_the_next_has_another():
    kept, record = in_loss(), {"kl_ref/k3_mean": 1.0}
    kept.after_step(record, *READ, taken=True)
    assert (record["kl_ref/beta"], record["kl_ref/controlled"]) == (0.05, 1.0)
    assert kept.beta_in_loss == pytest.approx(RAISED)


def test_once_an_epoch_it_moves_at_the_end_by_the_mean():
    kept = in_loss("epoch")
    for kl in (0.04, 0.06):  # their mean is the target
        kept.after_step({"kl_ref/k3_mean": kl}, *READ, taken=True)
    kept.end_epoch(4)
    assert kept.beta_in_loss == pytest.approx(0.05)
    kept.after_step({"kl_ref/k3_mean": 1.0}, *READ, taken=True)
    assert kept.beta_in_loss == pytest.approx(0.05)
    kept.end_epoch(4)
    assert kept.beta_in_loss == pytest.approx(RAISED)
    kept.end_epoch(4)  # nothing was seen since
    assert kept.beta_in_loss == pytest.approx(RAISED)


@pytest.mark.parametrize(("kl", "taken"), [(1.0, False), (math.inf, True)])
def test_a_step_that_was_skipped_or_overflowed_moves_nothing(kl, taken):
    kept = in_loss()
    kept.after_step({"kl_ref/k3_mean": kl}, *READ, taken=taken)
    assert kept.beta_in_loss == 0.05


def test_in_the_reward_it_sees_the_drift_of_the_tokens_that_were_drawn():
    kept, record = controllers(KLInReward(placement="reward", control=CONTROL)), {}
    kept.after_step(record, drifted(1.0, 3.0), [0, 1], taken=True)
    assert record["kl_ref/controlled"] == pytest.approx(2.0)
    assert kept.beta_in_reward == pytest.approx(RAISED)


def test_a_fixed_bonus_is_written_down_and_an_adaptive_one_moves():
    record = {"entropy/bonus_mean": 0.1}
    controllers(bonus=EntropyBonus(0.01)).after_step(record, *READ, taken=True)
    assert record["entropy/bonus_coefficient"] == 0.01
    adaptive = controllers(bonus=EntropyBonus(0.01, AdaptiveEntropy(target=1.0, delta=0.25)))
    before = adaptive.entropy_coefficient
    adaptive.after_step(record, *READ, taken=True)
    assert record["entropy/bonus_coefficient"] == before != adaptive.entropy_coefficient


def test_the_state_of_an_epoch_under_way_goes_on():
    kept, again = in_loss("epoch"), in_loss("epoch")
    kept.after_step({"kl_ref/k3_mean": 1.0}, *READ, taken=True)
    again.load_state_dict(kept.state_dict())
    for each in (kept, again):
        each.end_epoch(4)
    assert again.beta_in_loss == kept.beta_in_loss == pytest.approx(RAISED)
    assert again.state_dict() == kept.state_dict()
