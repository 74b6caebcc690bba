"""The self-check away from a GPU: what is looked at, what attention says, and findings that survive the disk."""

import json

import torch

from logitless.models import self_check as check
from logitless.models.kernels.linear import Tile
from logitless.models.kernels.rotary import Heads
from logitless.models.linear import Plan
from logitless.models.row_invariant import AttentionForm, install_row_invariant
from tests.models.tiny import tiny


def test_every_product_of_a_model_is_looked_at_once_as_it_runs():
    model = tiny("qwen2")
    install_row_invariant(model)
    names = [check.shape_name(shape) for shape, _ in check.product_shapes(model)]
    assert names == [
        "32 -> 64 float32, bias", "32 -> 32 float32", "32 -> 96 float32", "48 -> 32 float32", "32 -> 61 float32",
    ]  # fmt: skip


def test_a_plan_survives_the_disk():
    plan = Plan({64: Tile(16, 16, 16, 1, 1)}, {1: Tile(16, 32, 16, 1, 1, swapped=True), 512: "cublas"})
    assert check._plan(json.loads(json.dumps(check._encoded(plan)))) == plan


def test_findings_survive_the_disk_and_a_folder_that_cannot_be_written_is_no_failure(tmp_path):
    finding = check.LinearFinding({1: "cublas"}, {"cublaslt": [1, 16]}, {1: {"cublas": 3.5}})
    path = tmp_path / "folder" / "known.json"
    check._write(
        path, {"finding": {"ways": finding.ways, "failed": finding.failed, "microseconds": {1: {"cublas": 3.5}}}}
    )
    assert check._finding(check._read(path)["finding"]) == finding
    (tmp_path / "file").write_text("")
    check._write(tmp_path / "file" / "known.json", {})
    assert check._read(tmp_path / "file" / "known.json") == {}


def test_attention_here_has_the_bits_of_the_packed_row():
    form = AttentionForm(Heads(2, 1, 16, 16), 0.25, None, None, "")
    found = check.check_attention(form, torch.bfloat16, torch.device("cpu"))
    assert set(found) == {
        f"{how}, {what}"
        for how in ("decoded", "few rows decoded", "prefilled in chunks")
        for what in ("output", "log-sum-exp")
    }
    assert check.Report({}, attention={"form": found}).exact
    assert not check.Report({}, attention={"form": found | {"decoded, log-sum-exp": 1}}).exact
