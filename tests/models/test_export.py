"""What engines load is what a merged model would hold, under the names that its files would have."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from logitless.models.export import adapter_tensors, checkpoint_tensors, merged_tensors
from logitless.models.lora import LoraOptions, merge_adapters, save_adapters
from tests.models.mixtures import MIXTURES, OTHERS, mixture
from tests.models.tiny import adapted, tiny


def _adapted(**options):
    return adapted(tiny("llama"), LoraOptions(rank=2, targets=("q_proj", "down_proj"), **options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"dropout": 0.2},
        {"modules_to_save": ("lm_head",)},
        {"modules_to_save": ("lm_head", "embed_tokens", "norm")},
    ],
)
def test_merged_tensors_are_those_of_the_merged_model(options):
    model = _adapted(**options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".modules_to_save." in name:
                parameter.add_(1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = dict(merged_tensors(model))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    expected = dict(merge_adapters(copy.deepcopy(model)).named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_without_an_adapter_the_tensors_are_the_models_own():
    model = tiny("llama")
    found = dict(merged_tensors(model))
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(found[name].data_ptr() == p.data_ptr() for name, p in model.named_parameters())


def test_an_adapters_tensors_have_the_names_of_its_file(tmp_path):
    model = _adapted()
    save_adapters(model, tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    found = dict(adapter_tensors(model))
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("name", [*MIXTURES, *OTHERS, "llama-tied", "gpt2"])
def test_checkpoint_tensors_are_what_transformers_writes_to_files(name, tmp_path):
    model = mixture(name) if name in {*MIXTURES, *OTHERS} else tiny(name)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    found = dict(checkpoint_tensors(model))
    assert found.keys() == stored.keys()
    assert all(found[key].dtype == stored[key].dtype and torch.equal(found[key], stored[key]) for key in stored)


def test_beside_an_adapter_experts_are_taken_apart_and_their_correction_bias_is_there():
    model = mixture("glm4_moe")
    found = dict(checkpoint_tensors(adapted(model, LoraOptions(rank=2, targets=("q_proj",))), dtype=torch.bfloat16))
    assert found["model.layers.1.mlp.experts.3.up_proj.weight"].dtype == torch.bfloat16
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert found["model.layers.1.mlp.gate.e_score_correction_bias"].data_ptr() == bias.data_ptr()
    fused = model.model.layers[1].mlp.experts.gate_up_proj
    assert torch.equal(found["model.layers.1.mlp.experts.3.up_proj.weight"], fused[3, 24:].bfloat16())


def test_weights_that_a_file_holds_as_one_are_put_together(tmp_path):
    """HRM's projections are one weight in a checkpoint; no other weight waits for them."""
    config = AutoConfig.for_model(
        "hrm_text", hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4, vocab_size=61
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    found = dict(checkpoint_tensors(model))
    assert any("gate_up_proj" in key for key in stored)
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[key], stored[key]) for key in stored)
    joined = [name for name, _ in checkpoint_tensors(model) if "gate_up_proj" in name or "gqkv" in name]
    assert list(found)[-len(joined) :] == joined
