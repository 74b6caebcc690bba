"""The list is closed, every name means one thing, and what the loop measures is on it."""

from pathlib import Path

import pytest

from logitless.errors import InputError
from logitless.train.block_metrics import block_metrics
from logitless.train.metrics import METRICS, check_names, metric_of, metrics_page, repeatable
from logitless.train.step import metric_name
from tests.train.fake_run import fake_groups
from tests.train.groups import judged

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
    name = "constraint/length_constraints:number_words/pass_rate"
    assert metric_of(name).name == "constraint/{constraint}/pass_rate"
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
        "ratio_std",
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
    named = {metric_name(name) for name in [*estimators, *others]}
    check_names(named)
    assert len(named) == len(estimators) + len(others)


def test_the_page_of_the_documentation_is_the_list():
    assert PAGE.read_text() == metrics_page(), "write metrics_page() to docs/metrics.md"


def test_the_numbers_of_a_block_are_on_the_list():
    groups = fake_groups(1, 2)
    check_names(block_metrics(judged(groups), seconds=1.0))
