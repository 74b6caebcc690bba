"""The cost of objectives: the benchmark runs, and what was measured is what is promised and what the page says."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_runs_without_a_gpu_and_times_every_objective_without_and_with_diagnostics(tmp_path):
    out = tmp_path / "objective.json"
    small = ["--tokens", "40", "--head", "8,16", "--device", "cpu", "--out", str(out)]
    subprocess.run([sys.executable, "benchmarks/objective.py", *small], cwd=ROOT, check=True)
    found = json.loads(out.read_text())
    assert (found["tokens"], found["sequences"]) == (40, 6)  # 1 + 2 + 4 + 8 + 16 + 9
    assert found["product_ms"] > 0
    names = [row["objective"] for row in found["rows"] if row["diagnostics"]]
    assert names == [row["objective"] for row in found["rows"] if not row["diagnostics"]]
    assert {"grpo", "gspo", "gmpo", "clip_cov", "grpo with every part"} <= set(names)
    assert "dr_grpo" not in names  # the same objective as grpo's
    assert all(row["ratio_to_product"] == row["ms"] / found["product_ms"] > 0 for row in found["rows"])
