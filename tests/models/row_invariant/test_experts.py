"""Row-invariant mixtures: transformers' numbers and gradients, bits of rows, adapters, and what is not supported."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitless.models.kernels.experts import Slots, by_expert
from logitless.models.lm_head import backbone_hidden
from logitless.models.lora import LoraOptions, add_lora
from logitless.models.router import Routers
from logitless.models.row_invariant.coverage import dense_mlp, mlp_of, uncovered
from logitless.models.row_invariant.experts import MixtureWeights, mixture_form, uncovered_mixture
from logitless.models.row_invariant.experts import mixture as mixed
from logitless.models.row_invariant.layers import install_row_invariant
from tests.models.kernels.test_route import CASES
from tests.models.mixtures import mixture
from tests.models.tiny import packed

TOKENS = 21


def layer(name, dtype=torch.float32, **changes):
    """A mixture's first layer of experts, its form, inputs and an upstream gradient."""
    model = mixture(name, **CASES[name] | changes).to(dtype)
    mlp = mlp_of(model.model.layers[0])
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    x, grad = (torch.randn(TOKENS, model.config.hidden_size, generator=generator).to(dtype) for _ in range(2))
    return model, mlp, mixture_form(mlp, model.config), x, grad


def of_transformers(mlp, x):
    out = mlp(x[None])
    return (out[0] if isinstance(out, tuple) else out).view_as(x)


def of_ours(mlp, form, x):
    shared = dense_mlp(mlp)
    return mixed(x, MixtureWeights.of(mlp, form), None if shared is None else shared(x)).out


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_of_all_weights_are_those_of_transformers(name):
    _, mlp, form, x, grad = layer(name)
    x.requires_grad_()
    named = dict(mlp.named_parameters())
    wanted = of_transformers(mlp, x)
    found = of_ours(mlp, form, x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    theirs = torch.autograd.grad(wanted, [x, *named.values()], grad)
    ours = torch.autograd.grad(found, [x, *named.values()], grad)
    for key, mine, right in zip(["x", *named], ours, theirs, strict=True):
        assert (mine - right).norm() <= 1e-5 * right.norm(), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_token_has_the_same_bits_among_any_others(name, dtype):
    _, mlp, form, x, _ = layer(name, dtype)
    weights = MixtureWeights.of(mlp, form)
    with torch.no_grad():
        whole = mixed(x, weights).out
        for rows in ([3], [5, 1, 20], list(reversed(range(TOKENS)))):
            assert torch.equal(mixed(x[rows], weights).out, whole[rows])


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4_text"])
def test_gradients_do_not_depend_on_the_order_of_other_tokens_and_repeat_in_every_bit(name):
    _, mlp, form, x, grad = layer(name)

    def run():
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(of_ours(mlp, form, leaf), [leaf, *mlp.parameters()], grad)

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_experts_without_tokens_have_zero_gradients():
    _, mlp, form, x, grad = layer("qwen3_moe", num_experts=40)
    of_ours(mlp, form, x[:2]).backward(grad[:2])
    idle = mlp.experts.down_proj.grad.flatten(1).eq(0).all(1)
    assert 40 - 2 * 3 <= idle.sum() < 40
    assert mlp.experts.gate_up_proj.grad[idle].eq(0).all()


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("llama4_text", marks=pytest.mark.slow)])
def test_gradients_of_bfloat16_weights_are_summed_in_float32(name):
    _, mlp, form, x, grad = layer(name, torch.bfloat16)
    named = dict(mlp.named_parameters())
    of_ours(mlp, form, x).backward(grad)
    once = {name: weight.grad.float() for name, weight in named.items()}
    mlp.zero_grad()
    for weight in named.values():
        weight.grad_dtype = torch.float32
    for _ in range(3):
        of_ours(mlp, form, x).backward(grad)
    for name, weight in named.items():
        assert weight.grad.dtype == torch.float32
        assert (weight.grad / 3 - once[name]).norm() <= 2**-8 * once[name].norm(), name


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4_text"])
@pytest.mark.parametrize("targets", ["all-linear", ("gate_up_proj",), ("down_proj",)], ids=str)
def test_adapters_of_experts_are_applied_unmerged_with_pefts_numbers(name, targets):
    model, mlp, form, x, grad = layer(name)
    model = add_lora(model, LoraOptions(rank=3, targets=targets))
    mlp = mlp_of(model.base_model.model.model.layers[0])
    with torch.no_grad():
        for parameter in mlp.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    trained = [parameter for parameter in mlp.parameters() if parameter.requires_grad]
    x.requires_grad_()
    wanted, found = of_transformers(mlp, x), of_ours(mlp, form, x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    theirs, ours = (torch.autograd.grad(out, [x, *trained], grad) for out in (wanted, found))
    of_experts = [parameter for parameter in mlp.experts.parameters() if parameter.requires_grad]
    assert len(of_experts) == (4 if targets == "all-linear" else 2)
    for mine, right in zip(ours, theirs, strict=True):
        assert (mine - right).norm() <= 3e-5 * right.norm()
    with model.disable_adapter():
        assert not torch.allclose(of_ours(mlp, form, x), found, atol=1e-2)


@pytest.mark.parametrize("name", CASES)
def test_what_routers_say_and_its_gradient_are_those_of_transformers_layers(name):
    model, inputs, found = layer(name)[0], packed([5, 1, 9]), []
    inputs.input_ids.clamp_(min=1)  # 0 is padding, whose logits all tie
    for exact in (False, True):
        assert not exact or install_row_invariant(model).exact
        with Routers(model).read() as choices:
            backbone_hidden(model, inputs)
        upstream = torch.randn(choices[0].logits.shape, generator=torch.Generator().manual_seed(4))
        said = sum((each.logits * upstream).sum() for each in choices)
        gradients = torch.autograd.grad(said, list(model.parameters()), allow_unused=True, materialize_grads=True)
        found.append((choices, dict(zip(dict(model.named_parameters()), gradients, strict=True))))
    (theirs, wanted), (ours, gradients) = found
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(one.experts.sort().values, other.experts.sort().values)
    largest = max(float(each.abs().max()) for each in wanted.values())
    assert float(wanted["model.layers.0.self_attn.q_proj.weight"].abs().max()) > 0, "the gradient goes on below"
    for key, right in wanted.items():
        assert float((gradients[key] - right).abs().max()) <= 1e-5 * largest, key


def test_what_is_not_supported_is_named():
    model = mixture("mixtral")
    model.config.router_jitter_noise = 0.1
    assert uncovered_mixture(model.model.layers[0].mlp, model.config) == ["noise in the router's input"]
    adapted = add_lora(mixture("qwen3_moe"), LoraOptions(targets=("gate",)))
    assert uncovered(adapted) == ("an adapter of the router",)
    assert uncovered(mixture("qwen2_moe")) == ("the architecture qwen2_moe",)


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True), min_size=1, max_size=90),
)
def test_tiles_hold_every_slot_once_and_each_its_own_expert(chosen):
    chosen = torch.tensor(chosen)
    slots = Slots.of(chosen, 5)
    seen = []
    for expert, start, stop in zip(slots.expert.tolist(), slots.start.tolist(), slots.stop.tolist(), strict=True):
        rows = slots.order[start : min(stop, start + slots.rows)]
        assert chosen.flatten()[rows].eq(expert).all()
        seen += rows.tolist()
    assert sorted(seen) == list(range(chosen.numel()))


@given(st.integers(1, 19), st.integers(1, 5), st.integers(1, 70))
def test_a_factor_for_all_experts_is_laid_out_by_expert(columns, rank, experts):
    b = torch.arange(columns * rank * experts, dtype=torch.float32).view(columns, -1)
    assert by_expert(b, experts).equal(b.view(columns, rank, experts).permute(2, 0, 1))
