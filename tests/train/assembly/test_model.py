"""The policy model is what its section says, in the dtypes and with the adapters that it says."""

import logging

import pytest
import torch

from logitless.errors import ConfigurationError
from logitless.train.assembly.model import tokenizer_of
from logitless.train.assembly.process import effects
from tests.train.tiny import give_chat_template, tiny_model, tiny_recipe

CPU = torch.device("cpu")


def _model(recipe, **options):
    return tiny_model(recipe, seed=recipe.seed, **options)


def test_a_config_alone_has_no_tokenizer(tmp_path):
    with pytest.raises(ConfigurationError, match=r"Set model\.tokenizer"):
        tokenizer_of(tiny_recipe(tmp_path, model__tokenizer=None).model)


def test_a_variable_that_the_chat_template_does_not_read_is_refused(tmp_path):
    give_chat_template(tmp_path)
    assert tokenizer_of(tiny_recipe(tmp_path, model__chat_template_kwargs={"mood": "good"}).model)
    with pytest.raises(ConfigurationError, match=r"needed chat_template_kwargs that .* chat template reads"):
        tokenizer_of(tiny_recipe(tmp_path, model__chat_template_kwargs={"modd": "good"}).model)


def test_every_weight_of_full_fine_tuning_is_trained_in_float32(tmp_path):
    model = _model(tiny_recipe(tmp_path, model__dtype="bfloat16"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())
    assert model.training


def test_under_lora_the_base_is_frozen_in_its_dtype_and_the_adapter_is_float32(tmp_path):
    recipe = tiny_recipe(tmp_path, model__dtype="bfloat16", model__lora={"rank": 3, "targets": ["q_proj"]})
    model = _model(recipe)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert [tuple(p.shape) for p in trained.values()] == [(3, 16), (16, 3)]
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    lines = effects(recipe.model, CPU, model, layers="")
    assert "trained: 96 weights in float32" in lines
    assert any(line.startswith("frozen: 2,960 weights in bfloat16") for line in lines)


def test_modules_trained_whole_have_the_dtype_of_the_base(tmp_path):
    lora = {"rank": 2, "modules_to_save": ["lm_head"]}
    model = _model(tiny_recipe(tmp_path, model__lora=lora, model__dtype="bfloat16", model__trained_dtype="bfloat16"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_dropout_is_switched_off_and_said(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="logitless"):
        model = _model(tiny_recipe(tmp_path, model__source__attention_dropout=0.5))
    assert model.config.attention_dropout == 0.0
    assert "dropout" in caplog.text
