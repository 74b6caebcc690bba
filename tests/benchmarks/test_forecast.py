"""Forecasts beside runs: the committed rows are close, and of the cases that there are."""

from pathlib import Path

import pytest

import forecast
from logitless.train.recipe.loading import load_recipe

ROOT = Path(__file__).parents[2]
CASES = forecast.EVERYWHERE | forecast.ON_A_CPU | forecast.ON_A_GPU


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_a_valid_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    case = CASES[name]
    overrides = [*forecast.STILL, *case.overrides]
    assert load_recipe(ROOT / "recipes" / f"{case.recipe}.yaml", overrides).train.optimizer.learning_rate == 1e-12
    assert case.blocks > 1  # the first one compiles
