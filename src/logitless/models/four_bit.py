"""A frozen base model in four bits, for LoRA on a small GPU: every linear layer of the decoder, by bitsandbytes (NF4).

    weight ~ absmax of its block of 64 * one of 16 levels

LoRA trains on the rounded weights, which differ from the model's own by about a tenth of their standard deviation.
Embedding, norms and LM head keep their dtype. Not supported: bitwise identical sampling and training, because the
library's products depend on the number of rows; and merging, because an adapter belongs to the rounded base.
"""

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from logitless.installed import optional
from logitless.models.lm_head import backbone

FourBit: TypeAlias = Literal["nf4"]

BITS_A_WEIGHT = 4 + 8 / 64 + 32 / (64 * 256)
"""Four bits, an absmax of eight bits for 64 weights, and a float32 absmax for 256 of those."""


def quantize(model: nn.Module, kind: FourBit, device: torch.device) -> None:
    """Replace the decoder's linear layers by four-bit ones, in place; nothing is done on the meta device.

    Only one unquantized layer at a time is on the device.

    Args:
        model: a causal LM without adapters, its weights on the device where they were loaded.
        kind: the levels; NF4's are quantiles of a normal distribution (Dettmers et al. 2023, arXiv:2305.14314).
        device: of the four-bit layers.

    Raises:
        UnavailableError: bitsandbytes is not installed, or has no kernels for this device.
    """
    if device.type == "meta":
        return
    bitsandbytes = _bitsandbytes()
    for name, layer in list(base_linears(model)):
        small = bitsandbytes.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=layer.weight.dtype,
            quant_type=kind,
            device="meta",
        )
        small.support_avx512bf16_for_cpu = False  # that path repacks weights on first use and has no gradient
        if layer.bias is not None:
            small.bias = nn.Parameter(layer.bias.detach().to(device), requires_grad=False)
        weight = layer.weight.detach()
        small.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type=kind).to(device)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, small)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # PEFT reads this flag


def base_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The decoder's linear layers without adapters: those that ``quantize`` replaces or has replaced.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                      vocab_size=11)
        >>> [name.rpartition(".")[2] for name, _ in base_linears(LlamaForCausalLM(config))][:4]
        ['q_proj', 'k_proj', 'v_proj', 'o_proj']
    """
    inside = {id(module) for module in backbone(model).modules()}
    for name, module in model.named_modules():
        is_adapter = ".lora_A." in name or ".lora_B." in name
        if isinstance(module, nn.Linear) and id(module) in inside and not is_adapter:
            yield name, module


def num_weights(parameter: Tensor) -> int:
    """The number of weights in a parameter; packed four-bit weights are counted one by one."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(state.shape.numel())


def saved_bytes(model: nn.Module) -> int:
    """Bytes that ``quantize`` would save, for a model on the meta device."""
    weights = [layer.weight for _, layer in base_linears(model) if layer.weight.is_floating_point()]
    return sum(int(weight.numel() * (weight.element_size() - BITS_A_WEIGHT / 8)) for weight in weights)


def _bitsandbytes() -> Any:
    needed = "bitsandbytes, for model.quantize"
    return optional("bitsandbytes", extra="four-bit", needed=needed, otherwise="leave model.quantize out")
