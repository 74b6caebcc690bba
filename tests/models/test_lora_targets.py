"""LoRA over a mixture of experts: what is adapted, that every factor learns, and that saved is what was trained."""

import copy

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from logitless.errors import ConfigurationError
from logitless.models.export import merged_tensors
from logitless.models.lm_head import backbone_hidden, causal_lm
from logitless.models.lora import LoraOptions, add_lora, load_adapters, merge_adapters, save_adapters
from logitless.models.lora_targets import expert_weights, lora_targets
from logitless.models.router import router_modules
from tests.models.mixtures import MIXTURES, mixture
from tests.models.tiny import adapted, packed, tiny

UNLIKE = [
    "qwen3_moe",
    "gpt_oss",
    "glm4_moe",
]  # plain; experts transposed, with biases; with shared ones, and layers without


def _adapted_weights(model):
    """The names of weights that an adapter changes, by the numbers."""
    plain = {name: tensor.clone() for name, tensor in causal_lm(model).state_dict().items()}
    merged = dict(merged_tensors(adapted(model)))
    return {name for name in merged if not torch.equal(merged[name], plain[name])}


@pytest.mark.parametrize("name", MIXTURES)
def test_all_linear_adapts_every_linear_module_and_every_expert_but_neither_routers_nor_the_head(name):
    model = mixture(name)
    linear = {f"{key}.weight" for key, module in model.named_modules() if isinstance(module, nn.Linear)}
    experts = set(expert_weights(model))
    assert len(experts) == 2 * len(router_modules(model))
    left_out = {key for key in linear if any(f".{name}." in f".{key}" for name in router_modules(model))}
    left_out |= {key for key in linear if name == "jamba" and "dt_proj" in key}  # read by its weight, without adapters
    assert _adapted_weights(model) == (linear | experts) - left_out - {"lm_head.weight"}


@pytest.mark.parametrize(
    ("name", "targets", "ends"),
    [
        ("qwen3_moe", ("q_proj", "gate_up_proj"), ("q_proj.weight", "experts.gate_up_proj")),
        ("qwen3_moe", ("gate",), ("mlp.gate.weight",)),
        ("gpt_oss", ("router", "experts.down_proj"), ("mlp.router.weight", "experts.down_proj")),
        ("glm4_moe", ("shared_experts.up_proj",), ("shared_experts.up_proj.weight",)),
        ("glm4_moe", ("down_proj",), ("down_proj.weight", "experts.down_proj")),
    ],
)
def test_targets_are_ends_of_names_of_linear_modules_experts_and_routers(name, targets, ends):
    model = mixture(name)
    expected = {key for key in model.state_dict() if f".{key}".endswith(tuple(f".{end}" for end in ends))}
    merged = add_lora(model, LoraOptions(rank=2, targets=targets))
    with torch.no_grad():
        for key, parameter in merged.named_parameters():
            if "lora_B" in key:
                parameter.fill_(1.0)
    plain = dict(mixture(name).state_dict())
    assert {key for key, tensor in merged_tensors(merged) if not torch.equal(tensor, plain[key])} == expected


def test_targets_that_name_nothing_are_refused_with_the_names_that_there_are():
    with pytest.raises(
        ConfigurationError, match=r"given 'gate_proj', 'up_proj'.*down_proj, gate, gate_up_proj, k_proj"
    ):
        lora_targets(mixture("qwen3_moe"), ("q_proj", "gate_proj", "up_proj"))
    assert expert_weights(tiny("llama")) == []


def test_dropout_is_refused_for_experts_and_not_for_attention():
    with pytest.raises(ConfigurationError, match="no dropout in adapters of experts"):
        add_lora(mixture("qwen3_moe"), LoraOptions(rank=2, dropout=0.1))
    add_lora(mixture("qwen3_moe"), LoraOptions(rank=2, dropout=0.1, targets=("q_proj",)))


@pytest.mark.parametrize("name", UNLIKE)
def test_gradients_reach_every_factor_of_the_experts_that_had_tokens_and_no_other(name):
    model = adapted(mixture(name)).train()
    chosen = {}
    for key, module in router_modules(model).items():
        module.register_forward_hook(lambda *given, key=key: chosen.update({key: set(given[-1][2].unique().tolist())}))
    backbone_hidden(model, packed([1])).square().sum().backward()
    layers = 0
    for key, module in causal_lm(model).named_modules():
        if key.endswith(".experts") and hasattr(module, "lora_A"):
            router = next(name for name in chosen if f"{key}.".startswith(f"model.{name.rsplit('.', 1)[0]}."))
            layers += 1
            assert 0 < len(chosen[router]) < 4
            for wrapper in (module, module.base_layer):
                a = wrapper.lora_A["default"].weight.grad.unflatten(0, (4, -1))  # [E, R, in]
                b = wrapper.lora_B["default"].weight.grad.unflatten(1, (-1, 4))  # [out, R, E]
                for expert in range(4):
                    for factor in (a[expert], b[:, :, expert]):
                        assert bool((factor != 0).any()) == (expert in chosen[router]), (key, expert)
    assert layers == len(chosen)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_merged_mixture_reloaded_in_plain_transformers_gives_the_same_logits(name, tmp_path):
    model, inputs = adapted(mixture(name)), packed([9])
    with torch.no_grad():
        logits = causal_lm(model).get_output_embeddings()(backbone_hidden(model, inputs))
        found = {key: tensor.clone() for key, tensor in merged_tensors(model)}
        merge_adapters(copy.deepcopy(model)).save_pretrained(tmp_path)
        plain, report = AutoModelForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True, attn_implementation="eager"
        )
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        stored = plain.state_dict()
        assert all(torch.equal(found[key], stored[key]) for key in found)
        reloaded = plain(input_ids=inputs.input_ids[None]).logits[0]
    # The adapters' products, some tens of times the weights, are added before each product here and once there.
    assert float((reloaded - logits).abs().max()) < 1e-4 * float(logits.abs().max())


@pytest.mark.parametrize("name", UNLIKE)
def test_an_adapter_of_experts_is_read_back_as_it_was_here_and_by_peft(name, tmp_path):
    model, inputs = adapted(mixture(name)), packed([5, 1, 9])
    save_adapters(model, tmp_path)
    with torch.no_grad():
        before = backbone_hidden(model, inputs)
        assert not torch.equal(before, backbone_hidden(mixture(name), inputs))
        assert torch.equal(backbone_hidden(load_adapters(mixture(name), tmp_path), inputs), before)
        assert torch.equal(backbone_hidden(peft.PeftModel.from_pretrained(mixture(name), tmp_path), inputs), before)


def test_a_merged_expert_is_rounded_once():
    model = adapted(mixture("qwen3_moe", dtype=torch.bfloat16))
    wrapper = causal_lm(model).model.layers[0].mlp.experts.base_layer
    a, b = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
    assert a.dtype == b.dtype == torch.float32
    weight = wrapper.base_layer.gate_up_proj
    change = torch.stack([b[:, e::4] @ a[2 * e : 2 * e + 2] for e in range(4)]) * wrapper.scaling["default"]
    found = dict(merged_tensors(model, dtype=torch.bfloat16))["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(found, (weight.float() + change).bfloat16())


def test_without_weights_a_mixture_gets_the_same_adapters():
    shapes = []
    for device in ("cpu", "meta"):
        model = add_lora(mixture("qwen3_moe").to(device), LoraOptions(rank=2))
        shapes.append({name: p.shape for name, p in model.named_parameters()})
        assert {p.device.type for p in model.parameters()} == {device}
    assert shapes[0] == shapes[1]
