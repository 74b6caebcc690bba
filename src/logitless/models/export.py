"""A model's weights under the names that Hugging Face files have, one tensor after the other: what engines load."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from logitless.distributed.sharding import whole
from logitless.errors import InputError


def merged_tensors(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its Hugging Face name, adapters merged; the model stays as it is.

    A sharded weight is made whole by all ranks together, which read in step.
    ``W + scale * B @ A`` in the dtype of W where a layer has an adapter; one merged weight is held at a time. A tied
    weight comes once, under its first name. What is not adapted is the model's own tensor, not a copy.

    Args:
        model: a transformers model, PEFT-wrapped or not.
        dtype: that weights are rounded to, once: the sum is then in float32. None: each in its own.

    Raises:
        InputError: an adapter that is not one low-rank product (a bias of its own, several at once).

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from logitless.models.lora import LoraOptions, add_lora
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                      vocab_size=11)
        >>> model = LlamaForCausalLM(config)
        >>> names = [name for name, _ in merged_tensors(model)]
        >>> names == [name for name, _ in merged_tensors(add_lora(model, LoraOptions(rank=2, targets=("q_proj",))))]
        True
    """
    if not hasattr(model, "peft_config"):
        yield from ((name, _rounded(parameter.detach(), dtype)) for name, parameter in model.named_parameters())
        return
    inner: Any = model
    base: nn.Module = inner.get_base_model()
    for name, parameter in base.named_parameters():
        path = name.split(".")
        if "modules_to_save" in path:  # <module>.modules_to_save.<adapter>.<weight>
            at = path.index("modules_to_save")
            yield ".".join(path[:at] + path[at + 2 :]), _rounded(parameter.detach(), dtype)
        elif "base_layer" in path:  # <module>.base_layer.<weight>
            at = path.index("base_layer")
            plain = ".".join(path[:at] + path[at + 1 :])
            yield plain, _merged(base.get_submodule(".".join(path[:at])), path[-1], parameter.detach(), plain, dtype)
        elif "original_module" not in path and not any(part.startswith("lora_") for part in path):
            yield name, _rounded(parameter.detach(), dtype)


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The adapter's weights alone, under the names of PEFT's ``adapter_model.safetensors``.

    Args:
        model: PEFT-wrapped.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from logitless.models.lora import LoraOptions, add_lora
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                      vocab_size=11)
        >>> model = add_lora(LlamaForCausalLM(config), LoraOptions(rank=2, targets=("q_proj",)))
        >>> next(name for name, _ in adapter_tensors(model))
        'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    import peft

    for name, tensor in peft.get_peft_model_state_dict(model, save_embedding_layers=False).items():
        yield name, whole(tensor)


def _rounded(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    weight = whole(weight)
    return weight if dtype is None else weight.to(dtype)


def _merged(layer: nn.Module, which: str, weight: Tensor, name: str, dtype: torch.dtype | None) -> Tensor:
    lora: Any = layer
    active = list(lora.active_adapters)
    if len(active) != 1 or any(lora.use_dora.get(adapter, False) for adapter in active):
        raise InputError(
            needed="one plain low-rank adapter a layer",
            given=f"{active} at {name!r}",
            remedy="Train one LoRA adapter, without DoRA.",
        )
    if which != "weight":
        return _rounded(weight, dtype)
    with torch.no_grad():
        weight, change = whole(weight), whole(lora.get_delta_weight(active[0]))
        if dtype is None:
            return weight + change.to(weight.dtype)
        return (weight.float() + change.float()).to(dtype)
