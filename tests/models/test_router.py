"""What is read of routers is what transformers makes its load-balancing loss of, whatever the layers do besides."""

import math

import pytest
import torch

from logitless.data.packing import pack, share_prompts
from logitless.errors import ConfigurationError
from logitless.models.lm_head import backbone_hidden
from logitless.models.loading import compile_layers, disable_dropout
from logitless.models.lora import LoraOptions, add_lora
from logitless.models.router import (
    Choice,
    Routers,
    configured_router_loss,
    freeze_routers,
    router_loss_coefficient,
    router_modules,
    routing_sums,
    token_copies,
)
from logitless.objective.load_balancing import load_balancing_loss
from logitless.types import Completion, Prompt
from tests.models.mixtures import MIXTURES, OTHERS, WITH_LOSS, mixture
from tests.models.tiny import packed, tiny


def _sums(model, inputs, **options):
    routers = Routers(model)
    with routers.read() as choices:
        hidden = backbone_hidden(model, inputs)
    assert len(choices) == routers.num_layers
    return routing_sums(choices, token_copies(inputs), **options), hidden, choices


@pytest.mark.parametrize("name", MIXTURES)
def test_the_load_of_every_token_and_layer_is_counted_and_routers_are_read_only_where_asked(name):
    model, inputs = mixture(name), packed([5, 1, 9])
    routers = Routers(model)
    with routers.read() as choices:
        backbone_hidden(model, inputs)
    backbone_hidden(model, inputs)
    assert len(choices) == routers.num_layers
    load = routing_sums(choices, token_copies(inputs)).load
    assert load.shape == (routers.num_layers, 4)
    assert load.sum(-1).tolist() == [2.0 * 15] * routers.num_layers


@pytest.mark.parametrize("name", MIXTURES)
def test_a_routers_logits_are_read_with_the_experts_that_the_largest_of_them_choose(name):
    model = mixture(name)
    biased = any(key.endswith("correction_bias") for key, _ in model.named_buffers())  # which chooses otherwise
    for logits, experts in _sums(model, packed([5, 1, 9]))[2]:
        assert (logits.shape, experts.shape) == ((15, 4), (15, 2))
        largest = logits.topk(2, dim=-1).indices
        assert logits.is_floating_point()
        assert biased or torch.equal(experts.sort(-1).values, largest.sort(-1).values)


@pytest.mark.parametrize("name", OTHERS)
def test_routers_of_every_other_family_of_mixtures_are_read_but_longcats_which_give_no_logits(name):
    model, inputs = mixture(name), packed([5, 1, 9])
    if name == "longcat_flash":
        assert Routers.of(model) is None
        return
    sums, _, choices = _sums(model, inputs)
    assert {each.logits.shape for each in choices} == {(15, 4)}
    assert sums.load.sum(-1).tolist() == [2.0 * 15] * len(choices)
    assert 0 < float(sums.entropy) / (15 * len(choices)) < math.log(4)


def test_the_gradient_of_probabilities_is_that_of_the_plain_softmax():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 4, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.tensor([1.0, 2.0, 0.0, 1.0, 1.0, 3.0, 1.0])
    sums = routing_sums([Choice(logits, logits.topk(2).indices)], weight)
    plain = (weight.double()[:, None] * logits.softmax(-1)).sum(0)
    upstream = torch.randn(4, dtype=torch.float64, generator=generator)
    mine, other = (torch.autograd.grad(each @ upstream, logits)[0] for each in (sums.probability, plain))
    torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)
    entropy = -(weight.double() @ (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1))
    assert float(sums.entropy) == pytest.approx(float(entropy.detach()), rel=1e-12)


def test_a_token_counts_once_for_each_sequence_that_shares_it():
    prompt = Prompt("a", "", (5, 6, 7))
    pairs = [(prompt, Completion("a", ids, "", "stop")) for ids in [(8, 9, 10), (8, 9, 11, 12), (13,)]]
    apart = pack(pairs).inputs
    shared = share_prompts(apart)
    assert len(shared.input_ids) < len(apart.input_ids)
    copies = token_copies(shared)
    assert copies.sum() == len(apart.input_ids)
    counted = torch.zeros(20).scatter_add(0, shared.input_ids, copies)
    assert torch.equal(counted, torch.bincount(apart.input_ids, minlength=20).float())


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize("way", ["checkpointing", pytest.param("compiled", marks=pytest.mark.slow)])
def test_recomputed_and_compiled_layers_say_the_same_with_the_same_gradient(way):
    found = []
    for changed in (False, True):
        model, inputs = mixture("qwen3_moe").train(), packed([5, 1, 9])
        if changed and way == "checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        routers = Routers(model)
        if changed and way == "compiled":
            compile_layers(model, backend="eager")
        with routers.read() as choices:
            hidden = backbone_hidden(model, inputs)
        sums = routing_sums(choices, token_copies(inputs))
        loss = load_balancing_loss(sums.counted, sums.probability, experts_per_token=2)
        (loss + hidden.square().sum()).backward()
        assert len(choices) == 2
        found.append((loss, sums.load, [p.grad for p in model.parameters() if p.grad is not None]))
    (one, load, grads), (other, other_load, other_grads) = found
    assert torch.equal(load, other_load)
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(grads, other_grads)


def test_no_loss_is_made_for_routers_that_transformers_has_none_for():
    for name in MIXTURES:
        model = mixture(name)
        assert router_loss_coefficient(model, None) == router_loss_coefficient(model, 0) == 0.0
        if name in WITH_LOSS:
            assert router_loss_coefficient(model, 0.3) == 0.3
            assert configured_router_loss(model) > 0
        else:
            assert configured_router_loss(model) == 0
            with pytest.raises(ConfigurationError, match="correction bias"):
                router_loss_coefficient(model, 0.3)
    with pytest.raises(ConfigurationError, match="no routers"):
        router_loss_coefficient(tiny("llama"), 0.3)
    assert router_loss_coefficient(tiny("llama"), "config") == 0.0


@pytest.mark.parametrize(("switched_on", "coefficient"), [(True, 0.02), (False, 0.0)])
def test_the_configs_loss_is_taken_where_the_config_switches_it_on(switched_on, coefficient):
    model = mixture("mixtral", router_aux_loss_coef=0.02, output_router_logits=switched_on)
    assert router_loss_coefficient(model, "config") == coefficient


def test_the_noise_of_routers_is_switched_off_with_dropout():
    model, inputs = mixture("mixtral", router_jitter_noise=0.5).train(), packed([9])
    assert not torch.equal(backbone_hidden(model, inputs), backbone_hidden(model, inputs))
    assert disable_dropout(model) == 3  # two layers and the config
    assert torch.equal(backbone_hidden(model, inputs), backbone_hidden(model, inputs))


@pytest.mark.parametrize("name", MIXTURES)
def test_a_frozen_router_is_not_trained_and_lets_gradients_through(name):
    model, inputs = mixture(name).train(), packed([5, 1, 9])
    gradients = []
    for frozen in (False, True):
        if frozen:
            freeze_routers(model)
        backbone_hidden(model, inputs).square().sum().backward()
        routers = {p for module in router_modules(model).values() for p in module.parameters()}
        assert routers
        assert any(p.grad is not None for p in routers) != frozen  # ERNIE's have a bias without a gradient
        others = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p not in routers}
        assert "model.embed_tokens.weight" in others
        gradients.append(others)
        model.zero_grad(set_to_none=True)
    trained, kept = gradients
    assert trained.keys() == kept.keys()
    assert all(torch.equal(trained[name], kept[name]) for name in trained)


def test_a_router_cannot_be_frozen_that_is_adapted_or_absent():
    with pytest.raises(ConfigurationError, match=r"frozen: true.*; given llama, which has no routers"):
        freeze_routers(tiny("llama"))
    for options in ({"targets": ("gate",)}, {"targets": ("q_proj",), "modules_to_save": ("mlp.gate",)}):
        model = add_lora(mixture("qwen3_moe"), LoraOptions(rank=2, **options))
        with pytest.raises(ConfigurationError, match=r"'gate' in model.lora.targets or model.lora.modules_to_save"):
            freeze_routers(model)
        assert len(_sums(model, packed([5]))[2]) == 2  # each is read once all the same
