"""Credit by turn: numbers by hand, and the laws that tie it to advantages of whole completions."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.errors import ConfigurationError, InputError
from logitless.objective import advantage as adv
from logitless.objective.weighting import SequenceMean, Totals, TurnMean
from tests.objective.batches import double as f64

NAN = float("nan")


def inputs(turns, *, rewards, paid=None, group=None):
    """Completions whose turns have so many tokens each, all of one group unless it is said otherwise."""
    sequence = torch.tensor([i for i, of in enumerate(turns) for n in of for _ in range(n)])
    turn = torch.tensor([k for of in turns for k, n in enumerate(of) for _ in range(n)])
    return adv.AdvantageInputs(
        f64(*rewards),
        torch.zeros(len(turns), dtype=torch.long) if group is None else torch.tensor(group),
        sequence,
        turn=turn,
        turn_rewards=None if paid is None else f64(*(r for of in paid for r in of)),
    )


def test_a_turn_is_worth_what_comes_from_it_on_against_the_same_turn_of_the_others():
    # Returns with gamma 1/2. First: turn 1: 0 + 4 = 4, turn 0: 1 + 4/2 = 3. Second: turn 1: 2 + 0 = 2, turn 0: 0 + 1.
    # Third has one turn: 8. Turn 0: mean (3 + 1 + 8) / 3 = 4. Turn 1: mean (4 + 2) / 2 = 3.
    given = inputs([(2, 1), (1, 2), (1,)], rewards=(4.0, 0.0, 8.0), paid=[(1.0, 0.0), (0.0, 2.0), (0.0,)])
    found = adv.GroupTurns(gamma=0.5, standardize=False)(given).advantage
    torch.testing.assert_close(found, f64(-1, -1, 1, -3, -1, -1, 4))
    # Standard deviations: turn 0: sqrt((1 + 9 + 16) / 2) = sqrt(13); turn 1: sqrt(2).
    spread = adv.GroupTurns(gamma=0.5)(given).advantage
    first, second = 13**0.5 + 1e-4, 2**0.5 + 1e-4
    wanted = f64(-1 / first, -1 / first, 1 / second, -3 / first, -1 / second, -1 / second, 4 / first)
    torch.testing.assert_close(spread, wanted)


def test_groups_are_found_by_id_and_turns_are_not_compared_across_them():
    given = inputs([(1, 1)] * 6, rewards=(1.0, 10.0, 3.0, 30.0, 100.0, 300.0), group=[7, 2, 7, 2, 9, 9])
    found = adv.GroupTurns(standardize=False)(given).advantage
    torch.testing.assert_close(found, f64(-1, -1, -10, -10, 1, 1, 10, 10, -100, -100, 100, 100))


def test_what_a_kl_costs_inside_a_turn_counts_for_the_turn():
    given = replace(inputs([(2,), (2,)], rewards=(3.0, 1.0)), kl=f64(2, 1, 0, 0))
    found = adv.GroupTurns(standardize=False)(given).advantage  # returns 3 - 3 and 1
    torch.testing.assert_close(found, f64(-0.5, -0.5, 0.5, 0.5))


def test_a_completion_without_a_reward_has_no_advantage_and_enters_no_mean():
    given = inputs([(1, 1), (1, 1), (1, 1)], rewards=(1.0, NAN, 3.0))
    found = adv.GroupTurns(standardize=False)(given).advantage
    torch.testing.assert_close(found, f64(-1, -1, 0, 0, 1, 1))


def test_a_turn_that_no_other_has_is_not_pushed():
    given = inputs([(1, 1, 1), (1, 1)], rewards=(5.0, 1.0))
    torch.testing.assert_close(adv.GroupTurns(standardize=False)(given).advantage, f64(2, 2, 0, -2, -2))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.floats(-5, 5)), min_size=2, max_size=6), st.booleans())
def test_of_single_turns_it_is_the_groups_advantage(completions, standardize):
    given = inputs([(n,) for n, _ in completions], rewards=[r for _, r in completions])
    whole = adv.GroupStandardized() if standardize else adv.GroupCentered()
    torch.testing.assert_close(adv.GroupTurns(standardize=standardize)(given).advantage, whole(given).advantage)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=4), min_size=1, max_size=5))
def test_centred_advantages_of_one_turn_sum_to_zero_over_the_group(paid):
    given = inputs([(1,) * len(of) for of in paid], rewards=[0.0] * len(paid), paid=paid)
    found = adv.GroupTurns(standardize=False)(given).advantage
    for k in range(4):
        assert abs(float(found[given.turn == k].sum())) < 1e-9


def test_it_needs_turns_a_discount_that_is_one_and_others_to_compare_with():
    with pytest.raises(InputError, match="turn"):
        adv.GroupTurns()(replace(inputs([(1,), (1,)], rewards=(1.0, 2.0)), turn=None))
    with pytest.raises(ConfigurationError, match="gamma from 0 to 1"):
        adv.GroupTurns(gamma=1.5)
    assert adv.GroupTurns().compares_group
    assert adv.GroupTurns().level(kl_in_reward=True) == "turn"
    assert adv.GroupTurns(clip=0.5)(inputs([(1,), (1,)], rewards=(0.0, 9.0))).advantage.abs().max() == 0.5


def test_an_empty_batch_has_no_advantages():
    nothing = torch.zeros(0, dtype=torch.float64)
    given = adv.AdvantageInputs(nothing, nothing.long(), nothing.long(), turn=nothing.long())
    assert adv.GroupTurns()(given).advantage.tolist() == []


def test_every_turn_weighs_the_same_and_so_does_every_token_of_it():
    counts = (3, 1, 2)
    weight = TurnMean()(counts, Totals.of(counts))
    torch.testing.assert_close(weight, torch.tensor([1 / 9] * 3 + [1 / 3] + [1 / 6] * 2))
    assert TurnMean().counts_turns
    assert not SequenceMean().counts_turns
    assert TurnMean("block").spans_block
