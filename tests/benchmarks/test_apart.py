"""Rows of arrangements are compared with one GPU that does the same work in turns."""

import json
import sys

import pytest

import apart
from rollout_workloads import Workload
from script import main


def row(arrangement, staleness, speed, weights=1):
    place = {"model": "tiny", "workload": "4x2-16-4:12", "steps": 1, "arrangement": arrangement, "staleness": staleness}
    timed = {"tokens_per_second": speed, "block_seconds": 2.0, "phases": {"training": 2.0}}
    return {**place, **timed, "digest": weights}


def test_speed_is_over_one_gpu_on_policy_and_weights_are_those_of_the_same_staleness():
    rows = [row("1", 0, 10.0, weights=1), row("1", 1, 20.0, weights=2), {**row("1", 0, 1.0), "model": "other"}]
    found = [apart._compared(row("1+1", staleness, 15.0, weights=2), rows) for staleness in (0, 1, 2)]
    assert [each["over_one_gpu"] for each in found] == [1.5, 1.5, 1.5]
    assert [each["same_weights"] for each in found] == [False, True, None]
    assert apart._compared(row("1", 0, 5.0), rows)["over_one_gpu"] == 1.0
    assert apart._compared({**row("1+1", 1, 15.0), "in_flight": "keep"}, rows)["same_weights"] is None
    assert apart._compared({**row("1+1", 1, 15.0), "whole_blocks": 2}, rows)["same_weights"] is None
    [older] = [{**each, "weights": each["digest"]} for each in rows[:1]]
    del older["digest"]
    assert apart._compared(row("1+1", 0, 15.0), [older])["same_weights"] is None


def test_compilation_in_a_timed_block_makes_neither_faster():
    alone = {**row("1", 0, 10.0), "phases": {"training": 1.5, "compilation": 0.5}}
    found = apart._compared(row("1+1", 1, 20.0), [alone])
    assert (found["one_gpu"], found["over_one_gpu"]) == (pytest.approx(40 / 3), 1.5)


@pytest.mark.slow
def test_the_tool_runs_on_a_cpu_and_both_arrangements_end_with_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    given = ["--models", "tiny", "--device", "cpu", "--workload", "4x2-16-4:12", "--blocks", "1", "--turns"]
    given += ["--in-flight", "recompute"]
    assert main(sys.modules["apart"], [*given, "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "apart-cpu.json").read_text())["rows"]
    found = [(each["arrangement"], each["staleness"], each["in_flight"], each["same_weights"]) for each in rows]
    in_turns = [("1", 0, None, True), ("1", 1, None, True)]
    assert found == [*in_turns, ("1+1", 0, None, True), ("1+1", 1, None, True), ("1+1", 1, "recompute", None)]


def test_the_first_call_alone_samples_short_completions():
    work = Workload.parse("2x2-4-16:24")

    class Engine:
        def sample(self):
            return self.work.tokens

    apart._sample_short_first(engine := Engine(), work)
    assert 8 <= engine.sample() <= 12 < 64 <= engine.sample() == engine.sample() == work.tokens
