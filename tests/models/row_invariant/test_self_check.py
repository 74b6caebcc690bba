"""The self-check away from a GPU: what is looked at, what attention says, and findings that survive the disk."""

import pytest
import torch

from logitless.models.kernels.experts import Act
from logitless.models.kernels.linear import Tile
from logitless.models.kernels.rotary import Heads
from logitless.models.kernels.window import Chunks
from logitless.models.lora import LoraOptions, add_lora
from logitless.models.row_invariant import self_check as check
from logitless.models.row_invariant.delta_check import DeltaProblem
from logitless.models.row_invariant.delta_net import DecodedStates, DeltaForm
from logitless.models.row_invariant.experts_check import ExpertsProblem
from logitless.models.row_invariant.layers import AttentionForm, install_row_invariant
from logitless.models.row_invariant.linear import Plan, Shape
from tests.models.mixtures import mixture
from tests.models.tiny import tiny


def test_every_product_of_a_model_is_looked_at_once_as_it_runs():
    model = tiny("qwen2")
    install_row_invariant(model)
    names = [check.shape_name(shape) for shape, _ in check.product_shapes(model)]
    assert names == [
        "32 -> 64 float32, bias", "32 -> 32 float32", "32 -> 96 float32", "48 -> 32 float32",
        "32 -> 96 float32, silu gate", "32 -> 61 float32",
    ]  # fmt: skip


def test_first_factors_of_lora_are_looked_at_together_and_each_by_itself():
    model = add_lora(tiny("qwen2"), LoraOptions(rank=2))
    install_row_invariant(model)
    names = [check.shape_name(shape) for shape, _ in check.product_shapes(model)]
    lora = ["32 -> 6 float32", "32 -> 2 float32", "32 -> 4 float32", "48 -> 2 float32"]
    assert [name for name in names if name in lora] == lora
    assert not any("gate" in name for name in names)  # an adapter stands between


def test_findings_survive_the_disk_and_a_folder_that_cannot_be_written_is_no_failure(tmp_path):
    plan = Plan({64: Tile(16, 16, 16, 1, 1)}, {1: Tile(16, 32, 16, 1, 1, swapped=True), 512: "cublas"})
    finding = check.LinearFinding({1: "cublas"}, {"cublaslt": [1, 16]}, {1: {"cublas": 3.5}})
    path = tmp_path / "folder" / "known.json"
    known = check.Known(plan, finding)
    check._write(path, check._KNOWN.dump_python(known))
    assert check._KNOWN.validate_python(check._read(path)) == known
    (tmp_path / "file").write_text("")
    check._write(tmp_path / "file" / "known.json", {})
    assert check._read(tmp_path / "file" / "known.json") == {}


@pytest.mark.parametrize("window", [None, Chunks(8192)], ids=str)
def test_attention_here_has_the_bits_of_the_packed_row(window):
    form = AttentionForm(Heads(2, 1, 16, 16), 0.25, window, None, "")
    found = check.AttentionProblem.of(form, torch.bfloat16, torch.device("cpu")).differences()
    assert set(found) == {
        f"{how}, {what}"
        for how in ("decoded", "few rows decoded", "decoded behind shared pages", "prefilled in chunks")
        for what in ("output", "log-sum-exp")
    }
    assert check.Report({}, attention={"form": found}).exact
    assert not check.Report({}, attention={"form": found | {"decoded, log-sum-exp": 1}}).exact


def test_a_gated_delta_net_here_has_the_bits_of_the_packed_row():
    problem = DeltaProblem.of(DeltaForm(1, 2, 16, 16, 3, 1e-6), torch.bfloat16, torch.device("cpu"))
    found = problem.differences()
    assert found == dict.fromkeys(("prefilled in chunks", "decoded behind a prompt", "decoded"), 0)
    problem.slots.cache.solve[2, :, 1:].zero_()
    wrong = problem._decoded(DecodedStates.of(torch.tensor([2]), torch.tensor([2])), 2)
    assert not torch.equal(wrong, problem._packed()[2:3])


def test_experts_here_have_the_same_bits_in_every_tile():
    for act, transposed in ((Act(), False), (Act(interleaved=True, limit=7.0), True)):
        problem = ExpertsProblem(32, 20, act, transposed, torch.bfloat16, torch.device("cpu"))
        found = problem.differences()
        assert found == dict.fromkeys(("tiles of 16 rows", "tiles of 32 rows", "tiles of 64 rows"), 0)
        assert check.Report({}, experts={problem.name: found}).exact
        assert not check.Report({}, experts={problem.name: found | {"tiles of 16 rows": 1}}).exact


def test_a_mixture_has_its_experts_checked_and_its_routers_product():
    model = mixture("qwen3_moe")
    install_row_invariant(model)
    decoder = model.model
    (problem,) = check._experts(decoder)
    assert (problem.width, problem.inner) == (model.config.hidden_size, 24)
    router = decoder.layers[0].mlp.gate.weight
    assert (Shape.of(router, None), False) in check.product_shapes(model)


def test_a_kernel_that_several_shapes_share_is_compiled_once_and_before_the_check(monkeypatch):
    tiles = {16: Tile(16, 16, 16, 1, 1), 512: Tile(32, 32, 32, 1, 1)}
    monkeypatch.setattr(check, "default_tiles", lambda _: tiles)
    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    shapes = [Shape(n, k, bf16, bf16, False, cpu) for n, k in ((64, 256), (96, 512), (64, 272))]
    kernels = len(tiles) + 1  # and the reference
    assert len(check.compilations(shapes[:2])) == kernels
    assert len(check.compilations(shapes)) == kernels + 2  # the last is no multiple of 32 or of the reference's depth
    float32 = shapes[0]._replace(dtype=torch.float32)
    assert check.compilations([float32]) == []
    ran = []
    monkeypatch.setattr(check, "_try", lambda tile, rows, *_, ahead: ran.append((tile, rows.shape[1])))
    for call in check.compilations(shapes[:1]):
        call()
    assert {length for _, length in ran} == {256}
    assert {tile for tile, _ in ran} == {*tiles.values(), check.REFERENCE}


def summed(terms, *, parts):
    """Sums over the last dimension in float32, one term after the other in each part, then the parts."""
    found = torch.zeros(terms.shape[:-1])
    for part in terms.chunk(parts, -1):
        own = torch.zeros(terms.shape[:-1])
        for k in range(part.shape[-1]):
            own = own + part[..., k]
        found = found + own
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("length", "bias"), [(512, False), (513, True), (64, True), (4096, False)])
def test_another_order_of_sums_changes_nearly_every_number_that_is_checked(dtype, length, bias):
    shape = Shape(80, length, dtype, dtype, bias, torch.device("cpu"))
    rows, weight, added = check.cancelling_operands(shape, 1)  # a single row: 80 numbers
    added = torch.zeros(80) if added is None else added.float()
    assert (rows.double() @ weight.double().t()).abs().max() == 0

    def differs(rows, weight, added):
        terms = rows.float() * weight.float()
        one, two = ((summed(terms, parts=parts) + added).to(dtype) for parts in (1, 2))
        return int((one != two).sum())

    assert differs(rows, weight, added) > 40
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(n, length, generator=generator).to(dtype) for n in (1, 80)]
    assert differs(*plain, added) < 4  # of random operands an order is hardly seen


def test_a_second_library_is_looked_at_where_times_are_compared_and_where_the_first_failed(monkeypatch):
    looked = []

    def product(library, rows, weight, bias, out):
        looked.append((library, len(rows)))
        out.copy_(rows @ weight.t())
        if library == "cublas" and len(rows) in (16, 1024):
            out[0, 0] += 1

    monkeypatch.setattr(check, "library_product", product)
    rows, weight = torch.randn(1280, 4).round(), torch.randn(3, 4).round()  # exact in any order
    reference, plan, finding = rows @ weight.t(), Plan({}), check.LinearFinding()
    for library in ("cublas", "cublaslt"):
        check._look_at(
            library, (1, 16, 768, 1024, 1280), rows, weight, None, torch.empty(1280, 3), reference, plan, finding
        )
    assert finding.failed == {"cublas": [16, 1024]}
    assert [count for library, count in looked if library == "cublaslt"] == [1, 16, 1024]
    assert plan.ways == {1: "cublas", 16: "cublaslt", 768: "cublas", 1024: "cublaslt", 1280: "cublas"}
