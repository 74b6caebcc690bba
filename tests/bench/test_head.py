"""The head's benchmark, tried on the CPU at a tiny shape; and the committed results."""

import argparse
import json
from pathlib import Path

import pytest

from logitless.bench import head, head_report
from logitless.errors import DataError

ROOT = Path(__file__).parents[2]
FIELDS = {
    "contender", "D", "V", "N", "live", "trained", "budget_bytes", "ms", "ratio_to_bare", "peak_bytes",
    "logp_max_error", "dx_rel_error", "dw_rel_error",
}  # fmt: skip


def options(folder, *more):
    parser = argparse.ArgumentParser()
    head.add_arguments(parser)
    arguments = ["--device", "cpu", "--shape", "8,19", "--rows", "512", "--lengths", "64", "--rounds", "1"]
    return parser.parse_args([*arguments, "--contenders", "logitless-chunked", "--output", str(folder), *more])


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


def test_a_document_is_rewritten_between_its_marks_and_checked(tmp_path):
    results = head_report.load(ROOT / "benchmarks/results")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{head_report.MARKS.begin}\nold\n{head_report.MARKS.end}\nafter\n")
    assert head_report.update([page], results, check=True) == 1
    assert head_report.update([page], results, check=False) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert head_report.update([page], results, check=True) == 0


def test_a_document_without_marks_is_an_error(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no table here")
    with pytest.raises(DataError, match="marks"):
        head_report.update([page], [], check=False)


def test_the_committed_tables_are_made_from_the_committed_results():
    pages = [ROOT / "README.md", ROOT / "docs/head.md"]
    assert head_report.update(pages, head_report.load(ROOT / "benchmarks/results"), check=True) == 0


def fused(**values):
    row = {"contender": "logitless-fused", "N": 64, "live": 1.0, "trained": "weight", "budget_bytes": None}
    times = {"ms": 21.0, "ms_min": 20.0, "ms_max": 22.0, "bare_ms": 20.0, "ratio_to_bare": 1.05}
    errors = {"logp_max_error": 1.2e-4, "dx_rel_error": 4e-3, "dw_rel_error": 5e-3}
    return row | times | errors | {"peak_bytes": 2**29, "failure": None} | values


def test_a_missed_target_is_bold_and_a_missing_row_a_dash():
    rows = [fused(), fused(trained="frozen", ms=10.0, ratio_to_bare=1.07), fused(trained="lora", ms=10.5)]
    rows += [fused(budget_bytes=0, ratio_to_bare=1.404, peak_bytes=3 * 2**28)]
    lines = head_report.targets([{"shape": {"width": 4096}, "rows": rows}]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {label: value for label, _, value in cells}
    assert found["forward + backward / three products"] == "1.05"
    assert found["frozen / two products"] == "**1.07**"
    assert found["LoRA rank 16 / frozen"] == "1.05"
    assert found["budget 0 / three products"] == "1.40"
    assert found["budget 0, peak GiB"] == "**0.75**"
    assert found["largest error of logp"] == "**1.2e-04**"
    assert (found["relative error of dX"], found["relative error of dW"]) == ("4.0e-03", "**5.0e-03**")
    assert found["scoring / one product"] == "–"
