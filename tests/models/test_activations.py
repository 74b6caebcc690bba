"""What a layer keeps changes memory alone: the same gradients in every mode, and bytes as they were predicted."""

import copy

import pytest
import torch

from logitless.errors import ConfigurationError, UnavailableError
from logitless.models import activations
from logitless.models.activations import (
    MODES,
    ActivationPlan,
    Cost,
    costs_per_token,
    fit_activations,
    set_modes,
)
from logitless.models.lm_head import backbone_hidden
from logitless.models.loading import load_model
from logitless.models.row_invariant.layers import install_row_invariant
from tests.head.interpreter import interpreted
from tests.models.row_invariant.test_layers import COVERED, LENGTHS, ONE_LAYER, hidden_and_gradients
from tests.models.tiny import packed

COSTS = {"keep": Cost(100.0), "selective": Cost(60.0), "recompute": Cost(10.0), "host": Cost(0.0)}


def several_layers(count, *, fused, name="qwen3"):
    config = {**COVERED[name], **ONE_LAYER, "num_hidden_layers": count}
    model = load_model(config, random_weights=True, seed=1).train()
    if fused:
        if not interpreted():
            pytest.skip("needs Triton's interpreter")
        install_row_invariant(model)
    return model


@pytest.fixture
def kernels_that_do_nothing(monkeypatch):
    """What is kept does not depend on the numbers in it."""
    if interpreted():
        monkeypatch.setattr("triton.runtime.interpreter.InterpretedFunction.run", lambda *_, **__: None)


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("qwen3", False),
        ("qwen3", True),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("gpt_oss", "olmoe")),
    ],
)
def test_every_mode_gives_the_same_bits(name, fused):
    model, inputs = several_layers(2, fused=fused, name=name), packed(LENGTHS)
    grad = torch.randn(sum(LENGTHS), 16, dtype=torch.float64)
    hidden, gradients = hidden_and_gradients(model, inputs, grad)
    layers = model.config.num_hidden_layers
    for mode in MODES if fused else ("keep", "recompute", "host"):
        set_modes(model, [mode] * layers)
        found, got = hidden_and_gradients(model, inputs, grad)
        assert torch.equal(found, hidden), mode
        assert got.keys() == gradients.keys()
        for each, gradient in gradients.items():
            assert torch.equal(got[each], gradient), (mode, each)


@pytest.mark.usefixtures("kernels_that_do_nothing")
@pytest.mark.parametrize("fused", [False, True], ids=["transformers", "row-invariant"])
def test_less_is_kept_from_mode_to_mode(fused):
    found = {mode: cost.kept for mode, cost in costs_per_token(several_layers(1, fused=fused)).items()}
    assert sorted(found.values(), reverse=True) == list(found.values())
    assert len(found) == len(set(found.values())) == (4 if fused else 3)
    assert found["host"] == 0
    assert found["recompute"] == pytest.approx(4 * 16, rel=0.2)  # the residual stream, 16 wide


@pytest.mark.usefixtures("kernels_that_do_nothing")
def test_a_layer_that_is_recomputed_keeps_the_sum_of_its_two_inputs():
    model = several_layers(3, fused=True)
    assert costs_per_token(model)["recompute"].kept == pytest.approx(4 * 16, rel=0.2)


def test_measuring_leaves_the_model_as_it_was():
    model = several_layers(1, fused=False)
    set_modes(model, ["recompute"])
    (layer,) = model.model.layers
    before = layer.gradient_checkpointing, layer._gradient_checkpointing_func
    costs_per_token(model)
    assert (layer.gradient_checkpointing, layer._gradient_checkpointing_func) == before


@pytest.mark.usefixtures("kernels_that_do_nothing")
@pytest.mark.parametrize("fused", [False, True], ids=["transformers", "row-invariant"])
@pytest.mark.parametrize("share", [1.0, 0.8, 0.5, 0.1])
def test_what_is_kept_is_predicted_within_a_tenth(fused, share):
    model = several_layers(3, fused=fused)
    lengths = [100, 250, 17, 233, 200] if fused else [200] * 4  # on a CPU other rows are padded for attention
    everything = 3 * sum(lengths) * costs_per_token(model)["keep"].kept
    plan = fit_activations(model, num_tokens=sum(lengths), budget=round(share * everything))
    assert plan.num_bytes <= share * everything
    assert tuple(layer._gradient_checkpointing_func.args[0] for layer in activations._layers(model)) == plan.modes
    tally = activations._Tally(model)
    activations._set(model, plan.modes, tally)
    hidden = backbone_hidden(model, packed(lengths))
    kept = sum(tally.storages.values())
    assert kept == pytest.approx(plan.kept_bytes, rel=0.1, abs=20_000)  # tables of positions
    del hidden


def test_as_few_layers_as_possible_are_made_again_and_the_first_ones():
    plan = ActivationPlan.of(COSTS, num_layers=4, num_tokens=10, budget=4000)
    assert plan.modes == ("keep",) * 4
    plan = ActivationPlan.of(COSTS, num_layers=4, num_tokens=10, budget=3300)
    assert plan.modes == ("selective", "selective", "keep", "keep")
    plan = ActivationPlan.of(COSTS, num_layers=4, num_tokens=10, budget=1400)
    assert plan.modes == ("recompute", "recompute", "selective", "selective")
    plan = ActivationPlan.of(COSTS, num_layers=4, num_tokens=10, budget=250)
    assert plan.modes == ("host", "host", "recompute", "recompute")
    assert str(plan) == "2 are recomputed, 2 on the host: 0.00 GiB for 10 tokens"


@pytest.mark.parametrize("budget", range(0, 4200, 100))
def test_no_budget_is_exceeded(budget):
    assert ActivationPlan.of(COSTS, num_layers=4, num_tokens=10, budget=budget).num_bytes <= budget


def test_a_layer_that_is_worked_on_counts_beside_what_the_layers_before_it_keep():
    costs = {"keep": Cost(100.0, 30.0), "recompute": Cost(10.0, 120.0), "host": Cost(0.0, 130.0)}
    plan = ActivationPlan.with_counts(costs, {"recompute": 2, "keep": 2}, num_tokens=10)
    assert (plan.kept_bytes, plan.num_bytes) == (2200, 2500)  # the last layer's backward pass: 2 * 10 + 2 * 100 + 30
    plan = ActivationPlan.with_counts(costs, {"host": 1, "recompute": 3}, num_tokens=10)
    assert (plan.kept_bytes, plan.num_bytes) == (300, 1500)  # 3 * 10 + 120
    plan = ActivationPlan.of(costs, num_layers=4, num_tokens=10, budget=1599)  # all recomputed take 1600
    assert plan.modes == ("host", "recompute", "recompute", "recompute")
    with pytest.raises(ConfigurationError, match="at least 1300 bytes"):
        ActivationPlan.of(costs, num_layers=4, num_tokens=10, budget=1299)


def test_a_budget_below_everything_is_refused():
    costs = {**COSTS, "host": Cost(1.0)}
    with pytest.raises(ConfigurationError, match="at least 40 bytes"):
        ActivationPlan.of(costs, num_layers=4, num_tokens=10, budget=39)


def test_layers_of_transformers_have_no_selective_mode():
    with pytest.raises(UnavailableError, match="row-invariant layers for the mode selective"):
        set_modes(several_layers(1, fused=False), ["selective"])


def test_a_model_whose_layers_cannot_run_again_is_refused():
    model = copy.deepcopy(several_layers(1, fused=False))
    del model.model.layers
    with pytest.raises(UnavailableError, match="run a second time"):
        set_modes(model, ["keep"])
