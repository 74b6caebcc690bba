"""Advantages that read columns of the data, against numbers of the code that they come from.

prime-rl is its commit 559b447, SPIRAL is spiral-rl/spiral a02d0ed.
"""

import math

import pytest
import torch

from logitless.errors import ConfigurationError, InputError
from logitless.objective.advantage import AdvantageInputs, Hierarchical, OptimalValue, Rae
from logitless.objective.advantage.by_column import hierarchical, optimal_value, rae
from logitless.objective.advantage.group_relative import group_centered
from tests.objective.batches import double

NAN = math.nan


def inputs(rewards, **columns) -> AdvantageInputs:
    """Completions of one token and one prompt each."""
    state = columns.pop("state", {})
    index = torch.arange(len(rewards))
    return AdvantageInputs(double(*rewards), index, index, columns=columns, state=state)


def test_a_role_is_compared_with_the_average_before_its_reward_counts_as_in_spiral_and_prime_rl():
    found, state = rae(double(1, -1, 1, 0.5, -0.25, 0), "abaaba", {})
    # both RAEAlgorithm.score_group and SPIRAL's EMA gave these, to the last bit
    assert found.tolist() == [1.0, -1.0, 0.95, 0.4024999999999999, -0.19999999999999996, -0.1176250000000001]
    assert state == {"a": 0.1117437500000001, "b": -0.06000000000000005}


def test_averages_go_on_from_block_to_block_as_in_one():
    rewards, roles = [1.0, 0.0, 1.0, 0.5], ["a", "b", "a", "b"]
    whole = Rae()(inputs(rewards, role=roles))
    first = Rae()(inputs(rewards[:3], role=roles[:3]))
    second = Rae()(inputs(rewards[3:], role=roles[3:], state=first.state))
    assert torch.equal(torch.cat([first.advantage, second.advantage]), whole.advantage)
    assert second.state == whole.state


def test_a_role_is_named_by_all_columns_together_and_an_unscored_completion_counts_nowhere():
    given = inputs([1.0, NAN, 1.0], game=["go", "go", "poker"], seat=[0, 0, 0])
    found = Rae(columns=("game", "seat"), decay=0.5)(given)
    assert found.advantage.tolist() == [1.0, 0.0, 1.0]
    assert found.state == {"go/0": 0.5, "poker/0": 0.5}
    with pytest.raises(InputError, match=r"column 'role' of each of 3 completions; given game, seat"):
        Rae()(given)


def test_solvers_are_compared_within_a_problem_and_proposers_within_a_task_as_prime_rl_says():
    rewards = [0.75, 1, 1, 0, 0.25, 0.5, 0, 1, 0.5]
    roles = ["proposer", *["solver"] * 3, "proposer", *["solver"] * 2, "proposer", "judge"]
    tasks = ["t"] * 7 + ["u", "t"]
    problems = [None, "a", "a", "a", None, "b", "b", None, None]
    of_prime_rl = [0.25, 1 / 3, 1 / 3, -2 / 3, -0.25, 0.25, -0.25]  # HierarchicalGRPOAlgorithm.score_group, of task t
    expected = [*of_prime_rl, 0, 0]
    found = Hierarchical()(inputs(rewards, role=roles, task=tasks, problem=problems)).advantage
    torch.testing.assert_close(found, double(*expected))


def test_without_roles_it_is_the_mean_of_the_group():
    rewards, tasks = double(1, 0, 2, 6, 4, NAN), ["t", "u", "t", "t", "u", "t"]
    found = hierarchical(rewards, ["one"] * 6, tasks, [""] * 6)
    assert torch.equal(found, group_centered(rewards, torch.tensor([0, 1, 0, 0, 1, 0])))


def test_the_optimal_value_lies_between_the_mean_and_the_largest_reward_of_the_reference():
    of_reference = double(0, 1, 1, 0).repeat(3, 1)
    values = [-float(optimal_value(double(0), of_reference[:1], beta)) for beta in (1e4, 0.5, 1e-3)]
    assert values[0] == pytest.approx(0.5, abs=1e-4)
    assert values[1] == pytest.approx(0.5 * math.log((1 + math.e**2) / 2))
    assert values[2] == pytest.approx(1.0, abs=1e-3)


def test_rewards_of_the_reference_may_be_fewer_for_some_prompts_but_not_none():
    given = inputs([1.0, NAN, 1.0], reference_rewards=[[1.0], [0.0], [1, 0]])
    expected = [0.0, 0.0, 1 - 0.5 * math.log((1 + math.e**2) / 2)]
    torch.testing.assert_close(OptimalValue()(given).advantage, double(*expected))
    with pytest.raises(InputError, match=r"a list of rewards in column 'reference_rewards'.*given \[\]"):
        OptimalValue()(inputs([1.0], reference_rewards=[[]]))


@pytest.mark.parametrize(
    "wrong",
    [lambda: Rae(columns=()), lambda: Rae(decay=1.5), lambda: Hierarchical(solvers=()), lambda: OptimalValue(beta=0.0)],
)
def test_what_cannot_be_meant_is_refused(wrong):
    with pytest.raises(ConfigurationError):
        wrong()
