"""The optimal token baseline by verl's numbers, and where there is nothing to compare."""

import pytest
import torch

from logitless.objective.advantage import AdvantageInputs, OptimalToken
from logitless.objective.advantage.token_baseline import optimal_token
from tests.objective.batches import double

NAN = torch.nan
SEQUENCE, GROUP = torch.tensor([0] * 4 + [1] * 3 + [2] * 3 + [3] * 5), torch.tensor([0, 0, 1, 1])
PROBABILITY = double(0.5, 0.9, 0.8, 0.1, 0.6, 0.2, 0.7, 0.4, 0.5, 0.1, 0.3, 0.3, 0.6, 0.9, 0.5)
SQUARES = double(0.4, 0.82, 0.7, 0.2, 0.5, 0.3, 0.6, 0.3, 0.5, 0.1, 0.25, 0.2, 0.5, 0.83, 0.4)
REWARDS = double(0, 0, 0, 1, 0.5, 0, 0.25, 0, 0, -1, 0, 0, 0, 0, 2)

# Of verl's compute_multi_turn_optimal_token_baseline_advantage (main, August 2026) with handle_zero_tail, on these
# numbers with masked columns between some of them; without such columns, where there is one turn, its
# compute_optimal_token_baseline_advantage gives the same.
OF_VERL = double(0.107142869898, 0.555555558299, 0.54687500236, 1, -0.142857130102, -0.194444441701, -0.20312499764)
OF_VERL = torch.cat([OF_VERL, double(-1.695652167864, -1.666666663704, -1.347826085948)])
OF_VERL = torch.cat([OF_VERL, double(1.304347832136, 1.333333336296, 1.652173914052, 2, 2)])


def _found(rewards=REWARDS, lone="return"):
    return optimal_token(rewards, GROUP, SEQUENCE, PROBABILITY.log(), SQUARES, lone)


def test_the_advantages_are_verls():
    torch.testing.assert_close(_found(), OF_VERL, rtol=0, atol=1e-11)


def test_a_place_that_one_completion_alone_reaches_has_advantage_0_unless_its_return_is_asked_for():
    lone = torch.zeros(15, dtype=torch.bool)
    lone[[3, 13, 14]] = True
    assert torch.equal(_found(lone="zero"), OptimalToken()(_inputs()).advantage)
    torch.testing.assert_close(_found(lone="zero"), OF_VERL.masked_fill(lone, 0), rtol=0, atol=1e-11)


def test_an_unscored_completion_is_in_no_baseline_and_its_advantage_is_0():
    found = _found(torch.where(SEQUENCE == 1, NAN, REWARDS), "zero")
    assert found[:7].tolist() == [0] * 7
    torch.testing.assert_close(found[7:], _found(lone="zero")[7:], rtol=0, atol=0)


def test_the_order_of_the_completions_changes_nothing():
    order = torch.cat([torch.arange(7, 15), torch.arange(7)])
    sequence = torch.tensor([0] * 3 + [1] * 5 + [2] * 4 + [3] * 3)
    logp = PROBABILITY.log()[order]
    moved = optimal_token(REWARDS[order], torch.tensor([5, 5, 1, 1]), sequence, logp, SQUARES[order], "return")
    torch.testing.assert_close(moved, _found()[order], rtol=1e-14, atol=0)


@pytest.mark.parametrize("missing", ["logp_old", "sum_squares"])
def test_what_the_scoring_pass_did_not_give_is_named(missing):
    with pytest.raises(Exception, match=f"{missing} for every token"):
        OptimalToken()(_inputs(**{missing: None}))


def _inputs(**changes):
    given = {
        "rewards": double(1, 0.25, -1, 2),
        "group": GROUP,
        "sequence": SEQUENCE,
        "turn": torch.zeros_like(SEQUENCE),
    }
    given |= {"turn_rewards": double(0, 0, 0, 0), "logp_old": PROBABILITY.log(), "sum_squares": SQUARES}
    given["turn"] = torch.where(
        torch.arange(15) > 4, 1, 0
    )  # the reward of 0.5 is at the second completion's first token
    given["turn_rewards"] = double(0, 0.5, 0, 0, 0)
    return AdvantageInputs(**given | changes)
