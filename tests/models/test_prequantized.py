"""Checkpoints with quantized weights load as the plain weights that they stand for."""

import json
import logging
from math import gcd
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from logitless.errors import UnavailableError
from logitless.models.export import checkpoint_tensors
from logitless.models.loading import load_model, stored_dtype
from tests.models.families import FAMILY, IMAGE_MODELS, SMALL

GPT_OSS = {**SMALL, **FAMILY["gpt_oss"].fields, "hidden_size": 32, "intermediate_size": 32}
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""Of four bits with two of exponent and one of mantissa: the numbers of MXFP4."""


def in_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks and scales of ``weight [E, in, out]``, and the numbers that they stand for."""
    rows = weight.float().transpose(1, 2)
    blocks = rows.reshape(*rows.shape[:2], -1, 32)
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1) / 4))
    level = (blocks[..., None] / torch.exp2(exponent)[..., None, None] - LEVELS).abs().argmin(-1)
    plain = (LEVELS[level] * torch.exp2(exponent)[..., None]).reshape(rows.shape).transpose(1, 2)
    packed = (level[..., 0::2] | level[..., 1::2] << 4).to(torch.uint8)
    return packed, (exponent + 127).to(torch.uint8), plain.contiguous()


def in_fp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers and scales of ``weight [out, in]`` in blocks of at most 8 x 8, and what they stand for."""
    height, width = (gcd(side, 8) for side in weight.shape)
    blocks = weight.float().reshape(weight.shape[0] // height, height, weight.shape[1] // width, width)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    small = (blocks / scale).to(torch.float8_e4m3fn)
    return small.reshape(weight.shape), scale[:, 0, :, 0], (small.float() * scale).reshape(weight.shape)


def written(folder: Path, method: str, model: nn.Module) -> tuple[Path, Path]:
    """Folders of a model with quantized weights, and with the plain weights that these stand for."""
    small, plain = folder / method, folder / "plain"
    model.save_pretrained(plain)
    stored, meant = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if method == "mxfp4" and name.endswith("_up_proj" if "up" in name else "experts.down_proj"):
            stored[f"{name}_blocks"], stored[f"{name}_scales"], meant[name] = in_mxfp4(stored.pop(name))
        elif method == "fp8" and name.endswith("_proj.weight") and ".layers." in name and weight.dim() == 2:
            stored[name], stored[f"{name}_scale_inv"], meant[name] = in_fp8(weight)
    assert len(stored) > len(meant)
    small.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (small / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in stored.items()}, small / "model.safetensors", {"format": "pt"})
    save_file(
        {name: each.to(weight.dtype) for name, each in meant.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    return small, plain


def built(fields: dict[str, object]) -> nn.Module:
    torch.manual_seed(0)
    kind = str(fields["model_type"])
    config = AutoConfig.for_model(kind, **{name: value for name, value in fields.items() if name != "model_type"})
    images = kind in {each.model_type for each in IMAGE_MODELS}
    return (AutoModelForImageTextToText if images else AutoModelForCausalLM).from_config(config)


def fields_of(kind: str) -> dict[str, object]:
    return {"model_type": kind, **SMALL, **FAMILY[kind].fields, "moe_intermediate_size": 16}


QUANTIZED = [
    ("mxfp4", {"model_type": "gpt_oss", **GPT_OSS}),
    *(("fp8", fields_of(kind)) for kind in ("qwen3", "qwen3_moe", "deepseek_v3", "minimax_m2", "qwen3_5_moe_text")),
    *(("fp8", kind.config) for kind in IMAGE_MODELS if kind.model_type in ("mistral3", "qwen3_vl", "qwen3_vl_moe")),
]


@pytest.mark.parametrize(
    ("method", "fields", "dtype"),
    [
        *((*each, torch.float32) for each in QUANTIZED),
        *((*each, torch.bfloat16) for each in QUANTIZED[:4]),
    ],
    ids=lambda each: str(each["model_type"] if isinstance(each, dict) else each),
)
def test_quantized_weights_load_as_those_that_they_stand_for_and_are_saved_plain(
    method, fields, dtype, tmp_path, caplog
):
    small, plain = written(tmp_path, method, built(fields))
    with caplog.at_level(logging.INFO, logger="logitless"):
        found = load_model(small, dtype=dtype)
    assert f"stored in {method.upper()} and dequantized" in caplog.text
    expected = load_model(plain, dtype=dtype)
    weights, stored = (dict(each.state_dict()) for each in (found, expected))
    assert weights.keys() == stored.keys()
    for name, weight in stored.items():
        assert weights[name].dtype == weight.dtype, name
        assert torch.equal(weights[name], weight), name
    assert [name for name, _ in checkpoint_tensors(found)] == [name for name, _ in checkpoint_tensors(expected)]
    configs = []
    for model in (found, expected):
        model.config.save_pretrained(tmp_path / "config")
        configs.append((tmp_path / "config/config.json").read_text())
    assert configs[0] == configs[1]


def test_what_only_reads_the_config_has_a_plain_model(tmp_path):
    small, _ = written(tmp_path, "mxfp4", built({"model_type": "gpt_oss", **GPT_OSS}))
    for options in ({"device": "meta"}, {"empty": True}, {"random_weights": True}):
        assert not hasattr(load_model(small, **options).config, "quantization_config")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "fields"), QUANTIZED, ids=lambda each: str(each["model_type"] if isinstance(each, dict) else each)
)
def test_on_a_gpu_they_are_the_same_weights_and_each_has_a_gradient(method, fields, tmp_path):
    small, plain = written(tmp_path, method, built(fields))
    found, expected = (load_model(folder, dtype=torch.float32, device="cuda") for folder in (small, plain))
    trained = dict(found.named_parameters())
    for name, weight in expected.named_parameters():
        assert trained[name].is_cuda
        assert torch.equal(trained[name], weight), name
    ids = torch.arange(12, device="cuda")[None] % 8
    gradients = []
    for model in (found, expected):
        model(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum().backward()
        gradients.append({name for name, each in model.named_parameters() if each.grad is not None})
    assert gradients[0] == gradients[1] != set()


def test_its_weights_are_no_mapped_files(tmp_path):
    model = built(fields_of("qwen3")).to(torch.bfloat16)
    small, plain = written(tmp_path, "fp8", model)
    assert stored_dtype(plain) == torch.bfloat16
    assert stored_dtype(small) is None


def test_a_format_that_is_not_dequantized_is_refused_before_weights_are_read(tmp_path):
    config = {**fields_of("qwen3"), "quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for device in ("cpu", "meta"):
        with pytest.raises(UnavailableError, match=r"FP8 or MXFP4.*quantized by awq.*that it was made from"):
            load_model(tmp_path, device=device)
