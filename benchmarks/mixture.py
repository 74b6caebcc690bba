"""A block of a mixture of experts in one process on one GPU: LoRA of attention and experts, and the GPU sampler.

    python benchmarks/mixture.py                                    # results/mixture-MODEL-GPU.json: Qwen3-30B-A3B
    python benchmarks/mixture.py --models gpt-oss-20b               # 50 GiB; also of an H100
    python benchmarks/mixture.py --layers 8                         # the same model with fewer layers
    python benchmarks/mixture.py --models tiny --device cpu         # tries the script itself
    python benchmarks/mixture.py --table [--check]                  # the table of pages that have one

Random weights in the published shape, lengths of completions forced; the second of two blocks is measured.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from first_contact import MODELS
from logitless.bench.machine import environment, write_result
from rollout_workloads import Workload
from script import command_line, parsed, short_name, short_name_of
from shapes import Shape

SHAPES = {
    "qwen3-30b-a3b": Shape(
        "qwen3-30b-a3b",
        "Qwen3-30B-A3B, LoRA of rank 16",
        MODELS["qwen3-30b-a3b"],
        lora_rank=16,
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss-20b",
        "gpt-oss-20b, LoRA of rank 16",
        {
            "model_type": "gpt_oss",
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
        lora_rank=16,
    ),
    "tiny": Shape(
        "tiny",
        "a model to try the tool itself",
        {
            "model_type": "qwen3_moe",
            "vocab_size": 41,
            "hidden_size": 16,
            "intermediate_size": 32,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "initializer_range": 0.3,
        },
        lora_rank=2,
    ),
}
WORK = {"tiny": "2x2-4-6"}
"""Other models have 64x8-256-512."""


def with_layers(shape: Shape, layers: int) -> Shape:
    """The same with another number of decoder layers, and a name that says so."""
    config = {**shape.config, "num_hidden_layers": layers}
    return replace(shape, name=f"{shape.name}-{layers}-layers", title=f"{shape.title}, {layers} layers", config=config)


def row(name: str, layers: int | None, work: Workload, device: str) -> dict[str, Any]:
    """Seconds of a block's phases, and tokens a second in the sampler and in the training step."""
    from logitless.distributed.arrangement import Arrangement
    from logitless.distributed.ranks import Ranks
    from logitless.train.optim.master_weights import lower_to
    from logitless.train.plan.training_memory import training_memory
    from rollout_contenders import TOKENS_PER_MICRO_BATCH
    from scale_block import block_over_ranks

    shape = SHAPES[name]
    if layers is not None:
        shape = with_layers(shape, layers)
    found = block_over_ranks(Ranks.alone(), shape, "replicate", work, device)
    model = shape.build("meta")
    lower_to(torch.bfloat16, (p for p in model.parameters() if p.requires_grad))
    seconds, read = found["seconds"], found["drawn_tokens"] + work.prompts * work.prompt_tokens
    return {
        "model": name,
        "layers": shape.config["num_hidden_layers"],
        "engine": found["engine"],
        "new_tokens": found["tokens"],
        "read_tokens": read,
        "seconds": seconds,
        "sampled_tokens_per_second": found["tokens"] / seconds["rollout"],
        "trained_tokens_per_second": read / seconds["training"],
        "peak_bytes": found["peak_bytes"],
        "forecast_bytes": training_memory(model, Arrangement(), tokens=TOKENS_PER_MICRO_BATCH).peak_bytes,
    }


def table(documents: Sequence[Mapping[str, Any]]) -> str:
    """What was measured, as Markdown."""
    lines = [
        "| model | layers | GPU | block | sampled tokens/s | trained tokens/s | GiB | forecast |",
        "|---|--:|---|---|--:|--:|--:|--:|",
    ]
    for found in documents:
        gpu = short_name_of(found["machine"]["gpu"])
        for each in found["rows"]:
            lines.append(
                f"| {SHAPES[each['model']].title} | {each['layers']} | {gpu} | "
                f"{each['read_tokens']:,} tokens, {each['new_tokens']:,} new | "
                f"{each['sampled_tokens_per_second']:,.0f} | {each['trained_tokens_per_second']:,.0f} | "
                f"{each['peak_bytes'] / 2**30:.0f} | {each['forecast_bytes'] / 2**30:.0f} |"
            )
    return "\n".join(lines)


def tables(results: Path) -> dict[str, str]:
    """The table of each model and GPU that was measured."""
    files = sorted(results.glob("mixture-*.json"))
    return {"": table([json.loads(path.read_text()) for path in files])} if files else {}


def main() -> None:
    """Measures, prints and writes."""
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["qwen3-30b-a3b"])
    parser.add_argument("--layers", type=int, help="of the model; its own number if left out")
    parser.add_argument("--work", help="prompts x samples - prompt tokens - new tokens")
    parser.add_argument("--device", default="cuda")
    options = parsed(parser, tables)
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        work = Workload.parse(options.work or WORK.get(name, "64x8-256-512"))
        found = {
            "machine": environment(options.device, ("triton", "transformers", "peft")),
            "rows": [row(name, options.layers, work, options.device)],
        }
        write_result(options.output / f"mixture-{name}-{short_name(options.device)}.json", found)
        print(table([found]) if options.device == "cuda" else json.dumps(found["rows"][0]), flush=True)


if __name__ == "__main__":
    main()
