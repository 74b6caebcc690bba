"""Quantized checkpoints (mxfp4 of gpt-oss, fp8 of DeepSeek and others): their weights are loaded as plain ones.

Left to itself, transformers keeps them quantized where the machine has kernels for that, and saves a model that it
dequantized without the experts' weights.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from logitless.errors import UnavailableError

_TO_PLAIN = {"fp8", "mxfp4"}


def dequantized(config: Any, whole: Any) -> bool:
    """Whether a checkpoint is quantized in a way that is undone here; if so, its config asks transformers for that.

    Args:
        config: of the language model; changed.
        whole: of the checkpoint: the same, or that of a vision-language model.

    Raises:
        UnavailableError: the language model of a vision-language model that is quantized in another way.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(quantization_config={"quant_method": "fp8"})
        >>> dequantized(config, config), config.quantization_config["dequantize"]
        (True, True)
    """
    stored = getattr(whole, "quantization_config", None)
    if stored is None:
        return False
    method = stored["quant_method"]
    if method in _TO_PLAIN:
        config.quantization_config = {**stored, "dequantize": True}
        return True
    if whole is not config:  # its scales would be taken for weights of the image tower, and left out
        raise UnavailableError(
            needed=f"an image model with plain weights, or weights in {' or '.join(sorted(_TO_PLAIN))}",
            given=f"{method} in {whole.model_type}",
            remedy="Give the checkpoint from which it was quantized.",
        )
    return False


def as_plain(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Makes transformers forget how a model was stored, so that it is trained and saved as an ordinary one.

    Args:
        model: just loaded, its weights plain.
        dtype: that was asked for; transformers dequantizes mxfp4 to bfloat16, whatever it is.
    """
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.to(dtype)
    plain: Any = model
    plain.hf_quantizer, plain.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    if hasattr(model, "_weight_conversions"):
        del plain._weight_conversions  # of the files; saved under the names of an ordinary model
