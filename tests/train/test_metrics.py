"""The list is closed, every name means one thing, and the numbers of a block are what a hand finds."""

from pathlib import Path

import pytest
import torch

from logitless.errors import InputError
from logitless.objective.diagnostics import step_diagnostics
from logitless.objective.objective import Objective
from logitless.train.metrics import (
    METRICS,
    check_names,
    group_metrics,
    metric_of,
    metrics_page,
    repeatable,
    step_metrics,
)
from logitless.types import Completion, Group, Prompt, TokenBatch, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_every_metric_has_a_name_of_its_own_and_a_description():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(metric.description for metric in METRICS)


def test_no_name_belongs_to_two_metrics():
    for metric in METRICS:
        example = metric.name.replace("{", "").replace("}", "")
        assert [other.name for other in METRICS if other.matches(example)] == [metric.name]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("reward/maen", "reward/mean"), ("kl_ref/k4_mean", "kl_ref/k"), ("grad_norm", "optimizer/grad_norm")],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name, nearest):
    with pytest.raises(InputError, match=f"Did you mean '{nearest}"):
        check_names({"step": 1, name: 0.0})


def test_a_free_part_stands_for_anything_without_a_slash():
    assert metric_of("reward/ifeval/mean").name == "reward/{function}/mean"
    name = "constraint/ifeval/length_constraints:number_words/pass_rate"
    assert metric_of(name).name == "constraint/{function}/{constraint}/pass_rate"
    for wrong in ("reward/a/b/mean", "reward//mean", "reward/a/mean/"):
        with pytest.raises(InputError):
            metric_of(wrong)


def test_times_speeds_and_memory_are_not_repeated_by_a_resumed_run():
    record = {
        "step": 3,
        "reward/mean": 0.5,
        "time/rollout_seconds": 1.0,
        "throughput/training_tokens_per_second": 5.0,
        "memory/peak_bytes": 7,
    }
    assert repeatable(record) == {"step": 3, "reward/mean": 0.5}


def test_every_number_of_the_diagnostics_has_a_name():
    batch = TokenBatch(
        sequence=torch.tensor([0, 0]),
        num_sequences=1,
        advantage=torch.tensor([1.0, 1.0]),
        token_weight=torch.tensor([0.5, 0.5]),
        logp_old=torch.tensor([-1.0, -1.0]),
        logp_ref=torch.tensor([-1.0, -2.0]),
        logp_sampler=torch.tensor([-1.25, -1.0]),
    )
    output = Objective()(torch.tensor([-0.5, -1.0], requires_grad=True), torch.tensor([0.5, 1.5]), batch)
    numbers = {name: value.item() for name, value in step_diagnostics([output]).items()}
    named = step_metrics(numbers)
    assert len(named) == len(numbers)
    assert named["ratio/max"] == pytest.approx(1.6487, abs=1e-4)
    assert named["optimizer/tokens"] == 2


def test_every_name_that_the_diagnostics_document_is_known():
    estimators = [
        f"{policy}_{k}_{how}" for policy in ("old", "ref") for k in ("k1", "k2", "k3") for how in ("mean", "p95")
    ]
    others = [
        "loss",
        "num_tokens",
        "clip_fraction_low",
        "clip_fraction_high",
        "clip_fraction_positive",
        "clip_fraction_negative",
        "ratio_min",
        "ratio_mean",
        "ratio_max",
        "kl_mean",
        "kl_p95",
        "num_kl_clamped",
        "entropy_mean",
        "entropy_bonus",
        "sampler_difference_mean",
        "sampler_difference_p95",
        "sampler_difference_max",
        "num_missing_sampler",
        "correction_mean",
        "correction_effective_fraction",
        "dropped_off_policy",
        "dropped_top_entropy",
        "live_fraction",
    ]
    named = step_metrics(dict.fromkeys([*estimators, *others], 0.0))
    assert len(named) == len(estimators) + len(others)


def test_an_unnamed_diagnostic_is_refused():
    with pytest.raises(InputError):
        step_metrics({"surprise": 1.0})


def answer(text: str, length: int, finish: str = "stop") -> Completion:
    return Completion("p", token_ids=tuple(range(length)), text=text, finish_reason=finish)


def test_the_numbers_of_a_block_are_those_of_a_hand():
    # Rewards 0, 2 | 1, 1 (no signal) | None, None (unscorable, no signal): mean of the four 1, deviation sqrt(1/2).
    prompt = Prompt("p", "ab", (1, 2))
    detail_one, detail_two = [("len:words", True), ("len:lines", False)], [("len:words", False), ("len:lines", False)]
    verdicts = [
        [Verdict.graded(0.0, detail_one), Verdict.graded(2.0, detail_two)],
        [Verdict.graded(1.0), Verdict.graded(1.0)],
        [Verdict(None, "timeout"), Verdict(None, "error")],
    ]
    completions = [[answer("a", 1), answer("", 2)], [answer("b", 3, "length"), answer("c", 6)], [answer("d", 0)] * 2]
    groups = [
        Group(prompt, tuple(texts), tuple({"f": verdict} for verdict in said), tuple(v.score for v in said))
        for texts, said in zip(completions, verdicts, strict=True)
    ]
    numbers = group_metrics(groups)
    expected = {
        "reward/mean": 1.0,
        "reward/std": 0.5**0.5,
        "reward/std_in_group": 0.5,  # 1 and 0, the group without a score left out
        "reward/unscored": 2,
        "reward/f/mean": 1.0,
        "reward/f/std": 0.5**0.5,
        "verdict/f/graded": 4,
        "verdict/f/timeout": 1,
        "verdict/f/error": 1,
        "verdict/f/missing": 0,
        "constraint/f/len:words/pass_rate": 0.5,
        "constraint/f/len:words/count": 2,
        "constraint/f/len:lines/pass_rate": 0.0,
        "constraint/f/len:lines/count": 2,
        "constraint_family/f/len/pass_rate": 0.25,
        "constraint_family/f/len/count": 4,
        "group/zero_signal_fraction": 2 / 3,
        "length/mean": 2.0,
        "length/min": 0,
        "length/max": 6,
        "length/truncated_fraction": 1 / 6,
        "length/empty": 1,
        "length/prompt_mean": 2.0,
    }
    assert numbers == pytest.approx(expected)
    check_names(numbers)


def test_a_mean_of_nothing_is_left_out():
    group = Group(Prompt("p", "a", (1,)), (answer("a", 1),), ({"f": Verdict(None, "missing")},), (None,))
    assert not {"reward/mean", "reward/std", "reward/f/mean"} & set(group_metrics([group]))


def test_the_page_of_the_documentation_is_the_list():
    assert PAGE.read_text() == metrics_page(), "write metrics_page() to docs/metrics.md"
