"""When a run gives up: what counts, what is forgiven, and what the error says."""

from dataclasses import replace

import pytest

from logitless.errors import TrainingError
from logitless.train.collect.limits import SignalLimit, UnscoredLimit
from logitless.types import Verdict
from tests.train.groups import FINE, group_of
from tests.train.groups import verdicts_of as block

FAILED = Verdict(score=None, status="error", message="KeyError: 'answer'")
MISSING = Verdict(score=None, status="missing")


def test_blocks_without_a_signal_in_a_row_stop_the_run_and_one_with_starts_anew():
    limit, same = SignalLimit(max_blocks=2), block(FINE, FINE)
    limit.see(same, has_signal=False)
    limit.see(same, has_signal=True)
    limit.see(same, has_signal=False)
    with pytest.raises(TrainingError, match=r"none in 2 blocks \(train.max_blocks_without_signal\)"):
        limit.see(same, has_signal=False)


def test_blocks_without_a_score_are_not_called_blocks_whose_rewards_are_alike():
    with pytest.raises(TrainingError, match=r"with a score; given none .*'answer'\. Repair the reward"):
        SignalLimit(max_blocks=1).see(block(FAILED, FAILED), has_signal=False)


def test_blocks_with_too_many_failures_in_a_row_stop_the_run_and_the_first_failure_is_shown():
    limit = UnscoredLimit(max_fraction=0.5, max_blocks=2)
    limit.see(block(FAILED, FAILED, FINE))
    limit.see(block(FAILED, FINE))  # half is not more than half
    assert limit.in_a_row == 0
    limit.see(block(FAILED, FAILED, FINE))
    with pytest.raises(TrainingError, match=r"67% by .*2 blocks in a row. The first: KeyError: 'answer'"):
        limit.see(block(FAILED, FAILED, FINE))


def test_a_first_block_in_which_only_some_completions_raise_or_all_wait_does_not_stop_the_run():
    limit, late = UnscoredLimit(max_fraction=0.5, max_blocks=9), Verdict(score=None, status="timeout")
    limit.see(block(FAILED, FAILED, FINE), is_first=True)
    limit.see(block(late, late), is_first=True)
    UnscoredLimit(max_fraction=1.0, max_blocks=9).see(block(FAILED), is_first=True)
    limit.see(block(FAILED, FAILED))
    traced = replace(FAILED, traceback="Traceback")
    for failed, remedy in ((FAILED, r"Repair it\. "), (traced, "Repair it; its traceback is above")):
        with pytest.raises(TrainingError, match=remedy):
            limit.see(block(failed), is_first=True)
    with pytest.raises(TrainingError, match="an error at each of 2, the first by mine: KeyError: 'answer'"):
        limit.see(block(FAILED, FAILED), is_first=True)


def test_a_completion_that_another_function_judged_is_not_unscored_by_one_that_was_left_out():
    limit = UnscoredLimit(max_fraction=0.5, max_blocks=1)
    limit.see([group_of("7", [1.0, 1.0], mine=[FINE] * 2, other=[MISSING] * 2)])
    assert limit.in_a_row == 0


def test_a_reward_that_fails_at_the_few_completions_that_it_judges_stops_the_run():
    limit = UnscoredLimit(max_fraction=0.5, max_blocks=1)
    with pytest.raises(TrainingError, match="100% by rare"):
        limit.see([group_of("7", [1.0] * 9, mine=[FINE] * 9), group_of("8", [1.0], mine=[FINE], rare=[FAILED])])
