"""What sharing common prefixes saves: one training step in three ways.

    python benchmarks/common_beginnings.py

8 prompts with 8 completions each; all prompts begin with the same instructions, like a long system message. The step is
measured with nothing shared, with each prompt computed once, and with a tree of prefixes: instructions once, then each
prompt once, then the completions. Random weights, bfloat16 with float32 masters, row-invariant layers. Equal losses and
gradient norms show that the three are the same step.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from logitless.bench.machine import environment, release
from logitless.data import packing
from logitless.data.packing import pack
from logitless.train.learn.score import scores_of
from logitless.types import Completion, Prompt
from script import RESULTS, Rows, command_line, needs_gpu
from shapes import SHAPES, Shape, Workload
from step_contenders import Rollouts
from step_rows import Reference, Stage, Stepper

RESULT = RESULTS / "common-beginnings-H200.json"
INSTRUCTIONS = 1024
WORKLOAD = Workload(8, 8, 64, 256, shortest_completion=64)
"""Behind the instructions."""

WAYS = ("nothing", "prompts", "tree")


def rollouts_of(shape: Shape, instructions: int, workload: Workload) -> Rollouts:
    """The workload's rollouts with ``instructions`` tokens before every prompt.

    Example:
        >>> shape = next(shape for shape in SHAPES if shape.name == "tiny")
        >>> rollouts_of(shape, 20, Workload(2, 8, 4, 8)).packed.inputs.prefixes[0][0]
        (0, 20)
    """
    drawn = Rollouts.draw(workload, shape.vocabulary)
    chance = random.Random(1)
    begun = tuple(chance.randrange(shape.vocabulary) for _ in range(instructions))
    inputs, pairs = drawn.packed.inputs, []
    first = 0
    for s, length in enumerate(inputs.lengths):
        ids = inputs.input_ids[first : first + length].tolist()
        scored = inputs.source_counts[s]
        prompt = Prompt(str(s), "", begun + tuple(ids[: length - scored + 1]))
        pairs.append((prompt, Completion(prompt.id, (*ids[length - scored + 1 :], 0), "", "stop")))
        first += length
    return replace(drawn, packed=pack(pairs))


def measure(shape: Shape, device: str, keep: Callable[[dict[str, Any]], None], *, by: int = 1) -> None:
    """Hands out the rows of one model; on the CPU, to try the tool, with everything ``by`` times as short."""
    workload = WORKLOAD if by == 1 else WORKLOAD.shrunk(by)
    least, common = packing.LEAST_SHARED, {"prompts": 10**9}
    stage = Stage(shape, device, "row-invariant", "float32")
    try:
        for way in WAYS:
            packing.LEAST_SHARED = common.get(way, least)
            rollouts = rollouts_of(shape, INSTRUCTIONS // by, workload)
            stage.use("logitless", share_prompts=way != "nothing")
            plan = rollouts.plan.micro_batches
            logp = scores_of(stage.policy, rollouts.packed, plan, temperature=1.0, backend="auto").logp
            taken = stage.timed(Stepper(stage._learn, stage._learn), rollouts, Reference(logp, {}, None, None), steps=5)
            size = packing.Packing(workload.tokens_per_micro_batch, way != "nothing", stage.policy.hidden_size)
            rows = size.rows(range(rollouts.packed.num_sequences), rollouts.packed.inputs)
            keep(
                {
                    "model": shape.name,
                    "shared": way,
                    "seconds": sorted(taken.seconds)[len(taken.seconds) // 2] if taken.seconds else None,
                    "seconds_all": taken.seconds,
                    "tokens": rollouts.num_tokens,
                    "read_tokens": sum(size.num_tokens(row, rollouts.packed.inputs) for row in rows),
                    "rows": len(rows),
                    "peak_bytes": taken.peak_bytes,
                    "loss": taken.loss,
                    "grad_norm": taken.grad_norm,
                    "failure": taken.failure,
                }
            )
    finally:
        packing.LEAST_SHARED = least


def main() -> None:
    """Measure every model that was asked for and write the file after each row."""
    parser = command_line(__doc__)
    parser.add_argument("--models", default="qwen2.5-0.5b,qwen3-1.7b", help="by commas")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the tool itself with --models tiny")
    options = parser.parse_args()
    if options.device == "cuda":
        needs_gpu("Use --device cpu --models tiny to try the tool itself.")
    here = environment(options.device, ("triton", "transformers"))
    results = Rows(options.output, here, ("model", "shared"), instructions=INSTRUCTIONS)
    for name in options.models.split(","):
        shape = next(shape for shape in SHAPES if shape.name == name)
        measure(shape, options.device, results.add, by=1 if options.device == "cuda" else 16)
        release(options.device)


if __name__ == "__main__":
    main()
