"""A model's weights, one named tensor at a time, for engines: under the model's own names or those of its files."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from logitless.distributed.sharding import whole
from logitless.errors import InputError
from logitless.models.lm_head import causal_lm


def merged_tensors(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its name in the transformers model, with adapters merged; the model is not changed.

    A layer with an adapter gives ``W + scale * B @ A`` in the dtype of W, one merged weight at a time; other weights
    are the model's own tensors, not copies. A tied weight comes once, under its first name. Persistent buffers, such as
    a router's correction bias, come last, in their own dtype. Sharded weights are gathered: all ranks must iterate
    together.

    Args:
        model: a transformers model, PEFT-wrapped or not.
        dtype: of the weights, rounded once: adapters are then added in float32. None: each weight's own dtype.

    Raises:
        InputError: a layer with DoRA, or with several active adapters.

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
        yield from _buffers(model)
        return
    inner: Any = model
    base: nn.Module = inner.get_base_model()
    for name, parameter in base.named_parameters():
        path = name.split(".")
        if "modules_to_save" in path:  # <module>.modules_to_save.<adapter>.<weight>
            at = path.index("modules_to_save")
            yield ".".join(path[:at] + path[at + 2 :]), _rounded(parameter.detach(), dtype)
        elif "original_module" in path or any(part.startswith("lora_") for part in path):
            continue
        elif "base_layer" in path:  # <module>.base_layer.<weight>, and of experts one base_layer for each weight
            plain = ".".join(part for part in path if part != "base_layer")
            layer = base.get_submodule(".".join(path[: path.index("base_layer")]))
            yield plain, _merged(layer, path[-1], parameter.detach(), plain, dtype)
        else:
            yield name, _rounded(parameter.detach(), dtype)
    yield from _buffers(base)


def checkpoint_tensors(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """``merged_tensors`` under the names of checkpoint files, which servers load.

    transformers fuses some weights when it loads a checkpoint, such as those of a layer's experts. Here they are split
    again as ``save_pretrained`` does it, one at a time.

    Args:
        model, dtype: as for ``merged_tensors``.

    Raises:
        InputError: as ``merged_tensors``.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                        num_key_value_heads=1, num_local_experts=2, vocab_size=11)
        >>> names = [name for name, _ in checkpoint_tensors(MixtralForCausalLM(config))]
        >>> [name for name in names if "experts.1" in name]  # doctest: +NORMALIZE_WHITESPACE
        ['model.layers.0.block_sparse_moe.experts.1.w1.weight', 'model.layers.0.block_sparse_moe.experts.1.w3.weight',
         'model.layers.0.block_sparse_moe.experts.1.w2.weight']
    """
    inner = causal_lm(model)
    joined = _joined_patterns(inner)
    waiting: dict[str, Tensor] = {}  # weights that are a single one in the files
    for name, tensor in merged_tensors(model, dtype=dtype):
        if any(pattern.search(name) for pattern in joined):
            waiting[name] = tensor
        else:
            yield from revert_weight_conversion(inner, {name: tensor}).items()
    if waiting:
        yield from revert_weight_conversion(inner, waiting).items()


def _joined_patterns(model: PreTrainedModel) -> list[re.Pattern[str]]:
    """Patterns of weights of which several in the model are a single one in the files."""
    found = getattr(model, "_weight_conversions", None)
    conversions = get_model_conversion_mapping(model, add_legacy=False) if found is None else found
    joining = [c for c in conversions if isinstance(c, WeightConverter) and len(c.target_patterns) > 1]
    return [re.compile(pattern) for c in joining for pattern in c.target_patterns]


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The persistent buffers under their plain names; of ``modules_to_save`` those of the trained copy."""
    for name, module in model.named_modules():
        path = [part for part in name.split(".") if part and part != "base_layer"]
        if "original_module" in path:
            continue
        if "modules_to_save" in path:
            at = path.index("modules_to_save")
            path = path[:at] + path[at + 2 :]
        for own, buffer in module.named_buffers(recurse=False):
            if own not in module._non_persistent_buffers_set:
                yield ".".join([*path, own]), whole(buffer)


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The adapter's weights only, under the names of PEFT's ``adapter_model.safetensors``.

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
    """A weight with its adapter merged.

    Args:
        layer: the outermost LoRA layer around the weight's module.
        which: the weight's name in the module.
        weight: the weight without adapter.
        name: the weight's name in the model, for messages.
        dtype: as for ``merged_tensors``.
    """
    lora: Any = layer
    while getattr(lora, "parameter_name", "weight") != which and hasattr(lora.base_layer, "base_layer"):
        lora = lora.base_layer
    active = list(lora.active_adapters)
    if len(active) != 1 or any(lora.use_dora.get(adapter, False) for adapter in active):
        raise InputError(
            needed="one plain low-rank adapter a layer",
            given=f"{active} at {name!r}",
            remedy="Train one LoRA adapter, without DoRA.",
        )
    if getattr(lora, "parameter_name", "weight") != which:
        return _rounded(weight, dtype)
    with torch.no_grad():
        weight, change = whole(weight), _change(lora, active[0])
        if dtype is None:
            return weight + change.to(weight.dtype)
        return (weight.float() + change.float()).to(dtype)


def _change(lora: Any, adapter: str) -> Tensor:
    """``scale * B @ A`` in the dtype of the factors and the shape of the weight."""
    if not hasattr(lora, "parameter_name"):
        return whole(lora.get_delta_weight(adapter))
    experts = lora.num_experts
    a = whole(lora.lora_A[adapter].weight).reshape(experts, lora.r[adapter], -1)  # [E, R, in]
    b = whole(lora.lora_B[adapter].weight).reshape(-1, lora.r[adapter], experts)  # [out, R, E]
    transposed = lora.get_param().ndim == 3 and not lora._did_swap_in_out_features  # [E, in, out]
    product = torch.einsum("ore,eri->eio" if transposed else "ore,eri->eoi", b, a)
    return lora.scaling[adapter] * (product if lora.get_param().ndim == 3 else product[0])
