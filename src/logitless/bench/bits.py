"""``logitless bench bits``: laws and price of one set of bits, and the table of docs/bits.md.

Laws: log-probs, entropies and hidden states of the same tokens, computed in every way that training and sampling
compute them, compared in every bit. Price: the same model with row-invariant layers and with transformers' own, in the
forward pass, in a training step, and in a step of decoding against the same CUDA graph with plain cuBLAS. What a result
file has already is not measured again, so a long run can be made of short ones (``--seconds``).
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from logitless.bench import bits_report
from logitless.bench.machine import environment, release, write_result
from logitless.errors import ConfigurationError, UnavailableError

PACKAGES = ("triton", "transformers")
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
STOCK = "transformers' layers, decoded against packed"
STOCK_PACKED = "transformers' layers, packed in rows of 4096"
PARTS = ("laws", "train_forward", "train_step", "decode")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``logitless bench bits``."""
    names = ",".join(MODELS)
    parser.add_argument("--models", default=names, help=f"by commas, of {names}")
    parser.add_argument("--parts", default=",".join(PARTS), help="by commas: what to measure")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after this time")
    parser.add_argument("--thorough", action="store_true", help="try every tile of the products, not the usual ones")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder of the JSON file")
    parser.add_argument("--table", type=Path, nargs="*", help="documents whose table to rewrite; measures nothing")
    parser.add_argument("--document", type=Path, nargs="*", default=[], help="documents to write the tables into, too")
    parser.add_argument("--check", action="store_true", help="with --table: fail if a document is out of date")


def run(args: argparse.Namespace) -> int:
    """Measures what is missing; 0 when every law held."""
    if args.table is not None:
        return bits_report.update(args.table, bits_report.load(args.output), check=args.check)
    if not torch.cuda.is_available():
        raise UnavailableError(
            needed="a CUDA device", given="none", remedy="Run it on a GPU; on a CPU the laws are tests of small models."
        )
    for name in args.models.split(","):
        if name not in MODELS:
            raise ConfigurationError(
                needed=f"a model among {', '.join(MODELS)}", given=repr(name), remedy="Name some of them by commas."
            )
    from logitless.bench.bits_measured import Measured  # needs Triton

    here = environment("cuda", PACKAGES)
    card = here["gpu"].removeprefix("NVIDIA ").split(" ")[0]
    path = args.output / f"bits-{card}.json"
    results = Results(path, here)
    started = time.perf_counter()
    for name in args.models.split(","):
        missing = [part for part in args.parts.split(",") if not results.has(name, part)]
        if not missing or time.perf_counter() - started > args.seconds:
            continue
        measured = Measured(name, results, thorough=args.thorough)
        for part in missing:
            if time.perf_counter() - started > args.seconds:
                break
            for row in measured.part(part):
                results.add(row)
        del measured
        release("cuda")
    bits_report.plot(results.document, args.output / f"bits-{card}.png")
    print(bits_report.table(results.document), flush=True)
    bits_report.update(args.document, bits_report.load(args.output), check=False)
    return 1 if any(row.get("differ") and row.get("exact", True) for row in results.document["rows"]) else 0


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
