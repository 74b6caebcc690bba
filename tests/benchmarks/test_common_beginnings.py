"""What sequences begin with alike, read once: the benchmark's three ways are one step."""

import pytest

import common_beginnings as benchmark
from logitless.data.packing import LEAST_SHARED
from shapes import TINY


@pytest.mark.slow
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
