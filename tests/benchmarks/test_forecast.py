"""Forecasts beside runs: what is committed, and what a page shows of it."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from logitless.train.recipe import load_recipe

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("forecast", ROOT / "benchmarks" / "forecast.py")
assert spec is not None
assert spec.loader is not None
forecast = importlib.util.module_from_spec(spec)
spec.loader.exec_module(forecast)

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


def test_a_forecast_is_made_anew_beside_runs_that_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    found = forecast.Forecast(9, 50, {"rollout": 3.0}, 8, 16, 32, 0.5, batches=[{"rollout": 1.5}])
    asked = []

    class Here:
        def __init__(self, *_: object, **__: object) -> None:
            self.shutdown = lambda: None

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731

        def submit(self, work: object, *_: object) -> SimpleNamespace:
            asked.append(work)
            return SimpleNamespace(result=lambda: found if work is forecast.forecast else (2.0, 40, []))

    monkeypatch.setattr(forecast, "ProcessPoolExecutor", Here)
    case = CASES["length-toy"]
    [whole] = forecast.compared("length-toy", case, 1)
    assert forecast.real in asked
    asked.clear()
    before = whole | {"run_block_seconds": 4.0, "run_peak_bytes": 25, "run_seconds": [["kept"]]}
    [anew] = forecast.compared("length-toy", case, 1, before)
    assert asked == [forecast.forecast]
    assert (whole["seconds_off"], whole["peak_off"]) == (0.5, 0.25)
    assert (anew["seconds_off"], anew["peak_off"]) == (-0.25, 1.0)
    assert anew["run_seconds"] == [["kept"]]
    assert anew["measured_batches"] == [[{"rollout": 1.5}]]


def test_the_page_has_the_committed_rows() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert forecast.with_table(page) == page, "run python benchmarks/forecast.py --page"
