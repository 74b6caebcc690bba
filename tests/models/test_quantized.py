"""Checkpoints as gpt-oss, DeepSeek-V3 and others publish them, in mxfp4 and fp8: loaded, trained and saved as plain."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from logitless.errors import UnavailableError
from logitless.models.export import checkpoint_tensors
from logitless.models.loading import load_model
from tests.models.families import FAMILY, IMAGE_MODELS

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP4 = torch.cat([FP4, -FP4])
"""The number of each of the 16 codes: a sign, two bits of exponent and one of mantissa."""
GPT_OSS = {**FAMILY["gpt_oss"].config, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
QWEN_VL = next(kind.config for kind in IMAGE_MODELS if kind.model_type == "qwen3_vl")


def saved(config, folder, dtype=torch.float32):
    """The tensors of a model with random weights, and its config, as transformers saves them."""
    load_model(config, random_weights=True, seed=1, dtype=dtype).save_pretrained(folder)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def write(folder, tensors, config):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def in_mxfp4(folder):
    """Writes a gpt-oss as published; returns what its experts' weights are, in the layout of transformers."""
    tensors, config = saved(GPT_OSS, folder)
    generator, wanted = torch.Generator().manual_seed(0), {}
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, out = tensors.pop(name).shape
        codes = torch.randint(0, 16, (experts, out, width // 32, 32), generator=generator)
        scales = torch.randint(120, 128, (experts, out, width // 32), generator=generator)
        tensors[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
        numbers = FP4[codes] * 2.0 ** (scales[..., None] - 127)  # each block of 32 has a power of two
        wanted[name] = numbers.flatten(2).transpose(1, 2)
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    write(folder, tensors, config | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": left}})
    return wanted


def in_fp8(config, folder, method="fp8", into=lambda folder, tensors, config: write(folder, tensors, config)):
    """Writes a model's products in fp8 with a scale for each; returns what they are, by name in the files."""
    tensors, config = saved(config, folder)
    wanted = {}
    for name in [each for each in tensors if each.endswith("proj.weight")]:
        stored = tensors[name].to(torch.float8_e4m3fn)
        wanted[name] = stored.float() * 0.5
        tensors |= {name: stored, f"{name}_scale_inv": torch.full((1, 1), 0.5)}
    assert wanted
    quantization = {"quant_method": method, "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    into(folder, tensors, config | {"quantization_config": quantization})
    return wanted


def check_saved_as_plain(model, folder):
    """What is saved is the model, whole, and plain transformers loads it."""
    model.save_pretrained(folder)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    again, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpt_oss_as_published_is_loaded_as_the_numbers_that_its_mxfp4_stands_for_and_saved_whole(
    dtype, tmp_path, caplog
):
    wanted = in_mxfp4(tmp_path)
    with caplog.at_level(logging.INFO, logger="logitless"):
        model = load_model(tmp_path, dtype=dtype)
    assert "is dequantized; the run trains and saves plain weights" in caplog.text
    found = dict(model.named_parameters())
    assert len(wanted) == 4
    for name, numbers in wanted.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name].float(), numbers)  # powers of two and four bits: exact in bfloat16 too
    assert {p.dtype for p in found.values()} == {dtype}
    sent = dict(checkpoint_tensors(model))
    assert sent.keys() == saved(GPT_OSS, tmp_path / "plain")[0].keys()
    if dtype == torch.float32:
        check_saved_as_plain(model, tmp_path / "again")


def test_a_mixture_in_fp8_is_loaded_as_products_with_their_scales_and_saved_under_the_names_of_a_plain_one(tmp_path):
    wanted = in_fp8(FAMILY["deepseek_v3"].config, tmp_path)
    model = load_model(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    sent = dict(checkpoint_tensors(model))
    assert any(".experts.3." in name for name in wanted)
    for name, numbers in wanted.items():
        assert torch.equal(sent[name], numbers), name
    assert sent.keys() == saved(FAMILY["deepseek_v3"].config, tmp_path / "plain")[0].keys()
    check_saved_as_plain(model, tmp_path / "again")


def as_image_model(folder, tensors, config):
    """The language model's tensors and config as those of an image model's checkpoint."""
    whole = {**QWEN_VL, "text_config": {**QWEN_VL["text_config"], "model_type": "qwen3_vl_text"}}
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    write(folder, renamed, whole | {"quantization_config": config["quantization_config"]})


def test_the_language_model_of_an_image_model_in_fp8_has_its_scales_too(tmp_path):
    text = {**QWEN_VL["text_config"], "model_type": "qwen3", "tie_word_embeddings": True}
    wanted = in_fp8(text, tmp_path, into=as_image_model)
    sent = dict(checkpoint_tensors(load_model(tmp_path)))
    for name, numbers in wanted.items():
        assert torch.equal(sent[name], numbers), name


def test_an_image_model_that_is_quantized_in_another_way_is_refused(tmp_path):
    text = {**QWEN_VL["text_config"], "model_type": "qwen3", "tie_word_embeddings": True}
    in_fp8(text, tmp_path, method="compressed-tensors", into=as_image_model)
    with pytest.raises(UnavailableError, match="plain weights, or weights in fp8 or mxfp4; given compressed-tensors"):
        load_model(tmp_path)
