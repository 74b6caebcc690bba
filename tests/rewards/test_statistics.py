import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.rewards.statistics import reward_statistics
from logitless.types import Verdict

TIMEOUT = Verdict(score=None, status="timeout", message="over 2 s")
MISSING = Verdict(score=None, status="missing", message="no data")
ERROR = Verdict(score=None, status="error", message="raised")


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
