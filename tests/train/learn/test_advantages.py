"""From groups to a block with advantages: numbers by hand, and the same prompt drawn twice."""

import math
from dataclasses import replace

import pytest
import torch

from logitless.errors import ConfigurationError
from logitless.objective.advantage import Gae, Gdpo, GroupCentered, GroupStandardized, LeaveOneOut, ReinforcePP
from logitless.train.block import pack_groups
from logitless.train.learn.block_metrics import advantages_of
from logitless.types import Completion, Group, Prompt, Verdict
from tests.train.groups import advantaged, group_of, judged


@pytest.mark.parametrize("estimator", [GroupStandardized(), GroupCentered(), LeaveOneOut()])
def test_advantages_sum_to_zero_in_each_group_whatever_the_prompts_are_called(estimator):
    groups = [group_of("907", [1.0, 1.0, 1.0, 9.0]), group_of("-3", [9.0, 1.0, 1.0, 1.0])]
    per_completion = advantages_of(advantaged(groups, estimator), judged(groups, [True, True]))
    for group, outlier in zip(per_completion, (3, 0), strict=True):
        assert math.fsum(group) == pytest.approx(0, abs=1e-5)
        assert max(group) == group[outlier] > 0
    # rewards 1 1 1 9: mean 3, Bessel-corrected standard deviation 4, to which 1e-4 is added
    if estimator == GroupStandardized():
        assert per_completion[0] == pytest.approx([x / 4.0001 for x in (-2, -2, -2, 6)], rel=1e-5)


def test_the_same_prompt_drawn_twice_makes_two_groups():
    first, second = group_of("7", [0.0, 2.0]), group_of("7", [0.0, 8.0])
    assert pack_groups([first, second]).groups == ((0, 1), (2, 3))
    batch = advantaged([first, second], GroupCentered())
    assert advantages_of(batch, judged([first, second], [True, True])) == [[-1.0, 1.0], [-4.0, 4.0]]


def test_a_loss_without_advantages_gets_zeros():
    assert advantaged([group_of("7", [1.0, 3.0])], None).advantage.tolist() == [0, 0, 0, 0]


def test_kl_in_the_reward_is_taken_from_a_completion_before_its_group_is_compared():
    options = {
        "logp_old": torch.tensor([-1.0, -1.0, -1.0, -1.0]),
        "logp_ref": torch.tensor([-2.0, -1.5, -1.0, -1.25]),
    }
    batch = advantaged([group_of("7", [5.0, 4.0])], GroupCentered(), kl_beta=2.0, **options)
    # k1 sums to 1.5 and 0.25 nat: rewards 5 - 3 and 4 - 0.5, mean 2.75
    assert batch.advantage.tolist() == [-0.75, -0.75, 0.75, 0.75]


def test_kl_in_the_reward_is_paid_token_by_token_where_returns_are_tokens():
    batch = advantaged(
        [group_of("7", [6.0, 1.0], lengths=[2, 1])],
        ReinforcePP(),
        kl_beta=2.0,
        logp_old=torch.tensor([-1.0, -1.0, -1.0]),
        logp_ref=torch.tensor([-2.0, -1.5, -1.0]),
    )
    # token rewards -2, 6 - 1, 1; returns 3, 5, 1: mean 3, standard deviation 2
    assert batch.advantage.tolist() == pytest.approx([0.0, 1.0, -1.0], abs=1e-3)


def test_a_kl_in_the_reward_is_part_of_the_return_that_values_are_fitted_to():
    batch = advantaged(
        [group_of("7", [6.0])],
        Gae(1.0, 0.5, whiten=False),
        kl_beta=2.0,
        logp_old=torch.tensor([-1.0, -1.0]),
        logp_ref=torch.tensor([-2.0, -1.5]),
        value_old=torch.tensor([1.0, 3.0]),
    )
    # rewards -2 and 6 - 1; deltas -2 + 3 - 1 = 0 and 5 - 3 = 2; advantages 0 + 2 / 2 and 2
    assert batch.advantage.tolist() == [1.0, 2.0]
    assert batch.value_target.tolist() == [2.0, 5.0]


TURN_VALUES = {"value_old": torch.tensor([1.0, 50.0, 4.0, 3.0, 50.0])}


def _two_turns() -> Group:
    """Three tokens in two turns with a tool's answer in between, and a completion of one turn."""
    prompt = Prompt("7", "p", (1, 2))
    first = Completion("7", (3, 4, 5, 6, 7), "", "stop", trained=(True, True, False, False, True), turn=(0, 0, 0, 1, 1))
    second = Completion("7", (3, 4), "", "stop")
    return Group(prompt, (first, second), ({}, {}), (8.0, 2.0))


def test_a_reward_of_several_turns_is_paid_once_at_the_last_token_of_the_last_turn():
    per_token = advantaged([_two_turns()], Gae(1.0, 1.0, whiten=False), **TURN_VALUES)
    assert per_token.packed.turn.tolist() == [0, 0, 1, 0, 0]
    assert per_token.value_target.tolist() == [8.0, 8.0, 8.0, 2.0, 2.0]  # undiscounted: the reward, not twice it


def test_gdpo_refuses_a_kl_in_the_reward_that_it_would_not_see():
    verdicts = {"a": [Verdict.graded(0.0), Verdict.graded(1.0)]}
    options = {"logp_old": torch.zeros(4), "logp_ref": -torch.ones(4), "weights": {"a": 1.0}}
    group = group_of("7", [0.0, 1.0], **verdicts)
    with pytest.raises(ConfigurationError, match=r"gdpo.*kl\.placement: loss"):
        advantaged([group], Gdpo(), kl_beta=0.5, **options)
    advantaged([group], Gdpo(), kl_beta=0.0, **options)


def test_gdpo_takes_the_functions_apart():
    verdicts = {
        "a": [Verdict.graded(0.0), Verdict.graded(1.0)],
        "b": [Verdict.graded(100.0), Verdict.graded(0.0)],
    }
    batch = advantaged([group_of("7", [0.0, 0.0], **verdicts)], Gdpo(), weights={"a": 2.0, "b": 1.0})
    # each function alone: -+0.707 and +-0.707; weighted -0.707 and +0.707, whitened
    assert batch.advantage.tolist() == pytest.approx([-0.7071, -0.7071, 0.7071, 0.7071], abs=1e-3)


def _paid_at_turns(turn_rewards, rewards) -> Group:
    return replace(_two_turns(), rewards=rewards, turn_rewards=turn_rewards)


def test_what_an_environment_paid_stays_with_its_turn_where_returns_are_tokens():
    group = _paid_at_turns(((3.0, 1.0), ()), (8.0, 2.0))  # 8 in all: 3, 1, and 4 for the answer
    batch = advantaged([group], Gae(1.0, 1.0, whiten=False), **TURN_VALUES)
    assert batch.value_target.tolist() == [8.0, 8.0, 5.0, 2.0, 2.0]  # after the first turn 5 are still to come


def test_what_an_environment_paid_counts_in_the_group_where_a_completion_has_one_advantage():
    group = _paid_at_turns(((3.0, 1.0), ()), (8.0, 2.0))
    batch = advantaged([group], GroupCentered(), **TURN_VALUES)
    assert batch.advantage.tolist() == [3.0, 3.0, 3.0, -3.0, -3.0]


def test_rewards_of_turns_are_refused_beside_an_estimator_that_would_not_see_them():
    group = _paid_at_turns(((3.0, 1.0), ()), (8.0, 2.0))
    with pytest.raises(ConfigurationError, match="gdpo"):
        advantaged([group], Gdpo(), **TURN_VALUES)
