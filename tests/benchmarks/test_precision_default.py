"""The comparison of float32 with the default dtype: what it writes, and what the page says once it was measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import precision_default
from tests.train.tiny import tiny_raw

ROOT = Path(__file__).parents[2]


def row(way, dtype, seed, after):
    return {
        "recipe": "small",
        "way": way,
        "trained_dtype": dtype,
        "seed": seed,
        "settings": [],
        "blocks": 5,
        "held_out_before": 0.25,
        "held_out_after": after,
        "reward": [0.0] * 5 + [0.5] * 10,
        "process_seconds": 10.0 + seed,
    }


def test_the_table_has_mean_and_deviation_over_seeds_of_each_way():
    rows = [row("float32", "float32", seed, 0.5 + seed / 10) for seed in (0, 1, 2)]
    rows += [row("the default", "bfloat16", seed, 0.75) for seed in (0, 1, 2)]
    machine = {"gpu": "A GPU", "driver": "1.2", "torch": "2.11", "triton": "3.6"}
    text = precision_default.table({"machine": machine, "rows": rows})
    assert "| small | float32 | 3 | 5 | 0.250 ± 0.000 | 0.600 ± 0.100 | 0.500 ± 0.000 |" in text
    assert "| small | the default: bfloat16 | 3 | 5 | 0.250 ± 0.000 | 0.750 ± 0.000 | 0.500 ± 0.000 |" in text


@pytest.mark.slow
def test_it_runs_both_ways_once_and_leaves_what_it_has(tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_raw(tmp_path)))
    command = [sys.executable, str(ROOT / "benchmarks" / "precision_default.py"), "--seeds", "3"]
    command += ["--recipe", str(tmp_path / "tiny.yaml"), "--output", str(tmp_path)]
    for _ in range(2):
        done = subprocess.run([*command, "--set", "train.blocks=1"], check=True, capture_output=True, text=True)
    rows = json.loads((tmp_path / "precision-default-cpu.json").read_text())["rows"]
    assert [(each["way"], each["trained_dtype"], each["seed"]) for each in rows] == [
        ("float32", "float32", 3),
        ("the default", "float32", 3),  # on a CPU
    ]
    assert rows[0]["reward"] == rows[1]["reward"]
    assert "| tiny | float32 | 1 | 1 |" in done.stdout
