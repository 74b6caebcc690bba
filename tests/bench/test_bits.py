"""The benchmark of one set of bits: what the file has is kept, tables come from it, and the record keeps the laws."""

import argparse
import json
from pathlib import Path

import pytest

from logitless.bench import bits, bits_report
from logitless.bench.bits_cases import DECODED_ROWS, LAWS, MODELS, SECOND_GPU, Results
from logitless.errors import ConfigurationError, DataError, UnavailableError
from logitless.pages import Marks

ROOT = Path(__file__).parents[2]
HERE = {"gpu": "NVIDIA X", "driver": "1", "torch": "2", "triton": "3"}


def rows_of(model):
    rows = [{"model": model, "comparison": name, "tokens": 10, "differ": 0} for name in (*LAWS, *SECOND_GPU)]
    for kind, counts in (("train_forward", [100]), ("train_step", [100]), ("decode", DECODED_ROWS)):
        rows += [
            {"model": model, "kind": kind, "num_rows": n, "ms": 1.0, "ms_reference": 2.0, "ratio": 0.5} for n in counts
        ]
    return rows


def test_what_the_file_has_is_kept_and_what_is_missing_is_named(tmp_path):
    path = tmp_path / "bits-X.json"
    results = Results(path, HERE)
    for row in rows_of("m"):
        results.add(row)
    again = Results(path, HERE)
    assert all(again.has("m", part) for part in bits.PARTS)
    assert not again.has("other", "laws")
    again.document["rows"].pop()
    assert not again.has("m", "decode")
    assert not Results(path, HERE | {"driver": "2"}).has("m", "laws")


def test_a_row_that_is_measured_again_takes_the_place_of_the_old_one(tmp_path):
    results = Results(tmp_path / "bits-X.json", HERE)
    for differ in (3, 0):
        results.add({"model": "m", "comparison": "alone", "tokens": 10, "differ": differ})
    assert [row["differ"] for row in results.document["rows"]] == [0]


def test_the_command_refuses_an_unknown_model_and_a_machine_without_a_gpu(tmp_path, monkeypatch):
    parser = argparse.ArgumentParser()
    bits.add_arguments(parser)
    options = parser.parse_args(["--models", "gpt-5", "--output", str(tmp_path)])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UnavailableError, match="CUDA"):
        bits.run(options)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigurationError, match="gpt-5"):
        bits.run(options)


def test_one_command_measures_what_is_missing_and_writes_the_document(tmp_path, monkeypatch):
    results = Results(tmp_path / "bits-X.json", HERE)
    for row in rows_of("qwen2.5-0.5b"):
        results.add(row)
    document = tmp_path / "bits.md"
    marks = [Marks("bits", part) for part in ("laws", "price")]
    document.write_text("".join(f"{mark.begin}\n{mark.end}\n" for mark in marks))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(bits, "environment", lambda *_: HERE)
    parser = argparse.ArgumentParser()
    bits.add_arguments(parser)
    options = ["--models", "qwen2.5-0.5b", "--output", str(tmp_path), "--document", str(document)]
    assert bits.run(parser.parse_args(options)) == 0
    assert "| alone | 0 of 10 |" in document.read_text()
    assert "| forward | 1.0 | 0.50 (1 / 2 ms) |" in document.read_text()


def test_a_ratio_that_misses_its_goal_is_marked():
    rows = rows_of("m")
    rows[-1]["ratio"] = 1.2
    table = bits_report.price_table({"environment": HERE, "rows": rows})
    assert "| decoding step, 512 rows | 1.03 | **1.20** (1 / 2 ms) |" in table
    assert "| forward | 1.0 | 0.50 (1 / 2 ms) |" in table


def test_a_folder_without_results_says_how_to_make_them(tmp_path):
    with pytest.raises(DataError, match="logitless bench bits"):
        bits_report.load(tmp_path)


def test_the_record_holds_every_law_and_price_of_every_model():
    document = json.loads((ROOT / "benchmarks/results/bits-H200.json").read_text())
    results = Results(ROOT / "benchmarks/results/bits-H200.json", document["environment"])
    of_one_gpu = [part for part in bits.PARTS if part != "second_gpu"]
    assert all(results.has(model, part) for model in MODELS for part in of_one_gpu)
    laws = [row for row in document["rows"] if "comparison" in row and row.get("exact", True)]
    assert sum(row["tokens"] for row in laws) > 10**6
    assert {row["differ"] for row in laws} == {0}


def test_the_document_shows_the_record():
    documents = bits_report.load(ROOT / "benchmarks/results")
    assert bits_report.update([ROOT / "docs/bits.md"], documents, check=True) == 0


def test_the_picture_is_drawn_from_the_record(tmp_path):
    document = json.loads((ROOT / "benchmarks/results/bits-H200.json").read_text())
    bits_report.plot(document, tmp_path / "bits.png")
    assert (tmp_path / "bits.png").stat().st_size > 10_000
