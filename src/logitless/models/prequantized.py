"""Checkpoints that are published with quantized weights: dequantized as they load, because plain weights are trained.

    weight = stored number * scale of its block        rounded to the dtype asked for; of MXFP4, exact in bfloat16

gpt-oss is published in MXFP4 alone, DeepSeek-V3 and MiniMax-M2 in FP8 alone. The run saves, exports and sends plain
weights. Other formats, such as AWQ and GPTQ, are refused.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from logitless.errors import UnavailableError
from logitless.installed import optional

DEQUANTIZED = {"fp8": "FP8", "mxfp4": "MXFP4"}
"""transformers' ``quant_method`` of the formats that are dequantized, and what people call them."""


def take_quantization(config: Any) -> dict[str, Any] | None:
    """Remove from a config how its checkpoint's weights are quantized, and return it; None if they are plain.

    A config that keeps it would be saved beside plain weights, and could not be loaded again.

    Args:
        config: of transformers; changed in place, as is the text config inside one of an image model.

    Example:
        >>> from transformers import GptOssConfig
        >>> config = GptOssConfig(quantization_config={"quant_method": "mxfp4"})
        >>> take_quantization(config), hasattr(config, "quantization_config")
        ({'quant_method': 'mxfp4'}, False)
    """
    taken: dict[str, Any] | None = None
    for each in (config.get_text_config(), config):
        if "quantization_config" in vars(each):
            found = each.quantization_config
            taken = dict(found if isinstance(found, dict) else found.to_dict()) if found is not None else taken
            del each.quantization_config
    return taken


def check_quantization(quantization: dict[str, Any], source: object) -> None:
    """Refuse a format that is not dequantized.

    Args:
        quantization: from ``take_quantization``.
        source: of the model, for the error.

    Raises:
        UnavailableError: another format, or accelerate is missing for FP8.
    """
    method = str(quantization.get("quant_method"))
    if method not in DEQUANTIZED:
        raise UnavailableError(
            needed=f"plain weights, or weights in {' or '.join(DEQUANTIZED.values())}, which are dequantized",
            given=f"{str(source)!r}, quantized by {method}",
            remedy="Name the checkpoint that it was made from; model.quantize puts a base for LoRA into four bits.",
        )
    if method == "fp8":
        optional("accelerate", extra="lora", needed="accelerate, with which transformers reads FP8")


def make_plain(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Turn a model whose weights were dequantized, or are an image model's, into an ordinary one, in place.

    Args:
        model: from ``from_pretrained``, where it was quantized with ``dequantize`` in its config's quantization.
        dtype: of the weights, but for those that the architecture keeps in float32.
    """
    model.hf_quantizer, model.is_quantized = None, False
    take_quantization(model.config)
    for name in ("base_model_tp_plan", "base_model_ep_plan"):  # set for quantized layers, and saved otherwise
        vars(model.config).pop(name, None)
    if hasattr(model, "_weight_conversions"):  # they would save it under other names, and quantized again
        del model._weight_conversions
    kept = model._get_dtype_plan(dtype)
    for name, weight in model.named_parameters():  # transformers leaves MXFP4's in bfloat16, others as they are stored
        weight.data = weight.data.to(next((kept[part] for part in kept if part in name), dtype))
