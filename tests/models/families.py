"""Tiny configs of the architectures that people post-train, and what each does here.

``test_families.py`` and ``test_image_models.py`` prove every entry, ``docs/models.md`` is written from them
(``make docs``).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import pytest

Served = Literal["probed", "named", "untested", "no"]
SMALL: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LOCAL: dict[str, Any] = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
TWICE_LOCAL = {**LOCAL, "num_hidden_layers": 4, "layer_types": 2 * LOCAL["layer_types"]}
PER_LAYER = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 40}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "head_dim": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
DELTA_NET = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
WIDE_NET = {**DELTA_NET, "linear_key_head_dim": 16, "linear_value_head_dim": 32}
"""With heads that row-invariant layers cover."""
MAMBA2 = {
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_d_conv": 3,
    "mamba_chunk_size": 4,
}  # fmt: skip
STEPS = {"time_step_min": 1e-12}
"""No bound of Mamba's step sizes: transformers keeps to it in a pass over a sequence, and not in decoding."""
SHARED_EXPERT = {"shared_expert_intermediate_size": 12}


@dataclass(frozen=True, eq=False)
class Family:
    """One architecture.

    Args:
        model_type: transformers' name of its text config.
        models: that have it, for people.
        fields: of a tiny config.
        parts: what sets it apart from a Llama.
        exact: whether row-invariant layers cover it, with which the GPU engine samples.
        refused: words of the error with which it is refused; None: it trains.
        attention: with which it trains. Only ``packed`` shares prompts.
    """

    model_type: str
    models: str
    fields: dict[str, Any]
    parts: str = ""
    exact: bool = False
    refused: str | None = None
    attention: str = "packed"

    @property
    def config(self) -> dict[str, Any]:
        """What ``load_model`` takes."""
        return {"model_type": self.model_type, **SMALL, **self.fields}

    @property
    def served(self) -> Served:
        """What ``tests/vllm/test_models.py`` shows of vLLM 0.32.

        ``probed``: it computes the log-probs of the weights that are sent to it. ``named``: its class, not run, takes
        every weight by name and shape. ``untested``: its class cannot be built on a CPU. ``no``: it has none, or one
        that takes other names.
        """
        return SERVED.get(self.model_type, "probed") if self.refused is None else "no"


FAMILIES = (
    Family("llama", "Llama 2, 3.x, SmolLM2", {}, exact=True),
    Family("qwen2", "Qwen2.5", {}, exact=True),
    Family("qwen3", "Qwen3", {}, exact=True),
    Family("mistral", "Mistral 7B, Nemo", {"sliding_window": 3}, "window", exact=True),
    Family("ministral3", "Ministral 3", {}),
    Family("gemma2", "Gemma 2", {**LOCAL, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
           "windows, softcaps", exact=True),
    Family("gemma3_text", "Gemma 3 1B", LOCAL, "windows", exact=True),
    Family("gemma4_text", "Gemma 4 31B", {
        **LOCAL, **PER_LAYER, "global_head_dim": 16, "num_kv_shared_layers": 0}, "windows, wider heads"),
    Family("gemma4_text", "Gemma 4 E2B, E4B", {
        **TWICE_LOCAL, **PER_LAYER, "global_head_dim": 16, "num_kv_shared_layers": 2}, "windows, shared keys"),
    Family("gemma4_text", "Gemma 4 26B-A4B", {
        **LOCAL, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1}, "experts, windows"),
    Family("gemma3n_text", "Gemma 3n", {
        **TWICE_LOCAL, **PER_LAYER, "num_kv_shared_layers": 2, "laurel_rank": 2,
        "activation_sparsity_pattern": [0.0] * 4}, "windows, shared keys"),
    Family("phi3", "Phi-3, Phi-4", {}, exact=True),
    Family("olmo2", "OLMo 2", {}),
    Family("olmo3", "Olmo 3", LOCAL, "windows"),
    Family("smollm3", "SmolLM3", {"no_rope_layers": [1, 0]}, "NoPE layers"),
    Family("exaone4", "EXAONE 4", LOCAL, "windows"),
    Family("seed_oss", "Seed-OSS", {}),
    Family("glm4", "GLM-4", {}),
    Family("cohere2", "Command A, R7B", LOCAL, "windows"),
    Family("ernie4_5", "ERNIE 4.5 dense", {}),
    Family("granite", "Granite 3", {"attention_multiplier": 0.5, "logits_scaling": 3.0}),
    Family("hunyuan_v1_dense", "Hunyuan dense", {}),
    Family("qwen2_moe", "Qwen1.5-MoE", {**EXPERTS, **SHARED_EXPERT}, "experts"),
    Family("qwen3_moe", "Qwen3-30B-A3B, 235B", {**EXPERTS, "decoder_sparse_step": 1, "norm_topk_prob": True},
           "experts", exact=True),
    Family("olmoe", "OLMoE", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}, "experts", exact=True),
    Family("mixtral", "Mixtral", LOCAL_EXPERTS, "experts", exact=True),
    Family("granitemoe", "Granite 3 MoE", LOCAL_EXPERTS, "experts"),
    Family("ernie4_5_moe", "ERNIE 4.5", {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12, "moe_layer_start_index": 1}, "experts"),
    Family("hunyuan_v1_moe", "Hunyuan A13B", {"num_experts": 4, "moe_topk": 2}, "experts"),
    Family("glm4_moe", "GLM-4.5, 4.6", ROUTED, "experts, sigmoid router", exact=True),
    Family("glm4_moe_lite", "GLM-4.7-Flash", {**ROUTED, **LATENT}, "experts, latent attention"),
    Family("deepseek_v2", "DeepSeek-V2", {**ROUTED, **LATENT}, "experts, latent attention"),
    Family("deepseek_v3", "DeepSeek-V3, Kimi K2", {**ROUTED, **LATENT, "n_group": 2}, "experts, latent attention"),
    Family("longcat_flash", "LongCat-Flash", {
        **LATENT, "num_layers": 2, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2,
        "expert_ffn_hidden_size": 12, "ffn_hidden_size": 24}, "experts, latent attention"),
    Family("dots1", "dots.llm1", ROUTED, "experts, sigmoid router"),
    Family("minimax_m2", "MiniMax-M2", LOCAL_EXPERTS, "experts, sigmoid router"),
    Family("minimax_m3_vl_text", "MiniMax-M3", {**LOCAL_EXPERTS, "moe_intermediate_size": 12},
           "experts, sigmoid router"),
    Family("mimo_v2_flash", "MiMo-V2-Flash", {**LOCAL, **ROUTED}, "experts, windows, sinks"),
    Family("exaone_moe", "K-EXAONE", {**LOCAL, **EXPERTS}, "experts, windows"),
    Family("afmoe", "Trinity", {**LOCAL, **EXPERTS, "num_dense_layers": 1}, "experts, windows"),
    Family("gpt_oss", "gpt-oss", {**LOCAL_EXPERTS, "sliding_window": 3}, "experts, windows, sinks", exact=True),
    Family("llama4_text", "Llama 4", {
        "intermediate_size_mlp": 24, "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 4,
        "no_rope_layers": [1, 0], "floor_scale": 3, "interleave_moe_layer_step": 2},
        "experts, chunks, NoPE layers", exact=True),
    Family("qwen3_next", "Qwen3-Next", {**WIDE_NET, **EXPERTS, **SHARED_EXPERT}, "gated delta nets, experts",
           exact=True),
    Family("qwen3_5_text", "Qwen3.5, 3.6 dense", WIDE_NET, "gated delta nets", exact=True),
    Family("qwen3_5_moe_text", "Qwen3.5, 3.6 MoE", {**WIDE_NET, **EXPERTS, **SHARED_EXPERT},
           "gated delta nets, experts", exact=True),
    Family("olmo_hybrid", "Olmo Hybrid", {**DELTA_NET, "linear_num_key_heads": 4}, "gated delta nets"),
    Family("kimi_linear", "Kimi Linear", {
        **LATENT, "layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 4, "linear_num_heads": 4,
        "linear_conv_kernel_dim": 3, **LOCAL_EXPERTS, "moe_intermediate_size": 12},
        "gated delta nets, latent attention, experts"),
    Family("nemotron_h", "Nemotron-H, Nemotron 3 Nano", {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "mlp", "moe"], "mamba_num_heads": 4,
        "mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2, "conv_kernel": 3, "chunk_size": 4,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "moe_shared_expert_intermediate_size": 12, **STEPS}, "Mamba-2, experts"),
    Family("lfm2", "LFM2", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_multiple_of": 8},
           "short convolutions"),
    Family("lfm2_moe", "LFM2 MoE", {
        "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, **EXPERTS, "num_dense_layers": 1},
        "short convolutions, experts"),
    Family("falcon_h1", "Falcon-H1", {**MAMBA2, "mamba_d_ssm": 32}, "Mamba-2, attention"),
    Family("jamba", "Jamba", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 6, "mamba_d_conv": 3, "mamba_dt_rank": 4},
        "Mamba, experts"),
    Family("bamba", "Bamba", {**MAMBA2, "attn_layer_indices": [1]}, "Mamba-2"),
    Family("granitemoehybrid", "Granite 4", {
        **MAMBA2, **LOCAL_EXPERTS, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 12,
        "position_embedding_type": "rope"}, "Mamba-2, experts"),
    Family("zamba2", "Zamba2", {
        "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_d_state": 6,
        "mamba_d_conv": 3, "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 4, "num_mem_blocks": 1,
        "attention_head_dim": 8, "attention_hidden_size": 32, "num_key_value_heads": 4, **STEPS},
        "Mamba-2, shared attention"),
    Family("mamba2", "Mamba-2", {"num_heads": 4, "state_size": 6, "n_groups": 2, "chunk_size": 4}, "Mamba-2 alone",
           refused="an architecture with replaceable attention"),
    Family("recurrent_gemma", "RecurrentGemma", {
        "lru_width": 16, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
           "its states are no cache", refused="layers whose packed sequences can be kept apart"),
    Family("minimax", "MiniMax-Text-01", {"layer_types": ["linear_attention", "full_attention"], **LOCAL_EXPERTS},
           "lightning attention", refused="layers whose packed sequences can be kept apart"),
    Family("deepseek_v32", "DeepSeek-V3.2", {**ROUTED, **LATENT, "index_topk": 3}, "experts, sparse attention",
           attention="eager"),
    Family("glm_moe_dsa", "GLM-5", {**ROUTED, **LATENT, "index_topk": 3}, "experts, sparse attention",
           attention="eager"),
)  # fmt: skip

_NAMED = (
    "gemma3n_text", "cohere2", "ernie4_5_moe", "llama4_text",  # of the same files it computes something else on a CPU
    "gpt_oss", "minimax_m2",  # takes no new weights for its experts; does not begin to load new ones
    "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",  # 16 bits alone
    "mimo_v2_flash", "lfm2", "lfm2_moe", "falcon_h1", "jamba", "granitemoehybrid", "zamba2",  # kernels for GPUs
)  # fmt: skip
OTHER_NAMES = ("longcat_flash", "olmo_hybrid")
SERVED: dict[str, Served] = {
    **dict.fromkeys(_NAMED, "named"),
    **dict.fromkeys(("kimi_linear", "nemotron_h", "deepseek_v32", "glm_moe_dsa"), "untested"),
    **dict.fromkeys(("dots1", "minimax_m3_vl_text", "bamba", *OTHER_NAMES), "no"),
}
TRAINED = tuple(family for family in FAMILIES if family.refused is None)
FAMILY = {family.model_type: family for family in reversed(FAMILIES)}
REFUSED = tuple(family for family in FAMILIES if family.refused is not None)


def one_of_each_kind(families: Iterable[Family]) -> list[Any]:
    """Parameters of a test: the first family with its parts and attention; the others with the same ones are slow."""
    kinds: set[tuple[str, str]] = set()
    parameters: list[Any] = []
    for family in families:
        kind = (family.parts, family.attention)
        marks = [pytest.mark.slow] if kind in kinds else []
        parameters.append(pytest.param(family, marks=marks, id=family.model_type))
        kinds.add(kind)
    return parameters


@dataclass(frozen=True, eq=False)
class ImageModel:
    """An image model whose language model is trained alone.

    Args:
        model_type: transformers' name of the whole.
        models: that have it, for people.
        text: fields of the language model's tiny config.
        vision: fields of the image tower's.
        becomes: the architecture that is loaded.
        fields: of the whole.
    """

    model_type: str
    models: str
    text: dict[str, Any]
    vision: dict[str, Any]
    becomes: str
    fields: dict[str, Any]

    @property
    def config(self) -> dict[str, Any]:
        """What ``load_model`` takes."""
        text = {**SMALL, **self.text}
        return {"model_type": self.model_type, "text_config": text, "vision_config": self.vision, **self.fields}


_QWEN_VISION = {
    "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16, "patch_size": 2,
    "num_position_embeddings": 4, "deepstack_visual_indexes": [0], "spatial_merge_size": 1,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 4,
    "patch_size": 2,
}  # fmt: skip
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
IMAGE_MODELS = (
    ImageModel("qwen2_vl", "Qwen2-VL", {**_MROPE, "hidden_size": 32}, {
        "depth": 1, "embed_dim": 8, "hidden_size": 32, "num_heads": 2, "patch_size": 2, "mlp_ratio": 1},
        "qwen2", _UNTIED),
    ImageModel("qwen2_5_vl", "Qwen2.5-VL", {**_MROPE, "hidden_size": 32}, {
        "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 32, "patch_size": 2},
        "qwen2", _UNTIED),
    ImageModel("qwen3_vl", "Qwen3-VL", _MROPE, _QWEN_VISION, "qwen3", {"tie_word_embeddings": True}),
    ImageModel("qwen3_vl_moe", "Qwen3-VL MoE", {**_MROPE, **EXPERTS, "decoder_sparse_step": 1}, _QWEN_VISION,
               "qwen3_moe", _UNTIED),
    ImageModel("qwen3_5", "Qwen3.5, 3.6 dense", WIDE_NET, _QWEN_VISION, "qwen3_5_text", _UNTIED),
    ImageModel("qwen3_5_moe", "Qwen3.5, 3.6 MoE", {**WIDE_NET, **EXPERTS, **SHARED_EXPERT}, _QWEN_VISION,
               "qwen3_5_moe_text", _UNTIED),
    ImageModel("mistral3", "Mistral Small 3.1, 3.2", {"model_type": "mistral"}, {"model_type": "pixtral", **_SIGLIP},
               "mistral", _UNTIED),
    ImageModel("gemma3", "Gemma 3 4B, 12B, 27B", LOCAL, {"model_type": "siglip_vision_model", **_SIGLIP}, "gemma3_text",
               {"mm_tokens_per_image": 1}),
    ImageModel("gemma4", "Gemma 4", {**FAMILY["gemma4_text"].fields, "pad_token_id": 0}, {
        **_SIGLIP, "num_key_value_heads": 2, "head_dim": 4, "pooling_kernel_size": 1}, "gemma4_text", {}),
    ImageModel("llama4", "Llama 4", FAMILY["llama4_text"].fields, {
        **_SIGLIP, "vision_output_dim": 8, "projector_input_dim": 8, "projector_output_dim": 8},
        "llama4_text", _UNTIED),
    ImageModel("lfm2_vl", "LFM2-VL", {"model_type": "lfm2", **FAMILY["lfm2"].fields}, {
        "model_type": "siglip2_vision_model", "num_patches": 4, **_SIGLIP}, "lfm2", _UNTIED),
    ImageModel("internvl", "InternVL3", {"model_type": "qwen3"}, {
        "model_type": "internvl_vision", **_SIGLIP, "image_size": [4, 4], "patch_size": [2, 2]}, "qwen3", _UNTIED),
    ImageModel("llava", "LLaVA", {"model_type": "llama"}, {"model_type": "clip_vision_model", **_SIGLIP}, "llama",
               _UNTIED),
)  # fmt: skip
