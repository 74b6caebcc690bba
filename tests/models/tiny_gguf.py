"""A GGUF file of a small Llama with a byte-level tokenizer, as llama.cpp's converter would write it."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_letters() -> list[str]:
    """How a byte-level vocabulary writes the 256 bytes."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_gguf(
    path: Path,
    *,
    quantized: bool = False,
    layers: int = 2,
    experts: int = 0,
    more: Mapping[str, int] = MappingProxyType({}),
    **changed: Any,
) -> Path:
    """Write the file.

    Args:
        path: of the file.
        quantized: the layers' matrices in Q8_0.
        layers: how many.
        experts: of each layer, two of them used; then it is a Qwen 3.
        more: tokens that no merge makes, with their types.
        changed: of the metadata, by the name behind ``tokenizer.ggml.``; None leaves a key out. ``chat_template``.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    letters = byte_letters()
    merges = ["Ġ Ġ", "Ċ Ċ", "a b"]
    tokens = [*SPECIAL, *letters, *("".join(merge.split()) for merge in merges), *more]
    metadata: dict[str, Any] = {
        "model": "gpt2",
        "pre": "smollm",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "padding_token_id": 2,
        "chat_template": CHATML,
        **changed,
    }
    width, inner = 64, 96
    writer = GGUFWriter(path, "qwen3moe" if experts else "llama")
    writer.add_block_count(layers)
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(width // 4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    if experts:
        writer.add_key_length(width // 4)
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(inner)
    for name, value in metadata.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif value is not None:
            writer.add_string(key, value)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL) - len(more)) + [*more.values()])
    writer.add_token_merges(merges)
    random = np.random.default_rng(0)

    def matrix(name: str, *shape: int) -> None:
        numbers = (random.standard_normal(shape) * 0.1).astype(np.float32)
        if quantized and name.startswith("blk"):
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, numbers)

    matrix("token_embd.weight", len(tokens), width)
    for layer in range(layers):
        ending, stacked = ("_exps", (experts,)) if experts else ("", ())
        for name, *shape in (
            *(("attn_q", width, width), ("attn_k", width // 2, width), ("attn_v", width // 2, width)),
            *((f"ffn_{name}{ending}", *stacked, inner, width) for name in ("gate", "up")),
            *(("attn_output", width, width), (f"ffn_down{ending}", *stacked, width, inner)),
            *([("ffn_gate_inp", experts, width)] if experts else []),
        ):
            matrix(f"blk.{layer}.{name}.weight", *shape)
        norms = {"attn_norm": width, "ffn_norm": width}
        heads = {"attn_q_norm": width // 4, "attn_k_norm": width // 4} if experts else {}
        for name, size in (norms | heads).items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
