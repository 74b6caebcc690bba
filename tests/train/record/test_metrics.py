"""The list is closed, every name means one thing, and what the loop measures is on it."""

from dataclasses import replace

import pytest

from logitless.errors import InputError
from logitless.objective.correction import SamplerCorrection
from logitless.objective.diagnostics import step_diagnostics
from logitless.objective.divergence import KLPenalty
from logitless.objective.entropy import EntropyBonus
from logitless.objective.filters import OffPolicy, TopEntropy
from logitless.objective.objective import Objective
from logitless.objective.value import ValueLoss, value_diagnostics
from logitless.train.learn.block_metrics import block_metrics
from logitless.train.record.metrics import METRICS, RENAMED, check_names, metric_of, repeatable
from tests.objective.batches import random_batch
from tests.train.fake_run import fake_groups
from tests.train.groups import judged


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


def test_every_number_of_a_step_is_on_the_list():
    objective = Objective(
        filters=(OffPolicy(0.5), TopEntropy(0.5, scope="micro_batch")),
        correction=SamplerCorrection(max=2.0),
        kl=KLPenalty("k3"),
        entropy_bonus=EntropyBonus(0.1, scope="micro_batch"),
    )
    logp, entropy, batch = random_batch((3, 2), 0)
    value = ValueLoss()(logp, replace(batch, value_old=logp, value_target=logp, value_weight=batch.token_weight))
    output = objective(logp.requires_grad_(), entropy, batch, beta=0.1)
    names = {**step_diagnostics([output]), **value_diagnostics([value])}
    check_names(names)
    families = ("kl_old", "ratio", "clip", "sampler")
    known = [metric for metric in METRICS if metric.name.split("/")[0] in families and metric.over != "block"]
    assert {metric.name for metric in known} <= set(names)
    assert {"filter/off_policy/dropped_fraction", "loss/value", "kl_ref/penalty_p95", "entropy/bonus_mean"} <= set(
        names
    )


def test_the_numbers_of_a_block_are_on_the_list():
    groups = fake_groups(1, 2)
    check_names(block_metrics(judged(groups), seconds=1.0))


@pytest.mark.parametrize("old", RENAMED)
def test_a_renamed_metric_is_refused_with_its_name_of_today(old):
    with pytest.raises(InputError, match=f"It is called '{RENAMED[old]}' now"):
        metric_of(old)
    assert metric_of(RENAMED[old]).name == RENAMED[old]
