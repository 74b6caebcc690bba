"""Tiny configs of architectures as vLLM 0.32 on a CPU takes them: wide enough for its kernels, and complete.

Published configs have fields that transformers does not read and keeps; those that vLLM reads are here.
"""

from typing import Any

from tests.models.families import FAMILIES, Family

WIDER: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.1, "moe_intermediate_size": 64,
    "intermediate_size_mlp": 128, "shared_expert_intermediate_size": 64,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 64,
    "num_key_value_heads": 2, "q_lora_rank": 32,
}  # fmt: skip
_TIED = {"tie_word_embeddings": True}
_PER_LAYER = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 16}
OTHERWISE: dict[str, dict[str, Any]] = {
    "gemma2": _TIED,
    "gemma3n_text": {**_TIED, **_PER_LAYER, "laurel_rank": 16},
    "gemma4_text": {**_TIED, **_PER_LAYER, "global_head_dim": 64},
    "cohere2": _TIED,
    "glm4_moe_lite": {**_LATENT, "topk_method": "noaux_tc"},
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "topk_method": "noaux_tc"},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "llama4_text": {"attention_chunk_size": 128, "floor_scale": 64},
    "lfm2": {
        **_TIED, "conv_dim": 64, "conv_dim_out": 64, "block_dim": 64, "block_ff_dim": 128,
        "block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0,
    },
    "lfm2_moe": _TIED,
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 32},
    "zamba2": {
        **_TIED, "num_key_value_heads": 2, "attention_head_dim": 64, "attention_hidden_size": 128, "n_mamba_heads": 4,
    },
    "longcat_flash": {**_LATENT, "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0], "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_head_dim": 32,
        "swa_v_head_dim": 32, "v_head_dim": 32, "moe_layer_freq": [0, 1], "layernorm_epsilon": 1e-5,
        "sliding_window_size": 3, "add_swa_attention_sink_bias": True,
    },
}  # fmt: skip


def served_config(family: Family) -> dict[str, Any]:
    """What ``load_model`` takes."""
    wider = {name: value for name, value in WIDER.items() if name in family.config}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    return {**family.config, **wider, **ends, **OTHERWISE.get(family.model_type, {})}


_PROBED = [family for family in FAMILIES if family.served == "probed"]
MIXTURES = [family for family in _PROBED if "experts" in family.parts]
DENSE = [family for family in _PROBED if "experts" not in family.parts]
NAMED = [family for family in FAMILIES if family.served == "named"]
