"""What engines load is what a merged model would hold, under the names that its files would have."""

import copy

import pytest
import torch

from logitless.models.export import adapter_tensors, merged_tensors
from logitless.models.lora import LoraOptions, merge_adapters, save_adapters
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
    from safetensors.torch import load_file

    model = _adapted()
    save_adapters(model, tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    found = dict(adapter_tensors(model))
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
