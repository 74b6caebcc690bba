"""Liger's layers are exchanged only where they agree with plain ones; the check can fail."""

import importlib

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from logitless.errors import UnavailableError
from logitless.models import liger_layers
from logitless.models.liger_layers import check_liger_layers, install_liger_layers
from tests.models.tiny import LLAMA

CONFIG = LlamaConfig(**LLAMA | {"num_hidden_layers": 3})


def scaling(factor: float):
    """A stand-in for Liger's function that multiplies the output of every MLP."""

    def apply(model: torch.nn.Module, swiglu: bool = True) -> None:
        assert swiglu
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(lambda _module, _inputs, output: output * factor)

    return apply


@pytest.fixture
def exchanged_by(monkeypatch: pytest.MonkeyPatch):
    return lambda apply: monkeypatch.setattr(liger_layers, "_exchange_of", lambda _family: apply)


def test_layers_that_agree_are_exchanged(exchanged_by) -> None:
    exchanged_by(scaling(1 + 1e-6))
    assert max(check_liger_layers(CONFIG, torch.device("cpu"))) < 1e-4
    model = AutoModelForCausalLM.from_config(CONFIG)
    install_liger_layers(model)
    assert all(layer.mlp._forward_hooks for layer in model.model.layers)


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_layers_that_do_not_agree_are_refused_and_the_model_is_left_alone(factor: float, exchanged_by) -> None:
    exchanged_by(scaling(factor))
    model = AutoModelForCausalLM.from_config(CONFIG)
    with pytest.raises(UnavailableError, match="logits off by"):
        install_liger_layers(model)
    assert not any(layer.mlp._forward_hooks for layer in model.model.layers)


def test_kernels_that_do_not_run_are_refused(exchanged_by) -> None:
    def broken(model: torch.nn.Module) -> None:
        raise RuntimeError("no device")

    exchanged_by(broken)
    with pytest.raises(UnavailableError, match="RuntimeError: no device"):
        check_liger_layers(CONFIG, torch.device("cpu"))


def test_a_family_that_liger_does_not_know_is_refused() -> None:
    pytest.importorskip("liger_kernel")
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG.to_dict()))
    model.config.model_type = "unheard_of"
    with pytest.raises(UnavailableError, match="unheard_of"):
        install_liger_layers(model)


def test_other_models_keep_their_layers(monkeypatch) -> None:
    from transformers.models.llama import modeling_llama

    def apply(model: torch.nn.Module) -> None:
        monkeypatch.setattr(modeling_llama, "LlamaMLP", torch.nn.Identity)

    before = modeling_llama.LlamaMLP
    monkeypatch.setattr(liger_layers, "_exchange_of", lambda _family: apply)
    liger_layers._exchange(AutoModelForCausalLM.from_config(CONFIG))
    assert modeling_llama.LlamaMLP is before


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_liger_agrees_on_a_gpu(family: str, monkeypatch) -> None:
    pytest.importorskip("liger_kernel")
    from transformers import AutoConfig

    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", modeling.apply_rotary_pos_emb)  # put back after the test

    config = AutoConfig.for_model(
        family, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64
    )
    assert max(check_liger_layers(config, torch.device("cuda"))) < liger_layers.TOLERANCE
