"""What sequences begin with alike, read once: the benchmark's three ways are one step."""

from pathlib import Path

import pytest

import common_beginnings as benchmark
from logitless.data.packing import LEAST_SHARED, share_prompts
from shapes import TINY, Workload

ROOT = Path(__file__).parents[2]


def test_every_prompt_begins_with_the_instructions_and_goes_on_as_drawn():
    inputs = benchmark.rollouts_of(TINY, 20, Workload(2, 8, 4, 8)).packed.inputs
    [row] = share_prompts(inputs).groups
    assert row.prompt == 20
    assert len(row.completions) == 2
    assert sum(inputs.lengths) - row.size > 15 * 20


def test_the_three_ways_are_one_step_and_read_less_and_less():
    rows = []
    benchmark.measure(TINY, "cpu", rows.append, by=32)
    assert [row["shared"] for row in rows] == ["nothing", "prompts", "tree"]
    nothing, prompts, tree = (row["read_tokens"] for row in rows)
    assert tree < prompts < nothing
    for row in rows:
        assert row["loss"] == pytest.approx(rows[0]["loss"], abs=1e-5)
        assert row["grad_norm"] == pytest.approx(rows[0]["grad_norm"], rel=1e-4)
    assert benchmark.packing.LEAST_SHARED == LEAST_SHARED
