import importlib.util
from fractions import Fraction

import numpy as np
import pytest
import torch

from logitless.errors import ConfigurationError, UnavailableError
from logitless.rewards.math import Math
from logitless.rewards.reasoning_gym import ReasoningGym
from logitless.rewards.text.json_schema import JsonSchema
from logitless.rewards.workers.pool import Outcome
from logitless.rewards.workers.pooled import verdict_of
from logitless.rewards.workers.tasks import score_of


@pytest.mark.parametrize("status", ["timeout", "crashed", "memory", "orphans"])
def test_an_item_that_ended_its_own_grading_is_ungradable_and_scores_as_a_wrong_one(status):
    verdict = verdict_of(Outcome(status, message="why"))
    assert (verdict.status, verdict.score, verdict.message) == ("ungradable", 0.0, f"{status}: why")
    assert verdict_of(Outcome(status, message="why"), ungradable_score=None).score is None


@pytest.mark.parametrize("status", ["raised", "crashed", "memory", "orphans"])
def test_a_grader_that_failed_by_itself_is_an_error_with_its_reason(status):
    verdict = verdict_of(Outcome(status, message="why", traceback="where"), blameless=True)
    assert (verdict.status, verdict.score, verdict.message) == ("error", None, f"{status}: why")
    assert verdict.traceback == "where"


def test_an_exception_of_the_grader_is_an_error_whoever_wrote_the_text():
    assert verdict_of(Outcome("raised", message="why")).status == "error"


@pytest.mark.parametrize("answer", [{}, [], None, 5, {"score": "x"}, {"score": None}, {"score": float("nan")}, "score"])
def test_an_answer_that_no_task_gives_is_ungradable(answer):
    assert verdict_of(Outcome("done", answer)).status == "ungradable"


@pytest.mark.parametrize("score", [1.5, -0.1, 1e9])
def test_a_score_that_no_library_gives_is_ungradable(score):
    assert Math().verdict(Outcome("done", {"score": score})).status == "ungradable"


@pytest.mark.parametrize(
    ("knob", "value", "needed"),
    [
        ("ungradable_score", float("nan"), "a finite `ungradable_score`"),
        ("deadline_seconds", float("inf"), "positive limits"),
        ("deadline_seconds", 0.0, "positive limits"),
        ("memory_mib", 0, "positive limits"),
    ],
)
def test_knobs_that_make_no_sense_are_refused(knob, value, needed):
    with pytest.raises(ConfigurationError, match=needed):
        Math(**{knob: value})


def test_timeouts_missing_answers_and_details_keep_their_meaning():
    assert verdict_of(Outcome("idle", message="over 2 s")).status == "timeout"
    assert verdict_of(Outcome("done", {"missing": "no gold"})).status == "missing"
    assert verdict_of(Outcome("done", {"error": "nonsense"})).status == "error"
    assert verdict_of(Outcome("done", {"score": 1, "detail": [["a", True], ["a", False]]})).detail == (
        ("a", True),
        ("a", False),
    )


@pytest.mark.parametrize("value", [1, 1.0, True, Fraction(1), np.float32(1), np.int64(1), torch.tensor(1.0)])
def test_numbers_of_any_kind_are_scores(value):
    assert score_of(value) == {"score": 1.0}


@pytest.mark.parametrize("value", ["1", b"1", [1.0], 1j, {}, 10**400, float("nan"), np.nan, object(), torch.ones(2)])
def test_what_is_no_number_is_an_error(value):
    assert list({**score_of(value), "malformed": True}) == ["error", "malformed"]


@pytest.mark.parametrize(
    ("reward", "columns"),
    [
        (Math(), {"answer": ["4"]}),
        (JsonSchema(schema={}), {}),
        (ReasoningGym(task="chain_sum"), {"entry": [{"answer": "4", "metadata": {}}]}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_absent_package_is_named_with_the_command_that_installs_it(reward, columns, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"pip install 'logitless\[rewards\]'"):
        reward.check(columns)
    with pytest.raises(UnavailableError, match=r"pip install 'logitless\[rewards\]'"):
        reward.verdicts(["p"], ["4"], columns)
