"""``benchmarks/distillation.py`` measures what its rows say."""

import pytest

from distillation import step_rows

pytest.importorskip("triton")


@pytest.mark.slow
def test_a_block_is_measured_with_and_without_a_teacher():
    alone, taught, *elsewhere = step_rows("tiny", "cpu", ["reverse_kl"], ["device", "host", "cpu"])
    assert (alone["divergence"], alone["teacher_bytes"]) == (None, 0)
    assert "head_seconds" not in alone
    assert not alone["row_invariant_teacher"] | taught["row_invariant_teacher"]  # not on a CPU
    assert taught["divergence"] == "reverse_kl"
    assert taught["teacher_bytes"] > 0 < taught["head_seconds"]
    assert [row["place"] for row in (alone, taught, *elsewhere)] == ["device", "device", "host", "cpu"]
    assert alone["digest"] != taught["digest"]
    assert {row["digest"] for row in elsewhere} == {taught["digest"]}
    for row in (alone, taught):
        assert (row["new_tokens"], row["read_tokens"], row["optimizer_steps"]) == (24, 32, 1)
        assert min(row["seconds"]["rollout"], row["seconds"]["training"]) > 0
