"""The benchmark of attention: what is measured is what is named, and what the file has is kept."""

import argparse
import json

import pytest
import torch

from logitless.bench import attention
from logitless.bench.attention import CONTENDERS, SHAPES, WORKLOADS, NotMeasured, Shape, Workload, measure, passes
from tests.head.interpreter import complete_interpreter, interpreted

TINY = Shape(2, 1, 16)


@pytest.fixture(autouse=True)
def interpreter():
    if not interpreted():
        pytest.skip("the interpreter is off")
    complete_interpreter()


def test_workloads_are_the_same_on_every_call_and_within_their_bounds():
    for workload in WORKLOADS.values():
        layout = workload.layout("cpu")
        assert layout.groups == workload.layout("cpu").groups
        assert len(layout.groups) == workload.groups
        for prompt, completions in layout.groups:
            assert abs(prompt - workload.prompt) <= workload.prompt_spread
            assert len(completions) == workload.completions
            assert all(workload.low <= length <= workload.high for length in completions)
    assert WORKLOADS["4 x 16, prompt 2048, 128-512"].layout("cpu").groups[0].prompt == 2048


def test_sharing_and_copies_do_the_same_work():
    workload = Workload(1, 2, 5, 3, 4)
    shared, copied = (passes(name, TINY, workload, "cpu") for name in ("logitless", "logitless-unshared"))
    layout = workload.layout("cpu")
    assert shared.forward().shape[0] == layout.num_tokens
    assert copied.forward().shape[0] == layout.num_tokens + 5
    assert all(torch.isfinite(x).all() for x in (*shared.backward(), *copied.backward()))


def test_a_kernel_for_even_lengths_is_not_measured_on_others():
    with pytest.raises(NotMeasured, match="one length"):
        measure("cudnn", TINY, Workload(1, 2, 5, 3, 9), "cpu")


def test_what_the_file_has_is_kept_and_what_is_missing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attention, "WORKLOADS", {"tiny": Workload(1, 2, 4, 2, 3)})
    calls = []

    def counted(contender, *rest):
        calls.append(contender)
        if contender == "cudnn":
            raise NotMeasured("no")
        return {"forward_ms": 1.0, "backward_ms": 2.0}

    monkeypatch.setattr(attention, "measure", counted)
    options = argparse.Namespace(
        shapes=["2,1,16"], workloads=["tiny"], contenders=["logitless"], again=False, seconds=60.0, device="cpu",
        out=tmp_path,
    )  # fmt: skip
    attention.run(options)
    options.contenders = ["logitless", "cudnn", "flex"]
    attention.run(options)
    assert calls == ["logitless", "cudnn", "flex"]
    rows = json.loads((tmp_path / "attention-cpu.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == ["logitless", "flex"]
    assert rows[0] == {
        "shape": "2,1,16", "workload": "tiny", "contender": "logitless", "forward_ms": 1.0, "backward_ms": 2.0
    }  # fmt: skip
    options.again, options.seconds = True, -1.0
    attention.run(options)
    assert len(calls) == 3
    assert "forward    1.000 ms" in capsys.readouterr().out


def test_the_committed_results_hold_every_shape_workload_and_contender(pytestconfig):
    rows = json.loads((pytestconfig.rootpath / "benchmarks/results/attention-H200.json").read_text())["rows"]
    found = {(row["shape"], row["workload"], row["contender"]) for row in rows}
    assert {contender for *_, contender in found} == set(CONTENDERS)
    for shape in SHAPES:
        for workload in WORKLOADS:
            for contender in ("logitless", "logitless-unshared", "flash-attention-2"):
                assert (str(shape), workload, contender) in found


def test_no_committed_workload_is_slower_than_flash_attention(pytestconfig):
    rows = json.loads((pytestconfig.rootpath / "benchmarks/results/attention-H200.json").read_text())["rows"]
    total = {(r["shape"], r["workload"], r["contender"]): r["forward_ms"] + r["backward_ms"] for r in rows}
    for (shape, workload, contender), milliseconds in total.items():
        if contender.startswith("logitless"):
            assert milliseconds < total[shape, workload, "flash-attention-2"]
