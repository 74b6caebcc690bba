"""What a step costs its host, tried on a tiny model."""

import json
import sys
from pathlib import Path

from benchmarks import step_host


def test_the_parts_of_a_step_are_timed_and_its_dearest_functions_listed(tmp_path, monkeypatch, capsys):
    words = ["--models", "tiny", "--device", "cpu", "--workloads", "512/64-256", "--live", "0.5", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["step_host.py", *words, "--output", str(tmp_path)])
    step_host.main()
    found = json.loads((tmp_path / "tiny-512_64-256-0.5.json").read_text())
    assert json.loads(capsys.readouterr().out)["step_ms"] == found["step_ms"]
    parts = found["parts"]
    assert {"plan", "forward", "objective", "backward", "optimizer", "diagnostics"} <= set(parts)
    assert 0 < sum(parts.values()) < 1.5 * found["step_ms"]
    assert "run_backward" in (tmp_path / "tiny-512_64-256-0.5.txt").read_text()


def test_the_page_says_what_was_measured_of_a_short_row_with_half_of_its_groups_live():
    root = Path(__file__).parents[2]
    rows = json.loads((root / "benchmarks" / "results" / "host-of-step-H200.json").read_text())["rows"]
    half, whole = sorted(rows, key=lambda row: row["live"])
    assert (half["live"], whole["live"]) == (0.5, 1.0)
    page = (root / "docs" / "performance.md").read_text()
    assert f"a step takes {whole['step_ms']:.0f} ms with" in page
    assert f"all groups and {half['step_ms']:.0f} with half of them at zero advantage" in page
    assert f"{whole['step_ms'] / half['step_ms']:.2f} times as fast" in page
    assert f"so that {whole['busy_ms'] / half['busy_ms']:.2f} times is the" in page
