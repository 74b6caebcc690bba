"""The estimate of activation memory: the benchmark's plans and row, and what was measured with it."""

import json
from pathlib import Path

import pytest

import activations as benchmark
from logitless.data.packing import share_prompts
from shapes import TINY

ROOT = Path(__file__).parents[2]


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
