"""The numbers of a block, by hand."""

import math
from dataclasses import replace

import pytest

from logitless.objective.advantage import GroupCentered
from logitless.train.learn.block_metrics import (
    advantage_metrics,
    advantages_of,
    block_metrics,
    lag_metrics,
    value_metrics,
    verdict_metrics,
)
from logitless.types import Verdict
from tests.train.groups import advantaged, group_of, judged

MISSING = Verdict(score=None, status="timeout")


def test_groups_left_out_and_completions_without_a_token_have_no_advantage():
    equal, differing = group_of("7", [1.0, 1.0]), group_of("7", [0.0, 2.0, 4.0], lengths=[1, 0, 3])
    batch = advantaged([differing], GroupCentered())
    assert advantages_of(batch, judged([equal, differing], [False, True])) == [[None, None], [-2.0, None, 2.0]]


def test_the_number_of_clipped_advantages_is_there_exactly_when_there_is_a_limit():
    assert "advantage/clipped" not in advantage_metrics([[1.0, 2.0]], GroupCentered())
    estimator = GroupCentered(clip=0.7)  # 0.7 is not a float32
    batch = advantaged([group_of("7", [0.0, 3.0, 1.5])], estimator)
    found = advantage_metrics(advantages_of(batch, judged([group_of("7", [0.0, 3.0, 1.5])])), estimator)
    assert found["advantage/clipped"] == 2
    assert found["advantage/mean"] == 0
    assert found["advantage/std"] == pytest.approx(0.7)


def test_without_values_there_are_no_numbers_of_them():
    assert value_metrics(advantaged([group_of("7", [1.0, 3.0])], GroupCentered())) == {}


def test_the_numbers_of_a_block_speak_of_everything_that_was_drawn():
    groups = [group_of("1", [1.0, 1.0], lengths=[0, 4]), group_of("2", [0.0, None], lengths=[2, 2])]
    found = block_metrics(judged(groups, [True, False], rounds=3), seconds=2.0)
    assert found["reward/mean"] == pytest.approx(2 / 3)
    assert found["reward/std"] == pytest.approx(math.sqrt(1 / 3))
    assert found["reward/unscored"] == 1
    assert found["group/zero_signal_fraction"] == 1.0
    assert (found["group/trained"], found["group/dropped"], found["group/refill_rounds"]) == (1, 1, 2)
    assert (found["length/mean"], found["length/min"], found["length/max"]) == (2, 0, 4)
    assert found["throughput/rollout_tokens_per_second"] == 8 / 2
    assert (found["length/empty"], found["length/truncated_fraction"], found["length/prompt_mean"]) == (1, 0, 2)


def test_the_lag_is_the_age_of_the_weights_that_drew_and_unknown_where_nobody_says():
    def drawn_with(*versions: int | None):
        group = group_of("1", [0.0] * len(versions))
        completions = [replace(c, weights_version=v) for c, v in zip(group.completions, versions, strict=True)]
        return judged([replace(group, completions=tuple(completions))])

    expected = {"rollout/lag_mean": 2.5, "rollout/lag_max": 4, "rollout/mixed_fraction": 0.0}
    assert lag_metrics(drawn_with(5, 2, None), version=6) == expected
    assert lag_metrics(drawn_with(None, None), version=6) == {}
    block = drawn_with(5, 2)
    [first, second] = block.sampled[0].completions
    mixed = replace(second, token_versions=(2,) * (second.length - 1) + (5,))
    block = replace(block, sampled=(replace(block.sampled[0], completions=(first, mixed)),))
    assert lag_metrics(block, version=6)["rollout/mixed_fraction"] == 0.5
    whole = first.length + second.length
    assert lag_metrics(block, version=6, by_token=True) == {
        "rollout/lag_mean": 2.5,
        "rollout/lag_max": 4,
        "rollout/mixed_fraction": 0.5,
        "rollout/token_lag_mean": (first.length + 4 * (second.length - 1) + 1) / whole,
        "rollout/lag_fraction/1": (first.length + 1) / whole,
        "rollout/lag_fraction/4": (second.length - 1) / whole,
    }


def test_a_block_that_nothing_could_score_has_no_mean_reward():
    found = block_metrics(judged([group_of("1", [None, None])], [False]), seconds=1.0)
    assert math.isnan(found["reward/mean"])
    assert found["reward/unscored"] == 2


def test_two_functions_that_check_one_constraint_share_its_pass_rate():
    def graded(*passed: bool) -> Verdict:
        return Verdict.graded(0.0, [("words:few", p) for p in passed])

    verdicts = {"a": [graded(True), graded(True)], "b": [graded(False, True), MISSING]}
    found = verdict_metrics([group_of("1", [0.0, 0.0], **verdicts)])
    assert (found["constraint/words:few/count"], found["constraint/words:few/pass_rate"]) == (4, 0.75)
    assert (found["constraint_family/words/count"], found["constraint_family/words/pass_rate"]) == (4, 0.75)
    assert (found["verdict/b/graded"], found["verdict/b/timeout"]) == (1, 1)
