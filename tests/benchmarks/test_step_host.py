"""What a step costs its host, tried on a tiny model."""

import json
import sys

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
