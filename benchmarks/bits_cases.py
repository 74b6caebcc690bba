"""What ``benchmarks/bits.py`` measures, by name, and the file that it writes."""

from pathlib import Path
from typing import Any

import mixture
from script import Rows
from shapes import SHAPES

_TRAINED = {shape.name.removesuffix("-lora"): dict(shape.config) for shape in SHAPES}
_LARGER = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
MODELS: dict[str, dict[str, Any]] = {
    **{name: _TRAINED[name] for name in ("qwen2.5-0.5b", "qwen3-1.7b")},
    "qwen3-4b": _TRAINED["qwen3-1.7b"] | _LARGER,
    "llama-3.1-8b": _TRAINED["llama-3.1-8b"],
}
_FEWER = [
    mixture.with_layers(mixture.SHAPES[name], layers) for name, layers in (("qwen3-30b-a3b", 8), ("gpt-oss-20b", 4))
]
MIXTURES: dict[str, dict[str, Any]] = {
    **{shape.name: dict(shape.config) for shape in _FEWER},
    "glm-4.5-air-3-layers": {
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 3,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "llama-4-scout-4-layers": {
        "model_type": "llama4_text",
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        # a thirty-second of the published 8192, so that sequences of a thousand tokens have several
        "attention_chunk_size": 256,
        "floor_scale": 256,
    },
}
"""The published shapes with fewer layers: a law needs no more, and a GPU of 80 GB holds them."""
_DELTA_NET = {
    "vocab_size": 248320,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3.5-9b-8-layers": {
        "model_type": "qwen3_5_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_key_value_heads": 4,
        **_DELTA_NET,
    },
    "qwen3.5-35b-a3b-8-layers": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 2,
        **_DELTA_NET,
    },
}
"""Likewise: gated delta nets, and attention in each fourth layer."""
DECODED_ROWS = (1, 16, 64, 256, 512)
DECODED_POSITION = 256
LAWS = (
    "packed again",
    "packed in rows of 4096",
    "in reverse order",
    "shuffled, in rows of 9000",
    "micro-batches of any size",
    "alone",
    "prompts shared",
    "recomputed",
    "prefilled in chunks",
    "decoded, rows joining and leaving",
    "decoded, shared pages read once",
    "LoRA, packed in rows of 4096",
    "LoRA, decoded",
)
SECOND_GPU = ("on the second GPU, packed in rows of 4096", "on the second GPU, decoded")
"""Laws of a machine with two GPUs of one kind."""
STOCK = "transformers' layers, decoded against packed"
STOCK_PACKED = "transformers' layers, packed in rows of 4096"


class Results(Rows):
    """A result file that grows row by row."""

    def __init__(self, path: Path, here: dict[str, str]) -> None:
        super().__init__(
            path, here, ("model", "comparison", "kind", "num_rows", "workload"), self_check={}, differences={}
        )

    def has(self, model: str, part: str) -> bool:  # type: ignore[override]
        """Whether a part of a model is complete."""
        rows = [row for row in self.rows if row["model"] == model]
        if part == "laws":
            return {row.get("comparison") for row in rows} >= set(LAWS)
        if part == "second_gpu":
            return {row.get("comparison") for row in rows} >= set(SECOND_GPU)
        if part == "decode":
            return {row["num_rows"] for row in rows if row.get("kind") == part} >= set(DECODED_ROWS)
        return any(row.get("kind") == part for row in rows)
