"""Held-out numbers by hand; pass@k is the mean over all choices of k of n samples, and intervals hold."""

import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitless.rewards.reward import weighted
from logitless.rewards.text.exact import Exact
from logitless.rewards.text.length import Length
from logitless.rollout.environment import SingleTurn
from logitless.rollout.sampling import SamplingOptions
from logitless.train.collect.collector import GroupSampler
from logitless.train.collect.evaluate import Evaluation, HeldOut, evaluation_of, pass_at_k, success_metrics
from logitless.train.recipe.evaluation import held_out_metrics
from logitless.types import Completion, Prompt, Verdict
from tests.train.engines import FakeEngine
from tests.train.tiny import held_out_set, tiny_recipe

PROMPTS = [Prompt("a", "?", (1,), {"answer": "yes"}), Prompt("b", "?", (1,), {"answer": "no"})]
ANSWERS = {"a": ["yes", "no"], "b": ["yes", "maybe"]}


class _Engine(FakeEngine):
    def sample(self, prompts, num_samples, options, *, seed):
        self.asked = (num_samples, options, seed)
        ends = {"yes": "stop", "no": "stop", "maybe": "length"}
        return [[Completion(p.id, (1,) * len(t), t, ends[t]) for t in ANSWERS[p.id]] for p in prompts]


def _evaluate(rewards, **changes):
    engine = _Engine()
    sampling = SamplingOptions(max_new_tokens=9, temperature=0.0)
    unscored = changes.pop("unscored", "leave_out")
    options = {"num_samples": 2, "sampling": sampling, "success_at": 1.0, "every_blocks": 1, "seed": 4}
    held_out = HeldOut("evaluation", PROMPTS, **{**options, **changes})
    sampler = GroupSampler(engine, SingleTurn(), rewards, unscored)
    found = Evaluation(sampler, [held_out], scored=bool(rewards))([held_out])
    assert engine.asked == (2, sampling, 4)
    return found


def test_under_a_teacher_alone_nothing_is_scored():
    found = _evaluate([])
    assert math.isnan(found["evaluation/accuracy"])
    assert math.isnan(found["evaluation/reward_mean"])
    assert "evaluation/environment/mean" not in found
    assert found["evaluation/length_mean"] == (3 + 2 + 3 + 5) / 4


def test_accuracy_counts_completions_that_reach_the_threshold():
    found = _evaluate(weighted([Exact()]))
    ends = {name: found.pop(name) for name in list(found) if name.endswith(("/low", "/high"))}
    assert ends["evaluation/accuracy/low"] < 0.25 < ends["evaluation/accuracy/high"]
    assert ends["evaluation/pass_at/2/low"] < 0.5 < ends["evaluation/pass_at/2/high"]
    assert found == {
        "evaluation/accuracy": 0.25,
        "evaluation/pass_at/2": 0.5,  # one of two prompts has a correct answer among its two
        "evaluation/reward_mean": 0.25,
        "evaluation/unscored_fraction": 0.0,
        "evaluation/length_mean": (3 + 2 + 3 + 5) / 4,
        "evaluation/truncated_fraction": 0.25,
        "evaluation/prompts": 2,
        "evaluation/exact/mean": 0.25,
    }


@pytest.mark.parametrize(
    "scored_by",
    [
        {"rewards": [{"name": "length"}, {"name": "exact", "sources": ["train", "held_out"]}]},
        {"rewards": [], "rollout__environment": {"name": "guessing"}, "rollout__limits": {"max_tokens": 20}},
        {"rewards": [], "teacher": {"source": "x/y", "advantage": 1}},
    ],
    ids=["rewards", "environment", "teacher alone"],
)
def test_a_recipe_knows_the_name_of_every_metric_of_its_evaluations(tmp_path, scored_by):
    sets = held_out_set(tmp_path, samples_per_prompt=2)
    recipe = tiny_recipe(tmp_path, evaluation__samples_per_prompt=2, evaluation__sets=sets, **scored_by)
    prompts = {name: [replace(p, source=name) for p in PROMPTS] for name in ("held_out", "more")}
    evaluation = evaluation_of(recipe, _Engine(), SingleTurn(), prompts, weighted(recipe.rewards))
    assert sorted(evaluation(evaluation.sets)) == sorted(held_out_metrics(recipe))


def test_the_threshold_is_of_the_weighted_sum():
    rewards = weighted([Exact(weight=2.0), Length(weight=0.1, cap=9)])
    found = _evaluate(rewards, success_at=0.3)
    assert found["evaluation/accuracy"] == 0.75  # 2.3, 0.2, 0.3 and 0.5
    assert found["evaluation/reward_mean"] == pytest.approx(3.3 / 4)
    assert found["evaluation/length/mean"] == 13 / 4


class _Unable(Length):
    """Scores so many completions, and fails at the others."""

    scored = 0

    def verdicts(self, prompts, completions, columns, completion_ids=None):
        said = super().verdicts(prompts, completions, columns, completion_ids)
        return [*said[: self.scored], *[Verdict(score=None, status="error")] * (len(completions) - self.scored)]


class _PartlyUnable(_Unable):
    scored = 3


def test_what_could_not_be_scored_is_no_success():
    found = _evaluate(weighted([_PartlyUnable()]), success_at=0.0)
    assert found["evaluation/accuracy"] == 0.75
    assert found["evaluation/reward_mean"] == (3 + 2 + 3) / 3
    assert found["evaluation/unscored_fraction"] == 0.25


def test_where_nothing_could_be_scored_there_is_no_accuracy():
    found = _evaluate(weighted([_Unable()]), success_at=0.0)
    missing = ("accuracy", "accuracy/low", "pass_at/2", "reward_mean")
    assert all(math.isnan(found[f"evaluation/{name}"]) for name in missing)
    assert "evaluation/length/mean" not in found


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("correct", range(6))
def test_pass_at_k_is_the_share_of_choices_with_a_correct_one(correct: int, k: int) -> None:
    samples = [True] * correct + [False] * (5 - correct)
    chosen = list(combinations(samples, k))
    assert pass_at_k(5, correct, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=9))
def test_success_rises_with_k_and_lies_in_its_interval(correct: list[int]) -> None:
    found = success_metrics(correct, 6)
    names = ["accuracy", *(f"pass_at/{k}" for k in (2, 4, 6))]
    assert sorted(found) == sorted(f"{name}{end}" for name in names for end in ("", "/low", "/high"))
    values = [found[name] for name in names]
    assert all(one <= other + 1e-12 for one, other in pairwise(values))
    assert all(found[f"{name}/low"] <= found[name] + 1e-12 for name in names)
    assert all(found[name] <= found[f"{name}/high"] + 1e-12 for name in names)


def test_one_sample_a_prompt_has_accuracy_alone() -> None:
    assert sorted(success_metrics([1, 0, 1], 1)) == [f"accuracy{end}" for end in ("", "/high", "/low")]
