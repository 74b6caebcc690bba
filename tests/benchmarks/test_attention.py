"""The benchmark of attention: what is measured is what is named, and what the file has is kept."""

import json

import pytest
import torch

import attention
from attention import Shape, Workload, passes
from script import main
from tests.head.interpreter import complete_interpreter, interpreted

TINY = Shape(2, 1, 16)


@pytest.fixture(autouse=True)
def interpreter():
    if not interpreted():
        pytest.skip("the interpreter is off")
    complete_interpreter()


def test_sharing_and_copies_do_the_same_work():
    workload = Workload(1, 2, 5, 3, 4)
    shared, copied = (passes(name, TINY, workload, "cpu") for name in ("logitless", "logitless-unshared"))
    layout = workload.layout("cpu")
    assert shared.forward().shape[0] == layout.num_tokens
    assert copied.forward().shape[0] == layout.num_tokens + 5
    assert all(torch.isfinite(x).all() for x in (*shared.backward(), *copied.backward()))


@pytest.mark.slow
def test_a_contender_that_does_not_run_is_left_out_and_the_others_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attention, "WORKLOADS", {"tiny": Workload(1, 2, 4, 2, 3)})
    words = ["--device", "cpu", "--shapes", "2,1,16", "--contenders", "logitless", "cudnn", "--out", str(tmp_path)]
    for _ in range(2):  # the second time nothing is measured
        assert main(attention, words) == 0
    rows = json.loads((tmp_path / "attention-cpu.json").read_text())["rows"]
    assert [(row["workload"], row["contender"]) for row in rows] == [("tiny", "logitless")]
    assert "forward" in capsys.readouterr().out
