"""The variable-length kernel, under the truth rule: no further from float64 than padded SDPA in the same dtype."""

from itertools import product

import pytest
import torch
from torch import Tensor

from logitless.models import packed as module
from logitless.models.attention import AttentionLayout
from logitless.models.lm_head import backbone_hidden, verify_lm_head, verify_packing, why_unshared
from logitless.models.loading import load_model
from logitless.models.packed import packed_attention
from logitless.models.packed_layout import PackedLayout
from logitless.types import PromptGroup
from tests.models.families import FAMILY
from tests.models.test_packed import causal_by_hand, one_at_a_time
from tests.models.tiny import CONFIGS, packed, tiny

pytestmark = pytest.mark.gpu
LENGTHS = (1, 130, 7, 64, 3, 257)


def value_and_gradients(inputs: list[Tensor], upstream: Tensor, window: int | None) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    layout = PackedLayout(LENGTHS, "cuda")
    out = packed_attention(*leaves, layout, scaling=0.2, sliding_window=window)[0]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def truth(inputs: list[Tensor], upstream: Tensor, window: int | None) -> list[Tensor]:
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    out = causal_by_hand(*leaves, list(LENGTHS), window, 0.2)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.double())]


@pytest.mark.parametrize("window", [None, 1, 16, 200])
@pytest.mark.parametrize("key_heads", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_is_no_further_from_float64_than_padded_attention(window, key_heads, dtype, monkeypatch):
    torch.use_deterministic_algorithms(False)
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, 8, sum(LENGTHS), 32), (1, key_heads, sum(LENGTHS), 32), (1, key_heads, sum(LENGTHS), 32)]
    inputs = [torch.randn(s, generator=generator, device="cuda").to(dtype) for s in shapes]
    upstream = torch.randn(sum(LENGTHS), 8, 32, generator=generator, device="cuda").to(dtype)
    exact = truth(inputs, upstream, window)
    kernel = value_and_gradients(inputs, upstream, window)
    monkeypatch.setattr(module, "_variable_length_kernel_runs", lambda *_: False)
    padded = value_and_gradients(inputs, upstream, window)
    assert not torch.equal(kernel[1], padded[1]), "both ran the same path"
    for mine, plain, right in zip(kernel, padded, exact, strict=True):
        assert (mine - right).abs().max() <= 2 * (plain - right).abs().max() + 1e-6


def test_padded_attention_in_float64_is_softmax_by_hand_on_the_device():
    torch.use_deterministic_algorithms(False)
    q, k, v = (torch.randn(1, 4, 14, 8, dtype=torch.float64) for _ in range(3))
    out = packed_attention(q.cuda(), k.cuda(), v.cuda(), PackedLayout((5, 9), "cuda"), scaling=0.3)
    torch.testing.assert_close(out[0].cpu(), causal_by_hand(q, k, v, [5, 9], None, 0.3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "autocast", "lengths"),
    [
        *product(("llama", "qwen3", "mistral-window", "gemma3", "gpt2"), (False, True), ((5, 1, 9, 30, 2),)),
        *product(("qwen3",), (False,), ((60,), (20, 20, 20))),
    ],
)
def test_models_in_bfloat16_equal_their_sequences_run_alone_and_score_bitwise_as_they_train(name, autocast, lengths):
    torch.use_deterministic_algorithms(False)
    dtype = torch.float32 if autocast else torch.bfloat16
    model, inputs = tiny(name, dtype=dtype, device="cuda").train(), packed(list(lengths)).to("cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        trained = backbone_hidden(model, inputs)
        with torch.no_grad():
            scored = backbone_hidden(model, inputs)
            alone = one_at_a_time(model, inputs)
    assert torch.equal(scored, trained.detach())
    torch.testing.assert_close(trained.float(), alone.float(), rtol=0.05, atol=0.05 * alone.abs().max().item())
    trained.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    verify_lm_head(model)
    verify_packing(model)


@pytest.mark.parametrize("shares", [False, True], ids=["packed", "shared"])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(2.0, False), (None, True), (2.0, True)])
def test_softcaps_and_sinks_by_the_kernel_are_no_further_from_float64_than_written_out(
    softcap, has_sinks, shares, monkeypatch
):
    torch.use_deterministic_algorithms(False)
    shared = AttentionLayout([PromptGroup(100, (30, 7)), PromptGroup(3, (40,))], "cuda")
    layout = shared if shares else PackedLayout((100, 37, 43), "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    given = [torch.randn(1, heads, 180, 32, generator=generator, device="cuda").bfloat16() for heads in (8, 2, 2)]
    given += [torch.randn(8, generator=generator, device="cuda").bfloat16()] if has_sinks else []
    upstream = torch.randn(1, 180, 8, 32, generator=generator, device="cuda").bfloat16()

    def run(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in given]
        options = {"sliding_window": 50, "softcap": softcap, "sinks": leaves[3] if has_sinks else None}
        out = packed_attention(*leaves[:3], layout, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))]

    exact, kernel = run(torch.float64), run(torch.bfloat16)
    monkeypatch.setattr(module, "_shared_kernel_runs", lambda *_: False)
    written_out = run(torch.bfloat16)
    assert not torch.equal(kernel[1], written_out[1]), "both ran the same path"
    for mine, plain, right in zip(kernel, written_out, exact, strict=True):
        assert (mine - right).abs().max() <= 2 * (plain - right).abs().max() + 1e-3


@pytest.mark.parametrize(
    "name", ["gpt_oss", "gemma2", "llama4_text", "deepseek_v3", "qwen3_5_text", "nemotron_h", "lfm2"]
)
def test_architectures_pass_their_checks_in_bfloat16_and_train(name):
    torch.use_deterministic_algorithms(False)
    config = FAMILY[name].config
    if name != "deepseek_v3":
        config |= {"head_dim": config["head_dim"] * 4}
    if "moe_intermediate_size" in config:
        config |= {"moe_intermediate_size": 16}  # torch's grouped products need rows of multiples of 16 bytes
    model = load_model(config, dtype=torch.bfloat16, device="cuda", random_weights=True)  # which verifies
    assert why_unshared(model) is None
    backbone_hidden(model.train(), packed([5, 1, 9, 30, 2], 40).to("cuda")).float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_a_float32_model_passes_its_checks_where_tf32_is_allowed():
    torch.set_float32_matmul_precision("high")
    try:
        wide = {"hidden_size": 896, "intermediate_size": 2048, "num_attention_heads": 14}
        verify_packing(load_model(CONFIGS["qwen2"] | wide, device="cuda", random_weights=True))
    finally:
        torch.set_float32_matmul_precision("highest")
