"""What ``logitless bench bits`` measures, by name, and the file that it writes."""

import json
from pathlib import Path
from typing import Any

from logitless.bench.machine import write_result

_COMMON = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
_QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e6}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _COMMON
    | {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "rope_parameters": _QWEN_ROPE},
    "qwen3-1.7b": _COMMON
    | {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rope_parameters": _QWEN_ROPE},
    "qwen3-4b": _COMMON
    | {"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_parameters": _QWEN_ROPE},
    "llama-3.1-8b": _COMMON
    | {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
    | {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
}
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


class Results:
    """A result file that grows row by row.

    Args:
        path: of the file; begun anew where it is of another machine or other versions.
        here: machine and versions.
    """

    def __init__(self, path: Path, here: dict[str, str]) -> None:
        self.path = path
        found = json.loads(path.read_text()) if path.exists() else {}
        kept = found if found.get("environment") == here else {}
        self.document: dict[str, Any] = {"environment": here, "rows": [], "self_check": {}, "differences": {}} | kept
        self.document.pop("schema_number", None)  # written anew

    def has(self, model: str, part: str) -> bool:
        """Whether a part of a model is complete."""
        rows = [row for row in self.document["rows"] if row["model"] == model]
        if part == "laws":
            return {row.get("comparison") for row in rows} >= set(LAWS)
        if part == "second_gpu":
            return {row.get("comparison") for row in rows} >= set(SECOND_GPU)
        if part == "decode":
            return {row["num_rows"] for row in rows if row.get("kind") == part} >= set(DECODED_ROWS)
        return any(row.get("kind") == part for row in rows)

    def add(self, row: dict[str, Any]) -> None:
        """One more row, in place of the same one; written at once."""
        identity = ("model", "comparison", "kind", "num_rows", "workload")
        rows = self.document["rows"]
        rows[:] = [old for old in rows if any(old.get(name) != row.get(name) for name in identity)] + [row]
        print(json.dumps(row), flush=True)
        self.write()

    def write(self) -> None:
        """To the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_result(self.path, self.document)
