"""Tiny models of many architectures, each with what sets it apart, and packed inputs."""

from typing import Any

import torch
from torch import nn

from logitless.models.loading import disable_dropout, load_model
from logitless.models.lora import LoraOptions, add_lora
from logitless.types import PackedInputs

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
LLAMA: dict[str, Any] = {
    **SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
GEMMA = {**LLAMA, "head_dim": 8, "sliding_window": 3}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 12,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 64, "initializer_range": 0.2}
OPT = {**SMALL, "word_embed_proj_dim": 16, "ffn_dim": 48, "max_position_embeddings": 64, "init_std": 0.2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **LLAMA},
    "llama-tied": {"model_type": "llama", **LLAMA, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **LLAMA},
    "qwen3": {"model_type": "qwen3", **LLAMA, "head_dim": 16},
    "mistral-window": {"model_type": "mistral", **LLAMA, "sliding_window": 3},
    "gemma2": {"model_type": "gemma2", **GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3": {"model_type": "gemma3_text", **GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_5": {
        "model_type": "qwen3_5_text", **LLAMA, "head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 3,
        "layer_types": ["linear_attention", "full_attention"], "pad_token_id": None, "bos_token_id": None,
        "eos_token_id": None,
    },
    "cohere": {"model_type": "cohere", **LLAMA, "logit_scale": 0.25},
    "granite": {"model_type": "granite", **LLAMA, "logits_scaling": 3.0, "attention_multiplier": 0.5},
    "phi3-longrope": {
        "model_type": "phi3", **LLAMA, "original_max_position_embeddings": 12, "rope_parameters": LONGROPE,
        "pad_token_id": None,
    },
    "llama-dynamic": {"model_type": "llama", **LLAMA, "rope_parameters": DYNAMIC},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "phi": {"model_type": "phi", **LLAMA, "partial_rotary_factor": 0.5},
    "opt": {"model_type": "opt", **OPT},
    "gpt_neox": {
        "model_type": "gpt_neox", **SMALL, "intermediate_size": 48, "max_position_embeddings": 64,
        "initializer_range": 0.2,
    },
    "falcon": {"model_type": "falcon", **SMALL, "initializer_range": 0.2},
}  # fmt: skip
ATTENTION = {"gemma2": "eager", "falcon": "sdpa"}
PACKABLE = [name for name in CONFIGS if name not in ATTENTION]


def tiny(name: str, **options: Any) -> nn.Module:
    """A verified model with seeded random weights and biases, without dropout, evaluating."""
    options = {"attention": ATTENTION.get(name, "packed"), "seed": 1, **options}
    model = load_model(CONFIGS[name], random_weights=True, **options)
    disable_dropout(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def adapted(model: nn.Module, options: LoraOptions | None = None) -> nn.Module:
    """The model with adapters that do something."""
    model = add_lora(model, options or LoraOptions(rank=2))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def packed(lengths: list[int], vocabulary: int = 61) -> PackedInputs:
    """Random tokens; every token but a sequence's last is scored."""
    generator = torch.Generator().manual_seed(len(lengths))
    ids = torch.randint(0, vocabulary, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1].tolist()
    source = torch.cat([torch.arange(s, s + n - 1) for s, n in zip(starts, lengths, strict=True)])
    return PackedInputs(ids, positions, tuple(lengths), source, tuple(n - 1 for n in lengths))
