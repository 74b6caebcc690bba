"""The head's benchmark, tried on the CPU at a tiny shape; and the committed results."""

import argparse
import json

import pytest

import head

FIELDS = {
    "contender", "D", "V", "N", "live", "trained", "budget_bytes", "ms", "ratio_to_bare", "peak_bytes",
    "logp_max_error", "dx_rel_error", "dw_rel_error",
}  # fmt: skip


def options(folder, *more):
    parser = argparse.ArgumentParser()
    head.add_arguments(parser)
    arguments = ["--device", "cpu", "--shape", "8,19", "--rows", "512", "--lengths", "64", "--rounds", "1"]
    return parser.parse_args([*arguments, "--contenders", "logitless-chunked", "--output", str(folder), *more])


@pytest.mark.slow
def test_a_run_leaves_complete_rows_and_a_second_measures_nothing_again(tmp_path, capsys):
    assert head.run(options(tmp_path)) == 0
    document = json.loads((tmp_path / "head-D8-V19.json").read_text())
    rows = document["rows"]
    assert all(row.keys() >= FIELDS for row in rows)
    assert {row["contender"] for row in rows} == {"bare", "logitless-chunked"}
    for row in rows:
        assert row["ratio_to_bare"] == pytest.approx(row["ms"] / row["bare_ms"])
    errors = [row["logp_max_error"] for row in rows if row["logp_max_error"] is not None]
    assert len(errors) == 1
    assert errors[0] < 1e-4
    assert "logitless, chunked" in capsys.readouterr().out
    assert head.run(options(tmp_path)) == 0
    assert json.loads((tmp_path / "head-D8-V19.json").read_text()) == document
