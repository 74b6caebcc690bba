import json

import pytest

from logitless.bench.parity import Row
from logitless.cli.main import main


def printed(capsys, *arguments):
    status = main(["parity", *arguments])
    return status, capsys.readouterr().out


def test_only_json_comes_out(capsys):
    status, out = printed(capsys, "--quick", "--json")
    rows = json.loads(out)
    assert status == 0
    assert {tuple(row) for row in rows} == {("name", "against", "loss_rel", "grad_rel", "tolerance", "ok", "note")}
    assert "chunked" in {row["against"] for row in rows}


def test_both_packages_can_be_compared_with_at_once(capsys):
    pytest.importorskip("trl")
    pytest.importorskip("liger_kernel")
    status, out = printed(capsys, "--against", "trl", "--against", "liger", "--quick", "--json")
    assert status == 0
    assert {row["against"] for row in json.loads(out)} == {"trl", "liger"}


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_row_beyond_its_tolerance_is_a_failure(capsys, monkeypatch, arguments):
    rows = [Row("good", "chunked", 0.0, 1e-12, 1e-9), Row("bad", "chunked", 0.0, 1e-3, 1e-9)]
    monkeypatch.setattr("logitless.bench.parity.against_reference", lambda quick: iter(rows))
    status, out = printed(capsys, *arguments)
    assert status == 1
    assert "bad" in out


def test_the_table_says_which_row_is_the_worst(capsys, monkeypatch):
    rows = [Row("good", "chunked", 0.0, 1e-12, 1e-9), Row("better", "chunked", 0.0, 0.0, 1e-9)]
    monkeypatch.setattr("logitless.bench.parity.against_reference", lambda quick: iter(rows))
    status, out = printed(capsys)
    assert status == 0
    assert "chunked: 2 rows, 0 beyond tolerance; largest difference in 'good'" in out
