"""The language model of an image model, trained alone: what it computes is what the whole model does with text."""

import functools
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from logitless.errors import UnavailableError
from logitless.models.loading import load_model
from logitless.models.row_invariant.coverage import uncovered
from logitless.models.text_half import IMAGE_MODELS as LOADED
from tests.models.families import FAMILY, IMAGE_MODELS, ImageModel
from tests.models.in_float64 import in_float64
from tests.models.test_families import TOLERANCE, inputs, logits, logits_alone

models = pytest.mark.parametrize("kind", IMAGE_MODELS, ids=lambda kind: kind.model_type)
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float64}


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with in_float64():
        yield


@functools.cache
def whole(kind: ImageModel) -> tuple[nn.Module, Path]:
    """The image model with random weights, and a folder with it as transformers saves it."""
    fields = {name: value for name, value in kind.config.items() if name != "model_type"}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind.model_type, **fields), **PLAIN).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    folder = Path(tempfile.mkdtemp())
    model.save_pretrained(folder)
    return model, folder


def loaded(folder: Path) -> nn.Module:
    return load_model(folder, dtype=torch.float64).eval()


@models
def test_a_packed_row_has_the_logits_of_the_whole_model_without_images(kind):
    model, folder = whole(kind)
    ours, rows = loaded(folder), inputs()
    assert ours.config.model_type == kind.becomes
    with torch.no_grad():
        expected = logits_alone(model, rows)
        assert (logits(ours, rows) - expected).abs().max() <= TOLERANCE * expected.abs().max()


@models
def test_what_is_saved_is_a_language_model_that_plain_transformers_loads(kind, tmp_path):
    model, folder = whole(kind)
    loaded(folder).save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, **PLAIN)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert again.config.model_type == kind.becomes
    with torch.no_grad():
        expected, found = logits_alone(model, inputs()), logits_alone(again, inputs())
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_files_with_the_names_of_earlier_versions_are_read_too(tmp_path):
    kind = next(each for each in IMAGE_MODELS if each.model_type == "mistral3")
    _, folder = whole(kind)
    for begins in ("language_model.model.", "model.language_model."):
        target = tmp_path / begins
        target.mkdir()
        (target / "config.json").write_bytes((folder / "config.json").read_bytes())
        state = load_file(folder / "model.safetensors")
        renamed = {name.replace("language_model.model.", begins): tensor for name, tensor in state.items()}
        save_file(renamed, target / "model.safetensors", metadata={"format": "pt"})
        found, expected = (dict(loaded(each).named_parameters()) for each in (target, folder))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_is_left_out_is_said(caplog):
    kind = next(each for each in IMAGE_MODELS if each.model_type == "qwen3_vl")
    model, folder = whole(kind)
    of_tower = sum("visual" in name for name in model.state_dict())
    with caplog.at_level(logging.INFO, logger="logitless"):
        loaded(folder)
    assert f"its language model is loaded as qwen3, {of_tower} tensors of its image tower are left out" in caplog.text


def test_a_language_model_without_a_class_of_its_own_is_one_that_row_invariant_layers_cover():
    for kind in IMAGE_MODELS:
        model = load_model(kind.config, device="meta", random_weights=True)
        assert (uncovered(model) == ()) == FAMILY[kind.becomes].exact


def test_another_image_model_is_refused_by_name():
    with pytest.raises(UnavailableError, match=r"image model among gemma3, .*; given glm4v_moe"):
        load_model({"model_type": "glm4v_moe"}, device="meta", random_weights=True)


def test_every_image_model_that_is_loaded_so_is_tested():
    assert {kind.model_type for kind in IMAGE_MODELS} == LOADED
