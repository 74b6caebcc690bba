"""The estimate of activation memory: the benchmark's plans and row, and what was measured with it."""

import importlib.util
import json
from pathlib import Path

import pytest

from logitless.bench.step_contenders import TINY
from logitless.data.packing import share_prompts
from logitless.models.activations import Cost

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("activations", ROOT / "benchmarks/activations.py")
benchmark = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(benchmark)
COSTS = {
    "keep": Cost(100.0, 30.0),
    "selective": Cost(60.0, 50.0),
    "recompute": Cost(10.0, 60.0),
    "host": Cost(0.0, 60.0),
}


def test_every_mode_and_budgets_between_are_planned_and_keep_their_budgets():
    found = benchmark.plans(COSTS, 8, 10)
    assert [*found][:4] == ["keep", "selective", "recompute", "host"]
    for part in benchmark.FRACTIONS:
        assert found[f"{100 * part:g}% of keep"].num_bytes <= part * found["keep"].num_bytes


def test_the_row_is_packed_with_shared_prompts_and_not_longer_than_asked():
    batch = benchmark.row_of(TINY, 200, 16)
    inputs = share_prompts(batch.inputs)
    assert len(inputs.input_ids) <= 200
    assert len(inputs.input_ids) < len(batch.inputs.input_ids)


def test_the_peak_that_was_measured_is_within_a_tenth_of_the_estimate():
    rows = json.loads((ROOT / "benchmarks/results/activations-H200.json").read_text())["rows"]
    assert {row["model"] for row in rows} == {"qwen2.5-0.5b", "qwen3-1.7b"}
    assert {row["modes"] for row in rows if row["part"] == "layers"} >= {"keep", "selective", "recompute", "host"}
    for row in rows:
        assert row["estimated_bytes"] / row["measured_bytes"] == pytest.approx(1, abs=0.1), row
