"""Memory of gated delta nets is that of the tensors that sampling and training have."""

import pytest
import torch

from logitless.models import activations
from logitless.models.lm_head import backbone, backbone_hidden
from logitless.models.loading import load_model
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.rollout.gpu.state_memory import slot_bytes, slots_for
from logitless.train.plan.recurrent_memory import DeltaNets
from logitless.train.plan.training_memory import layer_bytes, sampling_bytes
from tests.head.interpreter import interpreted
from tests.models.tiny import CONFIGS, packed, tiny
from tests.train.tiny import tiny_recipe

NET, ATTENTION = "linear_attention", "full_attention"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_are_forecast_in_every_byte(dtype):
    model = tiny("qwen3_5")
    install_row_invariant(model)
    forms = [layer.row_invariant_form for layer in backbone(model).layers][:1]
    nets = DeltaNets.of(model.config)
    assert nets.layers == 1
    for rows in (1, 5, 512):
        assert nets.sampling_bytes(rows, dtype.itemsize) == slots_for(rows) * slot_bytes(forms, dtype)


def test_what_a_layer_keeps_for_its_backward_pass_is_forecast(monkeypatch):
    if interpreted():  # what is kept does not depend on the numbers in it
        monkeypatch.setattr("triton.runtime.interpreter.InterpretedFunction.run", lambda *_, **__: None)
    measured = []
    for layers in (2, 3):
        config = {"num_hidden_layers": layers, "layer_types": ["linear_attention"] * layers}
        model = load_model(CONFIGS["qwen3_5"] | config, random_weights=True, seed=1).train()
        install_row_invariant(model)
        tally = activations._Tally(model)
        with activations._Counted(tally):
            hidden = backbone_hidden(model, packed([128, 320]))
        del hidden
        measured.append(sum(tally.storages.values()) / 448)
    forecast, _ = layer_bytes(model, 4)
    assert 0.85 * forecast < measured[1] - measured[0] < forecast  # norms of ours keep less


def test_a_model_of_both_kinds_keeps_the_mean_and_caches_keys_of_attention_alone(tmp_path):
    def kept(*kinds):
        config = CONFIGS["qwen3_5"] | {"num_hidden_layers": len(kinds), "layer_types": list(kinds)}
        return layer_bytes(load_model(config, device="meta", random_weights=True), 4)

    one, two, three = (kept(NET, *[ATTENTION] * n)[0] for n in range(3))
    assert 3 * three - 2 * two == pytest.approx(2 * two - one, abs=3)  # rounded means
    assert one > 2 * two - one > 0
    recipe = tiny_recipe(tmp_path)
    cached = [sampling_bytes(recipe, tiny(name)) for name in ("qwen3_5", "qwen3")]
    rows = min(recipe.rollout.max_rows, recipe.rollout.prompts_per_block * recipe.rollout.completions_per_prompt)
    length = recipe.data.max_prompt_tokens + recipe.rollout.longest_completion
    keys = rows * length * 2 * 2 * 16 * 4  # of one layer
    assert cached[1] - cached[0] == keys - DeltaNets.of(tiny("qwen3_5").config).sampling_bytes(rows, 4)
