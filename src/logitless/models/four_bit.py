"""A frozen base in four bits, for LoRA on a small card: every linear layer of the decoder, by bitsandbytes (NF4).

    weight ~ absmax of its 64 neighbours * one of 16 levels

Equal to LoRA on the weights that four bits can say, which are not the model's own: they are off by about a tenth of
their spread. Embedding, norms and LM head keep their dtype. Gives up: bitwise identical sampling and training (the
products are a library's, and differ with the number of rows), and merging: an adapter belongs to the rounded base.
"""

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from logitless.errors import UnavailableError
from logitless.models.lm_head import backbone

FourBit: TypeAlias = Literal["nf4"]

BITS_A_WEIGHT = 4 + 8 / 64 + 32 / (64 * 256)
"""Four, and an absmax for 64 of them, itself in eight bits with a float32 absmax for 256."""


def quantize(model: nn.Module, kind: FourBit, device: torch.device) -> None:
    """Exchange the decoder's linear layers for ones in four bits, in place; one at a time is on the device whole.

    On the meta device nothing is done.

    Args:
        model: a causal LM without adapters, its weights where they were read.
        kind: the levels; NF4's are quantiles of a normal distribution (Dettmers et al. 2023, arXiv:2305.14314).
        device: of the layers afterwards.

    Raises:
        UnavailableError: bitsandbytes is absent, or has no kernels for this device.
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
        small.support_avx512bf16_for_cpu = False  # it repacks weights on first use, and has no gradient afterwards
        if layer.bias is not None:
            small.bias = nn.Parameter(layer.bias.detach().to(device), requires_grad=False)
        weight = layer.weight.detach()
        small.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type=kind).to(device)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, small)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # by which PEFT knows what it adapts


def base_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that are, or on the meta device would be, in four bits: the decoder's, without adapters.

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
    """Of a parameter, those that four bits a weight hold counted one by one.

    Example:
        >>> num_weights(torch.ones(2, 3))
        6
    """
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(state.shape.numel())


def saved_bytes(model: nn.Module) -> int:
    """By four bits a weight, of a model on the meta device, which holds them whole."""
    weights = [layer.weight for _, layer in base_linears(model) if layer.weight.is_floating_point()]
    return sum(int(weight.numel() * (weight.element_size() - BITS_A_WEIGHT / 8)) for weight in weights)


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise UnavailableError(
            needed="bitsandbytes, for model.quantize",
            given=str(error),
            remedy="Install logitless[four-bit], or leave model.quantize out.",
        ) from error
    return bitsandbytes
