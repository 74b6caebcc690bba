"""The forecast: a measured batch, beside the plan, scaled to a block."""

import random
from pathlib import Path

import pytest
from transformers.modeling_layers import GradientCheckpointingLayer

from logitless.doctor.forecast import Forecast, batch_of, forecast_of, times_as_long
from logitless.rollout.environment import SingleTurn
from logitless.train.learn.learner import Learner
from logitless.train.plan.run_plan import plan_of
from logitless.train.record.journal import Journal
from logitless.types import Group
from tests.train.groups import group_of
from tests.train.tiny import start, tiny_recipe


def test_a_block_that_one_round_decodes_is_measured_as_it_is(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    found = forecast_of(recipe, plan_of(recipe))
    assert found.share == 1
    assert found.completions == 16
    assert 16 <= found.tokens <= 16 * 6
    assert set(found.seconds) == {"weights", "rollout", "scoring", "training"}
    assert min(found.seconds.values()) > 0
    assert found.planned_bytes == plan_of(recipe).total_bytes
    assert found.peak_bytes > 0


def test_a_block_of_several_rounds_is_scaled_from_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path, rollout__max_rows=8)
    monkeypatch.setattr(
        "logitless.doctor.forecast._measured",
        lambda *_: (
            [{"rollout": 1.0, "scoring": 0.5, "training": 2.0}],
            [group_of("7", [0.0] * 8, [5] * 8)],
            [],
            2.0,
            True,
        ),
    )
    found = forecast_of(recipe, plan_of(recipe))
    assert found.share == 0.5
    assert found.seconds == {"rollout": 2.0, "scoring": 1.0, "training": 4.0}
    assert "the run            21 s in 3 blocks" in str(found)


def test_the_first_batch_is_one_round_of_decoding(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, rollout__prompts_per_block=8, rollout__completions_per_prompt=2, rollout__max_rows=5)
    assert batch_of(recipe).rollout.prompts_per_block == 3
    assert batch_of(tiny_recipe(tmp_path, rollout__prompts_per_block=2)).rollout.prompts_per_block == 2


@pytest.mark.parametrize(
    ("tokens_per_step", "prompts", "reads_itself"),
    [
        (10, 2, False),  # eight steps a block, each of one prompt: the round of two is enough
        (20, 2, False),  # four steps of two prompts
        (40, 4, False),  # two steps of four
        (80, 8, True),  # one step: the whole block, which reads logp_old in its own pass
        (999, 8, True),
    ],
)
def test_a_batch_has_a_whole_optimizer_step(
    tokens_per_step: int, prompts: int, reads_itself: bool, tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, rollout__prompts_per_block=8, train__tokens_per_step=tokens_per_step)
    batch = batch_of(recipe, 2, tokens=20)  # ten tokens a prompt
    assert batch.rollout.prompts_per_block == prompts
    assert batch.train.reuse_logp is reads_itself


def test_a_block_of_several_steps_is_foretold_from_whole_ones(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        tmp_path,
        rollout__prompts_per_block=8,
        rollout__completions_per_prompt=2,
        rollout__max_rows=2,
        train__tokens_per_step=24,
    )
    found = forecast_of(recipe, plan_of(recipe))
    assert 1 / 8 < found.share < 1  # more than the round of one prompt, less than the block of at most 96 tokens
    assert found.completions == found.share * 16


def test_groups_without_a_signal_are_trained_on_in_the_measured_batch(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, rollout__zero_signal="drop", rewards=[{"name": "regex", "pattern": ".*"}])
    assert forecast_of(recipe, plan_of(recipe)).seconds["training"] > 0


def test_the_environment_of_the_recipe_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Counting(SingleTurn):
        def start(self, *arguments: object, **options: object) -> object:
            started.append(arguments)
            return super().start(*arguments, **options)

    monkeypatch.setattr("logitless.train.assembly.stages.environment_of", lambda *_: Counting())
    recipe = tiny_recipe(tmp_path)
    forecast_of(recipe, plan_of(recipe))
    assert started


def test_one_batch_that_was_held_up_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [{"rollout": rollout, "training": training} for rollout, training in ((1.0, 2.1), (7.0, 2.0), (1.1, 9.0))]
    monkeypatch.setattr(
        "logitless.doctor.forecast._measured", lambda *_: (batches, [group_of("7", [0.0] * 16)], [], 1.0, True)
    )
    recipe = tiny_recipe(tmp_path)
    found = forecast_of(recipe, plan_of(recipe))
    assert found.seconds == {"rollout": 1.1, "training": 2.1}
    assert found.batches == batches


@pytest.mark.parametrize(("seconds", "times"), [(0.0, 5), (2.0, 3), (8.0, 3), (20.0, 2), (31.0, 1)])
def test_batches_are_measured_three_to_five_times_and_less_often_where_that_takes_long(
    seconds: float, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def block(parts: object, journal: Journal) -> list[Group]:
        journal.clock.add({"rollout": seconds / 4, "training": seconds * 3 / 4})
        return [group_of("7", [0.0] * 16)]

    monkeypatch.setattr("logitless.doctor.forecast._block", block)
    recipe = tiny_recipe(tmp_path)
    assert len(forecast_of(recipe, plan_of(recipe)).batches) == times


def test_layers_keep_what_the_run_lets_them_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: dict[str, list[object]] = {"forecast": [], "run": []}
    step = Learner.step

    def seen(learner: Learner) -> object:
        layers = [m for m in learner.policy.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        modes[whose].append(
            [layer.gradient_checkpointing and layer._gradient_checkpointing_func.args for layer in layers]
        )
        return step(learner)

    monkeypatch.setattr(Learner, "step", seen)
    recipe = tiny_recipe(tmp_path, train__activation_memory=32 * 16 * 4, train__blocks=1)
    whose = "forecast"
    forecast_of(recipe, plan_of(recipe))
    whose = "run"
    start(recipe)
    assert modes["forecast"][-1] == modes["run"][-1] == [("recompute", None)]


@pytest.mark.parametrize("refills", [False, True])
def test_completions_of_one_length_take_as_many_rounds_whoever_decodes_them(refills: bool) -> None:
    assert times_as_long([5] * 4, 16, max_rows=4, refills=refills) == 4
    assert times_as_long([5] * 8, 16, max_rows=4, refills=refills) == 2
    assert times_as_long([5] * 4, 4, max_rows=4, refills=refills) == 1


def test_rows_that_are_given_to_others_wait_for_the_longest_completion_once() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(1, 100) for _ in range(64)]
    ends = [0] * 8  # of each row
    for length in lengths:
        row = ends.index(min(ends))
        ends[row] += length
    found = times_as_long(lengths[:8], 64, max_rows=8, refills=True) * max(lengths[:8])
    assert max(ends) / max(lengths[:8]) < 6  # not eight rounds
    assert found == pytest.approx(max(ends), rel=0.15)


def test_a_block_shorter_than_a_second_is_in_milliseconds_with_its_phases():
    forecast = Forecast(10, 9, {"weights": 0.000453, "rollout": 0.0686}, 100, 32, 320, 1.0)
    assert "a block            69.1 ms (weights 0.5 ms, rollout 68.6 ms)" in str(forecast)
