"""Forecasts beside runs: the committed rows are close, and of the cases that there are."""

import json
from pathlib import Path

import pytest

import forecast
from logitless.train.recipe.loading import load_recipe

ROOT = Path(__file__).parents[2]
ROWS = [
    (path.stem, row)
    for path in sorted((ROOT / "benchmarks" / "results").glob("forecast-*.json"))
    for row in json.loads(path.read_text())["rows"]
]
CASES = forecast.EVERYWHERE | forecast.ON_A_CPU | forecast.ON_A_GPU


@pytest.mark.parametrize("row", [row for _, row in ROWS], ids=[f"{name}: {row['case']}" for name, row in ROWS])
def test_a_committed_forecast_is_within_a_tenth_of_the_run(row: dict) -> None:
    assert abs(row["forecast_block_seconds"] / row["run_block_seconds"] - 1) <= 0.1
    assert abs(row["forecast_peak_bytes"] / row["run_peak_bytes"] - 1) <= 0.1


@pytest.mark.parametrize("row", [row for _, row in ROWS], ids=[f"{name}: {row['case']}" for name, row in ROWS])
def test_a_committed_row_is_of_the_case_that_is_there(row: dict) -> None:
    assert row["overrides"] == [*forecast.STILL, *CASES[row["case"]].overrides]


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_a_valid_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    case = CASES[name]
    overrides = [*forecast.STILL, *case.overrides]
    assert load_recipe(ROOT / "recipes" / f"{case.recipe}.yaml", overrides).train.optimizer.learning_rate == 1e-12
    assert case.blocks > 1  # the first one compiles
