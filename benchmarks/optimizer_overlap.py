"""What a training step would gain if the optimizer's update ran beside the next forward pass.

    python benchmarks/optimizer_overlap.py

Between two steps of one block nothing but the weights keeps the second waiting: with a stream of its own the update of
one layer could run beside the forward pass of another. Measured is more than that could gain: the whole update on a
second stream, beside a whole forward pass of one packed row of the workload *long* that does not wait for it. What is
computed meanwhile means nothing.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logitless.bench.machine import environment, release, write_result
from logitless.bench.step_contenders import SHAPES, Rollouts, Shape
from logitless.bench.step_rows import Stage, product_rate
from logitless.data.packing import Packing
from logitless.errors import UnavailableError
from logitless.train.fused_adamw import clip_factor, gradient_norm
from logitless.train.masters import MasterAdamW

RESULT = Path("benchmarks/results/optimizer-overlap-H200.json")
TOKENS = 16384
RUNS = 15


def seconds_of(work: Callable[[], object]) -> float:
    """Median of a few runs, each from an idle GPU to an idle GPU."""
    found = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def measure(shape: Shape) -> dict[str, Any]:
    """The row of one model."""
    stage = Stage(shape, "cuda", "row-invariant", "float32")
    packed = Rollouts.draw(shape.workload("long"), shape.vocabulary).packed
    size = Packing(TOKENS, hidden_size=stage.policy.hidden_size)
    batch = packed.take(size.rows(range(packed.num_sequences), packed.inputs)[0])
    optimizer = stage.learner.optimizer
    assert isinstance(optimizer, MasterAdamW)
    for parameter in stage.policy.named_parameters().values():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 1e-3, dtype=torch.float32)
    optimizer.take_gradients()
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()

    def forward() -> Tensor:
        return stage.policy.scores(batch, temperature=1.0, backend="fused").logp.sum()

    def update() -> None:  # both kernels of ``MasterAdamW.clipped_step``, without its wait at the end
        gradients = optimizer._gradients()
        with torch.no_grad():
            norm = gradient_norm(optimizer._chunks_of(list(gradients)), list(gradients.values()))
            optimizer._fused(gradients, clip_factor(norm, 1.0))

    def one_after_the_other() -> Tensor:
        update()
        return forward()

    def side_by_side() -> Tensor:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            update()
        loss = forward()
        main.wait_stream(side)
        return loss

    return {
        "model": shape.name,
        "tokens": size.num_tokens(range(batch.num_sequences), batch.inputs),
        "update_seconds": seconds_of(update),
        "forward_seconds": seconds_of(forward),
        "one_after_the_other_seconds": seconds_of(one_after_the_other),
        "side_by_side_seconds": seconds_of(side_by_side),
        "runs": RUNS,
        "product_flops": product_rate("cuda"),
    }


def main() -> None:
    """Measure every model that was asked for and write the file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen2.5-0.5b,qwen3-1.7b", help="by commas")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise UnavailableError(needed="a CUDA device", given="none", remedy="Run it on a machine with a GPU.")
    rows: list[dict[str, Any]] = []
    for name in options.models.split(","):
        rows.append(measure(next(shape for shape in SHAPES if shape.name == name)))
        print(json.dumps(rows[-1]), flush=True)
        write_result(options.output, {"environment": environment("cuda", ("triton", "transformers")), "rows": rows})
        release("cuda")


if __name__ == "__main__":
    main()
