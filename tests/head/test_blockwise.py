"""What a backward by blocks of the vocabulary rounds, and how often."""

import pytest
import torch

from logitless.head import blockwise, token_divergence, token_scores
from logitless.types import LMHead


@pytest.fixture
def half_products(monkeypatch):
    """Products of 16-bit operands, as a GPU has them: exact, and added in float32."""
    addmm = torch.addmm

    def widened(total, a, b, *, out_dtype, beta, out, alpha=1):
        return addmm(total, a.to(out_dtype), b.to(out_dtype), beta=beta, alpha=alpha, out=out)

    monkeypatch.setattr(blockwise, "_float32_output", lambda device, dtype: True)
    monkeypatch.setattr(torch, "addmm", widened)


def log_prob(hidden, head, target, temperature):
    return token_scores(hidden, head, target, temperature=temperature, backend="chunked").logp


def divergence(hidden, head, target, temperature):
    teacher = LMHead(torch.zeros_like(head.weight))
    return token_divergence(
        hidden, head, hidden, teacher, target, kind="forward_kl", temperature=temperature, backend="chunked"
    ).divergence


@pytest.mark.parametrize("value", [log_prob, divergence])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_a_bfloat16_weights_gradient_has_one_rounding_of_each_product(value, softcap, half_products):
    hidden = torch.randn(1, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.randn(53, 24, generator=torch.Generator().manual_seed(1)).bfloat16().float()

    def gradient(dtype):
        leaf = weight.to(dtype, copy=True).requires_grad_()
        head = LMHead(leaf, scale=0.5, softcap=softcap)
        result = value(hidden.to(dtype if dtype == torch.float64 else torch.bfloat16), head, torch.tensor([3]), 0.7)
        return torch.autograd.grad(result, leaf, torch.full_like(result, 0.3))[0].double()

    exact, found = gradient(torch.float64), gradient(torch.float32)
    in_float32 = 64 * 2.0**-23  # of products 24 wide, softmax and tanh
    assert float(((found - exact) / exact).abs().max()) <= 2.0**-8 + in_float32
