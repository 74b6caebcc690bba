"""Forward and backward of one packed row, its layers launched kernel by kernel and as a CUDA graph.

    python benchmarks/short_rows.py
    python benchmarks/short_rows.py --lora 16 --output FILE    # of an adapter of this rank

The shapes of SmolLM2-135M and Qwen2.5-0.5B with random bfloat16 weights, gradients summed in float32; short
completions of prompts that begin alike. ``graph`` says whether the row went through one: the longest does not.
"""

import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from first_contact import MODELS
from logitless.bench.machine import environment, release
from logitless.data.packing import pack
from logitless.models.lm_head import backbone
from logitless.models.loading import load_model
from logitless.models.lora import LoraOptions, add_lora
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.train.learn.policy import Policy
from logitless.types import Completion, PackedBatch, Prompt
from script import RESULTS, Rows, command_line, needs_gpu

RUNS = 15
SIZES = ((8, 8), (16, 16), (32, 24), (64, 32))  # prompts, completions of each


def batch_of(prompts: int, completions: int) -> PackedBatch:
    """A packed row: prompts of 27 to 33 tokens, completions of 4 to 12."""
    pairs = []
    for p in range(prompts):
        prompt = Prompt(str(p), "", tuple(range(3, 30 + p % 7)))
        for c in range(completions):
            tokens = tuple(3 + (7 * c + k) % 400 for k in range(4 + (5 * c + p) % 9))
            pairs.append((prompt, Completion(str(p), tokens, "", "stop")))
    return pack(pairs)


def policy_of(name: str, *, rank: int, graphs: bool) -> Policy:
    """A model of a published shape with row-invariant layers, and an adapter of a rank other than 0."""
    model: nn.Module = load_model(
        MODELS[name], random_weights=True, seed=0, dtype=torch.bfloat16, device="cuda", attention="packed"
    )
    if rank:
        model = add_lora(model, LoraOptions(rank=rank))
    install_row_invariant(model)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.grad_dtype = torch.float32
    policy = Policy(model)
    if graphs:
        policy.graph_short_rows()
    return policy


def measure(policy: Policy, batch: PackedBatch) -> dict[str, Any]:
    """Median seconds of a pass, from an idle GPU to an idle GPU, and those of the first one."""
    found = []
    for _ in range(RUNS + 1):
        policy.model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        policy.scores(batch, temperature=1.0, backend="fused").logp.sum().backward()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return {"first_seconds": found[0], "seconds": statistics.median(found[1:])}


def main() -> None:
    """Measure every model at every size, both ways, and write the file after each."""
    parser = command_line(__doc__)
    parser.add_argument("--models", default="smollm2-135m,qwen2.5-0.5b", help="by commas")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train an adapter; 0: every weight")
    parser.add_argument("--output", type=Path, default=RESULTS / "short-rows-H200.json")
    options = parser.parse_args()
    needs_gpu()
    results = Rows(options.output, environment("cuda", ("triton", "transformers")), ("model", "tokens", "graphs"))
    for name in options.models.split(","):
        for graphs in (False, True):
            policy = policy_of(name, rank=options.lora, graphs=graphs)
            installed: Any = backbone(policy.model)
            for size in SIZES:
                batch = batch_of(*size)
                before = len(installed.row_invariant.graphs) if graphs else 0
                row = {"model": name, "tokens": batch.num_tokens, "graphs": graphs, **measure(policy, batch)}
                row["graph"] = graphs and len(installed.row_invariant.graphs) > before
                results.add(row)
            del policy, installed
            gc.collect()
            release("cuda")


if __name__ == "__main__":
    main()
