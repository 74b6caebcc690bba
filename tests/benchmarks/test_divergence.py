"""The benchmark of divergences, tried on the CPU at a tiny shape."""

import argparse
import json

import pytest

import divergence


def test_a_run_measures_every_contender_against_the_bare_products(tmp_path):
    parser = argparse.ArgumentParser()
    divergence.add_arguments(parser)
    arguments = ["--device", "cpu", "--widths", "8,16", "--vocabulary", "40", "--rows", "32", "--rounds", "1"]
    arguments += ["--kinds", "reverse_kl,total_variation", "--output", str(tmp_path)]
    assert divergence.run(parser.parse_args(arguments)) == 0
    rows = json.loads((tmp_path / "divergence-cpu.json").read_text())["rows"]
    found = {(row["contender"], row["kind"]): row for row in rows}
    assert {("bare", ""), ("logits", ""), ("float32-logits", "total_variation")} < set(found)
    chunked = found["logitless-chunked", "reverse_kl"]
    assert chunked["ratio_to_bare"] == pytest.approx(chunked["ms"] / chunked["bare_ms"])
    assert chunked["failure"] is None
    for row in rows:
        assert row.get("max_error", 0) < 1e-5
        assert row.get("dw_rel_error", 0) < 1e-2
