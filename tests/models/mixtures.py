"""Tiny mixtures of experts of many families."""

from typing import Any

import torch
from torch import nn

from logitless.models.loading import load_model
from tests.models.families import TRAINED
from tests.models.tiny import CONFIGS, LLAMA

_CHOOSE_2_OF_4: dict[str, Any] = {"num_experts_per_tok": 2, "head_dim": 8, "num_key_value_heads": 4}
_SIGMOID = {"n_routed_experts": 4, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_SHARED = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DELTA_NET = {key: value for key, value in CONFIGS["qwen3_5"].items() if key.startswith(("linear", "layer_types"))}
_JAMBA = {
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0,
    "mamba_d_state": 6, "mamba_d_conv": 3, "mamba_dt_rank": 4,
}  # fmt: skip
_GEMMA = {
    "enable_moe_block": True, "hidden_size_per_layer_input": 0, "global_head_dim": 16, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8,
}  # fmt: skip
_CHUNKS = {"attention_chunk_size": 8, "no_rope_layers": [1, 0], "floor_scale": 4}
_ROTARY = {"rope_type": "default", "rope_theta": 1e4}
MIXTURES: dict[str, dict[str, Any]] = {
    name: {"model_type": name, **LLAMA, **_CHOOSE_2_OF_4, **_ENDS, **own}
    for name, own in {
        "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24},
        "qwen3_next": {"num_experts": 4, **_SHARED, **_DELTA_NET},
        "qwen3_5_moe_text": {"num_experts": 4, **_SHARED, **_DELTA_NET},
        "qwen2_moe": {"num_experts": 4, **_SHARED},
        "olmoe": {"num_experts": 4},
        "mixtral": {"num_local_experts": 4},
        "gpt_oss": {"num_local_experts": 4, "layer_types": ["full_attention"] * 2, "rope_parameters": _ROTARY},
        "minimax_m2": {"num_local_experts": 4},
        "glm4_moe": {**_SIGMOID, "first_k_dense_replace": 1},
        "glm4_moe_lite": {**_SIGMOID, **_LATENT, "mlp_layer_types": ["sparse"] * 2},
        "deepseek_v3": {**_SIGMOID, **_LATENT, "first_k_dense_replace": 1},
        "granitemoe": {"num_local_experts": 4},
        "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0},
        "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
        "jamba": {"num_experts": 4, **_JAMBA},
        "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 24, **_CHUNKS},
        "gemma4_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24, **_GEMMA},
    }.items()
}
OTHERS = {each.model_type: each for each in TRAINED if "experts" in each.parts and each.model_type not in MIXTURES}
"""Families of mixtures beside these, tested less."""
ATTENTION = {"gpt_oss": "eager"}
WITH_LOSS = (
    "qwen3_next", "qwen3_5_moe_text", "qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "gpt_oss", "minimax_m2",
    "granitemoe", "ernie4_5_moe", "jamba",
)  # fmt: skip


def mixture(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A verified mixture with seeded random weights, whose routers' correction biases, where it has some, differ.

    In float64 its experts run one after the other, for torch groups no products of that dtype.
    """
    other = OTHERS.get(name)
    config = (MIXTURES[name] if other is None else other.config | {"vocab_size": 64}) | changes
    attention = ATTENTION.get(name, "packed") if other is None else other.attention
    model = load_model(config, random_weights=True, seed=1, attention=attention).to(dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model.eval()
