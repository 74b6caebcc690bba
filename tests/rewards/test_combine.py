import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.errors import ConfigurationError, InputError
from logitless.rewards.combine import (
    check_names,
    reward_statistics,
    score_batch,
    total_reward,
    weighted,
    weighted_sum,
)
from logitless.rewards.reward import WeightedReward
from logitless.rewards.text.exact import Exact
from logitless.rewards.text.gate import MinimumLength
from logitless.rewards.text.length import Length
from logitless.types import Verdict

TIMEOUT = Verdict(score=None, status="timeout", message="over 2 s")
MISSING = Verdict(score=None, status="missing", message="no data")
ERROR = Verdict(score=None, status="error", message="raised")


def test_the_sum_takes_every_score_times_its_weight():
    verdicts = {"a": Verdict.graded(0.5), "b": Verdict.graded(-2.0), "unused": Verdict.graded(9.0)}
    assert weighted_sum(verdicts, {"a": 4.0, "b": 0.25}) == 4.0 * 0.5 - 0.25 * 2.0


@pytest.mark.parametrize("unscored", [TIMEOUT, MISSING, ERROR])
def test_a_verdict_without_a_score_is_left_out_or_drops_the_completion_but_never_counts_as_zero(unscored):
    verdicts = {"a": Verdict.graded(1.0), "b": unscored}
    weights = {"a": 0.5, "b": 10.0}
    assert weighted_sum(verdicts, weights) == 0.5
    assert weighted_sum(verdicts, weights, unscored="drop") is None
    assert weighted_sum({"b": unscored}, {"b": 1.0}) is None


def test_a_shut_gate_makes_the_reward_zero_even_where_the_sum_is_negative():
    verdicts = {"a": Verdict.graded(-3.0), "gate": Verdict.graded(0.0), "other": Verdict.graded(1.0)}
    assert weighted_sum(verdicts, {"a": 1.0}, gates=["other"]) == -3.0
    assert weighted_sum(verdicts, {"a": 1.0}, gates=["gate", "other"]) == 0.0


def test_a_gate_without_a_score_leaves_the_reward_unknown():
    assert weighted_sum({"a": Verdict.graded(1.0), "gate": TIMEOUT}, {"a": 1.0}, gates=["gate"]) is None


def test_a_shut_gate_does_not_score_what_is_unscored():
    assert weighted_sum({"a": TIMEOUT, "gate": Verdict.graded(0.0)}, {"a": 1.0}, gates=["gate"]) is None


def test_a_weight_or_gate_without_a_verdict_is_refused():
    with pytest.raises(InputError, match="\\['b'\\]"):
        weighted_sum({"a": MISSING}, {"a": 1.0, "b": 1.0})
    with pytest.raises(InputError, match="\\['gate'\\]"):
        weighted_sum({"a": MISSING}, {"a": 1.0}, gates=["gate"])


def test_several_rewards_and_a_gate_from_entries_of_a_recipe():
    rewards = weighted([Exact(weight=2.0), Length(unit="words", cap=9, weight=0.1), MinimumLength(minimum=2)])
    completions = ["Paris", "in Paris", "Paris it is"]
    verdicts = score_batch(rewards, ["Capital?"] * 3, completions, {"answer": ["Paris", "in Paris", "Rome"]})
    assert [list(row) for row in verdicts] == [["exact", "length", "minimum_length"]] * 3
    assert [row["exact"].score for row in verdicts] == [1.0, 1.0, 0.0]
    assert [total_reward(row, rewards) for row in verdicts] == [0.0, 2.0 + 0.2, pytest.approx(0.3)]


def test_names_must_differ_and_labels_make_them():
    twice = [Exact(), Exact(column="other")]
    with pytest.raises(ConfigurationError, match="'exact' more than once"):
        weighted(twice)
    with pytest.raises(ConfigurationError, match="'exact' more than once"):
        check_names([WeightedReward(reward) for reward in twice])
    assert [entry.name for entry in weighted([Exact(), Exact(label="second")])] == ["exact", "second"]


def test_gates_alone_are_refused():
    with pytest.raises(ConfigurationError, match="1 gates only"):
        weighted([MinimumLength()])


def test_a_reward_that_gives_another_number_of_verdicts_is_refused():
    class Short:
        name = "short"

        def check(self, columns):
            pass

        def verdicts(self, prompts, completions, columns, completion_ids=None):
            return [MISSING]

    with pytest.raises(InputError, match="1 from reward 'short'"):
        score_batch([WeightedReward(Short())], ["p"] * 2, ["a", "b"], {})


def test_statistics_count_statuses_scores_and_constraints():
    rows = [
        {"suite": Verdict.graded(1.0, [("format:title", True), ("format:list", True), ("count:words", True)])},
        {"suite": Verdict.graded(1 / 3, [("format:title", False), ("format:title", True), ("count:words", False)])},
        {"suite": TIMEOUT},
        {"suite": MISSING},
        {"suite": ERROR},
    ]
    found = reward_statistics(rows)["suite"]
    assert {key: found[key] for key in ("count", "graded", "ungradable", "error", "timeout", "missing")} == {
        "count": 5,
        "graded": 2,
        "ungradable": 0,
        "error": 1,
        "timeout": 1,
        "missing": 1,
    }
    assert found["mean"] == pytest.approx(2 / 3)
    assert found["std"] == pytest.approx(1 / 3)
    assert found["histogram"]["counts"] == [0, 0, 0, 1, 0, 0, 0, 0, 0, 1]
    assert found["constraints"]["format:title"] == {"count": 3, "passed": 2, "pass_rate": 2 / 3}
    assert found["families"] == {
        "count": {"count": 2, "passed": 1, "pass_rate": 0.5},
        "format": {"count": 4, "passed": 3, "pass_rate": 0.75},
    }


def test_statistics_without_a_score_are_none():
    found = reward_statistics([{"a": MISSING}])["a"]
    assert (found["mean"], found["std"], found["histogram"], found["constraints"]) == (None, None, None, {})
    assert reward_statistics([]) == {}


def test_scores_outside_zero_to_one_widen_the_histogram():
    histogram = reward_statistics([{"a": Verdict.graded(-4.0)}, {"a": Verdict.graded(6.0)}])["a"]["histogram"]
    assert histogram["edges"] == [-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert histogram["counts"] == [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_every_score_is_in_the_histogram_and_statistics_survive_json(scores):
    found = reward_statistics([{"a": Verdict.graded(score)} for score in scores])["a"]
    assert sum(found["histogram"]["counts"]) == len(scores)
    assert found["histogram"]["edges"][0] <= min(scores)
    assert found["histogram"]["edges"][-1] >= max(scores)
    assert math.isclose(found["mean"], sum(scores) / len(scores), rel_tol=1e-9, abs_tol=1e-3)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
