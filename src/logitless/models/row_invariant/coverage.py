"""Which decoders the row-invariant layers support, and the names of their modules."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from logitless.models.kernels.rows import power_of_two
from logitless.models.lm_head import backbone
from logitless.models.rotary import LongRotary
from logitless.models.row_invariant.experts import experts_of, router_of, uncovered_mixture

FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt_oss", "glm4_moe", "olmoe", "mixtral",
    "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "llama4_text",
)  # fmt: skip
GEMMA = ("gemma2", "gemma3_text")
"""Families with norms before and after attention and MLP."""
GATED_ATTENTION = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families whose attention is multiplied by a gate; each head's query is followed by its gate."""
ONE_PLUS = (*GEMMA, *GATED_ATTENTION)
"""Families whose norms multiply by ``1 + weight``."""
ROUNDED_ONCE = ("gpt_oss",)
"""Families whose norms round after their weight only."""
ACTIVATIONS = {"silu": False, "swish": False, "gelu_pytorch_tanh": True}
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))
DELTA = (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba"))
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


def uncovered(model: nn.Module) -> tuple[str, ...]:
    """What the row-invariant layers do not support in this model, in words; empty if they support it.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                      vocab_size=11, attention_dropout=0.1)
        >>> uncovered(LlamaForCausalLM(config))
        ('attention dropout of 0.1',)
    """
    decoder: Any = backbone(model)
    config = decoder.config.get_text_config()
    if (
        config.model_type not in FAMILIES
        or f".{config.model_type.removesuffix('_text')}." not in type(decoder).__module__
    ):
        return (f"the architecture {config.model_type}",)
    found = []
    if getattr(config, "attention_dropout", 0.0):
        found.append(f"attention dropout of {config.attention_dropout}")
    for name in ("resid_pdrop", "embd_pdrop"):
        if getattr(config, name, 0.0) and config.model_type == "phi3":
            found.append(f"dropout {name} of {getattr(config, name)}")
    if getattr(config, "clip_qkv", None) is not None:
        found.append(f"queries, keys and values clipped at {config.clip_qkv}")
    if activation_of(config) not in ACTIVATIONS:
        found.append(f"the activation {activation_of(config)}")
    if getattr(config, "use_bidirectional_attention", False):
        found.append("attention in both directions")
    rotary = decoder.rotary_emb
    ropes = "longrope" if isinstance(rotary, LongRotary) else rotary.rope_type
    for rope in sorted(set(ropes.values() if isinstance(ropes, dict) else [ropes])):
        if rope not in _FIXED_ROPE:
            found.append(f"positions scaled by {rope}, which depends on the longest sequence")
    if config.model_type == "llama4_text" and config.use_qk_norm and rotary.attention_scaling != 1:
        # its norms come after the rotation and ours before it, which is the same unless it also scales
        found.append(f"queries and keys scaled by {rotary.attention_scaling:g} and then normed")
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if kind not in _LAYER_TYPES}
    found.extend(f"layers of the kind {kind}" for kind in sorted(kinds))
    found.extend(_uncovered_modules(decoder, config))
    return tuple(dict.fromkeys(found))


def _uncovered_modules(decoder: Any, config: Any) -> list[str]:
    found = []
    dtypes = set()
    for layer in decoder.layers:
        modules, mlp = [*inputs_of(layer), output_of(layer)], mlp_of(layer)
        if (mixer := delta_net_of(layer)) is not None:
            found.extend(_uncovered_delta_net(mixer))
        if router_of(mlp) is not None:
            found.extend(uncovered_mixture(mlp, config))
            dtypes |= {weight.dtype for weight in experts_of(mlp)[0].parameters()}
        if (dense := dense_mlp(mlp)) is not None:
            modules += [*modules_of(dense, GATE_UP), dense.down_proj, *gates_of_shared(mlp)]
        for module in modules:
            linear = linear_of(module)
            if type(linear) is not nn.Linear:
                found.append(f"linear layers of the class {type(linear).__name__}")
            elif not linear.weight.is_floating_point() or linear.weight.dtype == torch.float64:
                found.append(f"weights in {linear.weight.dtype}")
            else:
                dtypes.add(linear.weight.dtype)
    for module in decoder.modules():
        if any(getattr(each, "p", 0.0) > 0 for each in getattr(module, "lora_dropout", {}).values()):
            found.append("dropout in an adapter")
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            found.append("modules of the decoder that are trained whole beside adapters")
        if type(module).__name__.endswith("RMSNorm"):
            dtypes.add(module.weight.dtype)
    if len(dtypes) > 1:
        found.append("weights of several dtypes: " + ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes)))
    return found


def _uncovered_delta_net(mixer: Any) -> list[str]:
    found = []
    for width in (mixer.head_k_dim, mixer.head_v_dim):
        if width < 16 or width != power_of_two(width):
            found.append(f"gated delta nets with heads of {width}, not a power of two from 16 on")
    if mixer.activation not in ("silu", "swish"):
        found.append(f"a convolution with the activation {mixer.activation}")
    if mixer.conv1d.bias is not None:
        found.append("a convolution with a bias")
    return found


def delta_net_of(layer: Any) -> Any:
    """A layer's gated delta net; None in layers with attention."""
    return layer._modules.get("linear_attn")


def inputs_of(layer: Any) -> list[Any]:
    """The linear maps that read the input of a layer's attention or delta net."""
    mixer = delta_net_of(layer)
    return modules_of(layer.self_attn, QKV) if mixer is None else modules_of(mixer, DELTA)


def output_of(layer: Any) -> Any:
    """The last linear map of a layer's attention or delta net."""
    mixer = delta_net_of(layer)
    return layer.self_attn.o_proj if mixer is None else mixer.out_proj


def mlp_of(layer: Any) -> Any:
    """A layer's MLP or mixture of experts."""
    return next(layer._modules[name] for name in ("mlp", "feed_forward") if name in layer._modules)


def dense_mlp(mlp: Any) -> Any:
    """The MLP that every token passes: this one, or the shared experts of a mixture; None without any."""
    if router_of(mlp) is None:
        return mlp
    return next((mlp._modules[name] for name in ("shared_experts", "shared_expert") if name in mlp._modules), None)


def gates_of_shared(mlp: Any) -> list[Any]:
    """The linear maps whose sigmoid scales the shared experts of a mixture: one, or none."""
    return [mlp._modules[name] for name in ("shared_expert_gate",) if name in mlp._modules]


def activation_of(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def modules_of(owner: Any, names: Sequence[tuple[str, ...]]) -> list[Any]:
    """The submodules of the first tuple of names that the owner has."""
    modules = owner._modules
    return next([modules[name] for name in group] for group in names if group[0] in modules)


def linear_of(module: Any) -> nn.Linear:
    return module.get_base_layer() if hasattr(module, "base_layer") else module
