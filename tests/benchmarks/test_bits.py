"""The benchmark of bitwise identity: what the file has is kept, tables come from it, and the record keeps the laws."""

import json
from pathlib import Path

import bits
from bits_cases import MODELS, Results

ROOT = Path(__file__).parents[2]


def test_the_record_holds_every_law_and_price_of_every_model():
    document = json.loads((ROOT / "benchmarks/results/bits-H200.json").read_text())
    results = Results(ROOT / "benchmarks/results/bits-H200.json", document["environment"])
    of_one_gpu = [part for part in bits.PARTS if part != "second_gpu"]
    assert all(results.has(model, part) for model in MODELS for part in of_one_gpu)
    laws = [row for row in document["rows"] if "comparison" in row and row.get("exact", True)]
    assert sum(row["tokens"] for row in laws) > 10**6
    assert {row["differ"] for row in laws} == {0}
