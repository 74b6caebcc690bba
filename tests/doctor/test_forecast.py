"""The forecast: a measured batch, beside the plan, scaled to a block."""

from pathlib import Path

import pytest

from logitless.doctor.forecast import forecast_of
from logitless.rollout.environment import SingleTurn
from logitless.train.plan import plan_of
from tests.train.tiny import tiny_recipe


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
        "logitless.doctor.forecast._measured", lambda *_: ({"rollout": 1.0, "scoring": 0.5, "training": 2.0}, 8, 40)
    )
    found = forecast_of(recipe, plan_of(recipe))
    assert found.share == 0.5
    assert found.seconds == {"rollout": 2.0, "scoring": 1.0, "training": 4.0}
    assert "the run            21 s in 3 blocks" in str(found)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    forecast_of(recipe, plan_of(recipe))
    assert not Path(recipe.output).exists()


def test_groups_without_a_signal_are_trained_on_in_the_measured_batch(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, rollout__zero_signal="drop", rewards=[{"name": "regex", "pattern": ".*"}])
    assert forecast_of(recipe, plan_of(recipe)).seconds["training"] > 0


def test_the_environment_of_the_recipe_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Counting(SingleTurn):
        def start(self, *arguments: object, **options: object) -> object:
            started.append(arguments)
            return super().start(*arguments, **options)

    monkeypatch.setattr("logitless.doctor.forecast.environment_of", lambda *_: Counting())
    recipe = tiny_recipe(tmp_path)
    forecast_of(recipe, plan_of(recipe))
    assert started
