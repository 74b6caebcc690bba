"""A base in four bits: LoRA on it is LoRA on the weights that four bits say."""

import sys

import bitsandbytes
import pytest
import torch
from torch import nn

from logitless.data.packing import pack
from logitless.errors import UnavailableError
from logitless.models.four_bit import BITS_A_WEIGHT, base_linears, quantize
from logitless.models.loading import load_model
from logitless.models.lora import LoraOptions, add_lora
from logitless.train.learn.policy import Policy
from logitless.types import Completion, Prompt
from tests.models.tiny import CONFIGS

CONFIG = CONFIGS["llama"] | {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
CPU = torch.device("cpu")


def test_a_library_that_is_absent_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UnavailableError, match=r"logitless\[four-bit\]"):
        load_model(CONFIG, random_weights=True, four_bit="nf4")


def test_on_the_meta_device_nothing_is_rounded_and_nothing_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    model = load_model(CONFIG, random_weights=True, device="meta", four_bit="nf4")
    assert all(type(layer) is nn.Linear for _, layer in base_linears(model))


def test_adapters_and_the_lm_head_are_no_part_of_the_base():
    model = add_lora(load_model(CONFIG, random_weights=True), LoraOptions(rank=2))
    names = [name for name, _ in base_linears(model)]
    assert len(names) == 2 * 7
    assert not any("lora" in name or "lm_head" in name for name in names)


def scored(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probs of two completions under adapters that are not nothing, and the adapters' gradients."""
    model = add_lora(model, LoraOptions(rank=2), seed=3)
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for parameter in trained:
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    prompt = Prompt("7", "", (4, 9, 4))
    batch = pack([(prompt, Completion("7", tokens, "", "stop")) for tokens in ((6, 2), (7, 11, 2))])
    logp = Policy(model).scores(batch, temperature=1.0, backend="reference").logp
    return logp.detach(), list(torch.autograd.grad(logp.sum(), trained))


def test_lora_on_four_bits_is_lora_on_the_weights_that_they_say():
    small = load_model(CONFIG, random_weights=True, four_bit="nf4")
    plain = load_model(CONFIG, random_weights=True)
    linears = dict(base_linears(small))
    assert all(type(layer) is bitsandbytes.nn.Linear4bit for layer in linears.values())
    for name, layer in base_linears(plain):
        said = linears[name](torch.eye(layer.in_features)).T.detach()
        assert 0 < float((said - layer.weight.detach()).norm() / said.norm()) < 0.2
        layer.weight.data = said
    (logp, gradients), (expected, wanted) = scored(small), scored(plain)
    assert torch.allclose(logp, expected, atol=1e-4)  # float32, sums of 128: measured 1e-6
    for found, gradient in zip(gradients, wanted, strict=True):
        assert float((found - gradient).norm() / gradient.norm()) < 1e-3


def test_a_weight_takes_a_little_more_than_four_bits():
    model = load_model(CONFIG | {"hidden_size": 256, "intermediate_size": 1024}, random_weights=True)
    weights = sum(layer.weight.numel() for _, layer in base_linears(model))
    quantize(model, "nf4", CPU)
    held = 0
    for _, layer in base_linears(model):
        state = layer.weight.quant_state
        held += layer.weight.numel() + state.absmax.numel() * state.absmax.element_size()
        held += state.state2.absmax.numel() * 4
    assert 8 * held / weights == pytest.approx(BITS_A_WEIGHT, rel=0.01)
