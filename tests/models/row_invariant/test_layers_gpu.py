"""Row-invariant layers on a GPU: laws over many tokens, mutations that break them, gradients, and the self-check."""

import copy
import json
import subprocess
import sys

import pytest
import torch

from bits_cases import LAWS
from bits_laws import Laws, Sizes
from logitless.models.kernels.gate import gated
from logitless.models.kernels.linear import REFERENCE, fixed_order_product, gated_product
from logitless.models.kernels.sinks import with_sinks, with_sinks_backward
from logitless.models.lm_head import backbone_hidden
from logitless.models.loading import load_model
from logitless.models.row_invariant import linear
from logitless.models.row_invariant import self_check as check
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.models.row_invariant.linear import Shape, plan_for
from tests.models import bits_mutations
from tests.models.row_invariant.test_layers import (
    ATTENTION,
    COVERED,
    HYBRIDS,
    MIXTURES,
    hidden_and_gradients,
    relative,
)
from tests.models.tiny import packed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ordinary_memory")]
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
WIDE |= {"vocab_size": 4000, "max_position_embeddings": 4096, "head_dim": 64, "initializer_range": 0.05}
WIDE |= {"moe_intermediate_size": 256, "intermediate_size_mlp": 1024, "attention_chunk_size": 192}
SIZES = Sizes(24, 4, 30, 150, (520, 600, 1050))


def wide(name, dtype=torch.bfloat16, **options):
    config = {**COVERED[name], **WIDE, **options}
    if config.get("sliding_window"):
        config["sliding_window"] = 100
    if name == "phi3":
        del config["head_dim"]
    options = {"dtype": dtype, "device": "cuda", "attention": ATTENTION.get(name, "eager")}
    return load_model(config, random_weights=True, seed=1, **options).eval()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in COVERED), ("qwen3", torch.float16), ("gemma2", torch.float16)],
)
def test_every_law_holds(name, dtype):
    laws = Laws(wide(name, dtype).requires_grad_(False), "cuda", sizes=SIZES)
    found = {row["comparison"]: row["differ"] for row in laws.rows(LAWS)}
    assert found == dict.fromkeys(LAWS, 0)


@pytest.mark.parametrize("mutation", bits_mutations.MUTATIONS)
def test_a_law_turns_red_when(mutation):
    laws = Laws(wide("qwen3", head_dim=128).requires_grad_(False), "cuda", sizes=SIZES)
    with bits_mutations.MUTATIONS[mutation]():
        assert any(row["differ"] for row in laws.rows(["decoded, rows joining and leaving"]))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3", *(name for name in MIXTURES if name not in HYBRIDS)])
def test_hidden_states_and_gradients_are_no_further_from_float64_than_transformers_layers(name):
    inputs = packed([300, 40, 170], 4000).to("cuda")
    model = wide(name, num_experts_per_tok=6)  # of a mixture all: rounding changes which are chosen, here and there
    grad = torch.randn(510, 512, device="cuda", dtype=torch.float64)

    def run(model):
        hidden, gradients = hidden_and_gradients(model, inputs, grad)
        return {"hidden": hidden} | gradients

    double = copy.deepcopy(model).double()
    double.set_experts_implementation("eager")  # torch's grouped products have no float64
    exact, theirs = run(double), run(model)
    install_row_invariant(model)
    ours = run(model)
    for key, want in exact.items():
        if "sinks" in key:  # few numbers: chance decides
            continue
        error, reference = (relative(x[key], want) for x in (ours, theirs))
        assert error <= 1.3 * reference + 1e-3, (key, error, reference)


def test_gradients_of_sinks_are_those_of_float64():
    generator = torch.Generator("cuda").manual_seed(1)
    attended, log_sum_exp, sinks, grad = (
        torch.randn(shape, device="cuda", generator=generator)
        for shape in ((3001, 64, 64), (3001, 64), 64, (3001, 4096))
    )
    attended, sinks, grad = (x.bfloat16() for x in (attended, sinks, grad))
    leaves = [x.double().requires_grad_() for x in (attended, log_sum_exp, sinks)]
    exact = (leaves[0] * (leaves[1] - leaves[2]).sigmoid()[..., None]).flatten(1)
    exact.backward(grad.double())
    assert relative(with_sinks(attended, log_sum_exp, sinks).double(), exact.detach()) < 2**-8
    found = with_sinks_backward(attended, log_sum_exp, sinks, grad, sinks_dtype=torch.float32)
    for got, leaf, tolerance in zip(found, leaves, (2**-8, 1e-5, 1e-5), strict=True):
        assert relative(got.double(), leaf.grad) < tolerance
    again = with_sinks_backward(attended, log_sum_exp, sinks, grad, sinks_dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_a_training_step_leaves_no_elementwise_kernel_of_torch_in_the_layers():
    from torch.profiler import ProfilerActivity, profile

    model = wide("qwen3", num_hidden_layers=4)
    install_row_invariant(model)
    inputs = packed([300, 40, 170], 4000).to("cuda")
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
            backbone_hidden(model, inputs).backward(torch.ones(510, 512, device="cuda", dtype=torch.bfloat16))
            torch.cuda.synchronize()
        model.zero_grad()
    counts = {event.key: event.count for event in found.key_averages() if "elementwise" in event.key}
    assert not {name: count for name, count in counts.items() if count >= 4}


def test_the_self_check_is_kept_on_disk_and_plans_products(tmp_path):
    model = wide("qwen2")
    install_row_invariant(model)
    first = check.self_check(model, folder=tmp_path)
    assert first.exact
    (path,) = tmp_path.iterdir()
    known = json.loads(path.read_text())
    assert set(known["linear"]) == set(first.linear)
    again = check.self_check(model, folder=tmp_path)
    assert again.linear == first.linear
    assert again.seconds < 0.5
    weight = model.model.layers[0].mlp.down_proj.weight
    assert plan_for(Shape.of(weight, None)).ways


def test_a_library_that_fails_the_check_does_not_serve(monkeypatch):
    honest = check.library_product

    def wrong(way, rows, weight, bias, out):
        honest(way, rows, weight, bias, out)
        if way == "cublas" and len(rows) in (64, 1024):
            out[0, 0] += 1

    monkeypatch.setattr(check, "library_product", wrong)
    shape = Shape(256, 512, torch.bfloat16, torch.bfloat16, False, torch.device("cuda", 0))
    plan, finding = check.check_linear(shape)
    assert finding.failed["cublas"] == [64, 1024]
    assert plan.library(1024) != "cublas"
    assert plan.library(2048) == "cublas"
    assert plan.ways[64] != "cublas"


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_has_its_bits_at_every_number_of_rows_between_those_that_were_checked(out_dtype):
    weight = torch.randn(896, 2432, device="cuda").bfloat16()
    shape = Shape.of(weight, None, out_dtype)
    linear.set_plan(shape, check.check_linear(shape)[0])
    try:
        rows = torch.randn(4999, 2432, device="cuda").bfloat16()
        whole = linear.product(rows, weight, out_dtype=out_dtype)
        differ = [
            (linear.product(rows[start : start + count], weight, out_dtype=out_dtype) != whole[start : start + count])
            .any()
            .view(1)
            for count in (*range(1, 530), *range(530, 4999, 37))
            for start in (0, (4999 - count) // 2)
        ]
        assert not torch.cat(differ).any()
    finally:
        linear._plans.pop(shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiles_of_every_gpu_have_the_bits_of_the_reference_tile(dtype):
    rows, weight = (torch.randn(n, 1000, device="cuda").to(dtype) for n in (300, 500))
    expected = fixed_order_product(rows, weight, REFERENCE, dtype=torch.float32)
    for tile in (*linear._PLAIN.values(), linear._LOW_RANK, *linear._HOPPER.values()):
        for count in (1, 17, 300):
            assert torch.equal(fixed_order_product(rows[:count], weight, tile, dtype=torch.float32), expected[:count])
    for columns in (1, 16, 32, 48, 64):  # first factors of LoRA
        narrow = weight[:columns].contiguous()
        assert torch.equal(linear.product(rows, narrow, out_dtype=torch.float32), expected[:, :columns])


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("length", "width"), [(896, 4864), (1024, 100)])
def test_gate_and_up_in_one_kernel_have_the_bits_of_two_products_and_a_gate(gelu, length, width):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("planned on Hopper alone")
    rows = torch.randn(64, length, device="cuda").bfloat16()
    weight = torch.randn(2 * width, length, device="cuda").bfloat16() * length**-0.5
    both = fixed_order_product(rows, weight, REFERENCE)
    expected = gated(both[:, :width], both[:, width:], gelu=gelu)
    for tile in check._GATED.values():
        for count in (1, 16, 33, 64):
            assert torch.equal(gated_product(rows[:count], weight, tile, gelu=gelu), expected[:count])


@pytest.mark.parametrize("first", ["while plans are tried", "of a known plan, in an autograd function"])
def test_cublaslt_is_chosen_without_a_word_on_stderr(first):
    code = """
import sys
import torch
from logitless.models.row_invariant.linear import Plan, Shape, default_tiles, library_product, set_plan
rows, weight = (torch.ones(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))

class Product(torch.autograd.Function):
    @staticmethod
    def forward(context, rows):
        library_product("cublaslt", rows, weight, None, out := torch.empty_like(rows))
        return out

if "known" in sys.argv[1]:
    shape = Shape.of(weight, None)
    set_plan(shape, Plan(default_tiles(shape), {64: "cublaslt"}))
    Product.apply(rows)
else:
    Product.forward(None, rows)
"""
    done = subprocess.run([sys.executable, "-c", code, first], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "preferred_blas_library" not in done.stderr  # torch's own warning; imports of a machine may have theirs


@pytest.mark.multi_gpu
def test_a_second_gpu_gives_the_same_bits():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs, found = packed([300, 40, 170], 4000), []
    for device in ("cuda:0", "cuda:1"):
        with torch.cuda.device(device):
            model = wide("qwen3").to(device)
            install_row_invariant(model)
            with torch.no_grad():
                found.append(backbone_hidden(model, inputs.to(device)).cpu())
    assert torch.equal(*found)
