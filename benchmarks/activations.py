"""Estimated and measured activation memory, for each way to keep less and for budgets between them.

    python benchmarks/activations.py

A model with random weights runs one packed row of the workload *long* forward and backward, prompts shared and
gradients allocated. ``layers``: the backbone alone, which ``train.activation_memory`` bounds. ``step``: with the LM
head at a memory budget of 1 GiB, whose own estimate is added. Bytes exclude weights and gradients. Estimates come from
two short passes of each way on the same model (``models/activations.py``), before the row is run.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from head_bytes import step_bytes
from logitless.bench.machine import environment, release
from logitless.data.packing import Packing, share_prompts
from logitless.models.activations import MODES, ActivationPlan, Cost, Mode, costs_per_token, set_modes
from logitless.models.lm_head import backbone_hidden, lm_head
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.models.row_invariant.self_check import self_check
from logitless.train.learn.policy import Policy
from logitless.train.optim.master_weights import lower_to
from logitless.types import PackedBatch
from script import RESULTS, Rows, command_line, needs_gpu
from shapes import SHAPES, Shape
from step_contenders import Rollouts

RESULT = RESULTS / "activations-H200.json"
TOKENS = 16384
"""Most tokens of the packed row, as a recipe has it by default."""

HEAD_BUDGET = 2**30
FRACTIONS = (0.75, 0.5, 0.25, 0.125)
"""Budgets, as parts of what everything kept would take."""


def model_of(shape: Shape, device: str) -> nn.Module:
    """As a recipe with row-invariant layers trains it, with every gradient in place."""
    model = shape.build(device)
    model.gradient_checkpointing_disable()  # type: ignore[operator]
    lower_to(torch.bfloat16, model.parameters())
    install_row_invariant(model)
    self_check(model)
    return model


def row_of(shape: Shape, tokens: int, width: int) -> PackedBatch:
    """The first packed row of the workload *long*."""
    packed = Rollouts.draw(shape.workload("long"), shape.vocabulary).packed
    return packed.take(Packing(tokens, share_prompts=True, hidden_size=width).rows(range(16), packed.inputs)[0])


def plans(costs: dict[Mode, Cost], layers: int, tokens: int) -> dict[str, ActivationPlan]:
    """Each mode everywhere, and what budgets choose.

    Example:
        >>> costs = {"keep": Cost(100.0, 30.0), "recompute": Cost(10.0, 20.0), "host": Cost(0.0, 20.0)}
        >>> list(plans(costs, 4, 10))
        ['keep', 'recompute', 'host', '75% of keep', '50% of keep', '25% of keep', '12.5% of keep']
    """
    found = {mode: ActivationPlan.with_counts(costs, {mode: layers}, num_tokens=tokens) for mode in costs}
    named: dict[str, ActivationPlan] = {mode: found[mode] for mode in MODES if mode in found}
    for part in FRACTIONS:
        budget = round(part * found["keep"].num_bytes)
        named[f"{100 * part:g}% of keep"] = ActivationPlan.of(
            costs, num_layers=layers, num_tokens=tokens, budget=budget
        )
    return named


def peak_of(passes: Any) -> tuple[int, float]:
    """Bytes above those before, and seconds, of the second of two calls."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        passes()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return torch.cuda.max_memory_allocated() - before, seconds


def measure(shape: Shape, keep: Callable[[dict[str, Any]], None]) -> None:
    """Hands out the rows of one model, each as soon as it is there."""
    model = model_of(shape, "cuda")
    costs = costs_per_token(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    policy = Policy(model, memory_budget=HEAD_BUDGET)
    batch = row_of(shape, TOKENS, policy.hidden_size)
    inputs = share_prompts(batch.inputs).to("cuda")
    tokens = len(inputs.input_ids)
    vocabulary, width = lm_head(model).weight.shape
    # what the head reads and gives back besides: its rows, their gradients, and those laid out for all tokens
    head = step_bytes(batch.num_tokens, width, vocabulary, memory_budget=HEAD_BUDGET) + 4 * width * batch.num_tokens

    def layers() -> None:
        hidden = backbone_hidden(model, inputs)
        hidden.backward(torch.zeros_like(hidden))

    def step() -> None:
        policy.scores(batch, temperature=1.0, backend="fused").logp.sum().backward()

    layer_count = int(shape.config["num_hidden_layers"])
    for name, plan in plans(costs, layer_count, tokens).items():
        set_modes(model, plan.modes)
        for part, passes, estimated in (
            ("layers", layers, plan.num_bytes),
            ("step", step, max(plan.num_bytes, plan.kept_bytes + head)),
        ):
            release("cuda")
            measured, seconds = peak_of(passes)
            keep(
                {
                    "model": shape.name,
                    "modes": name,
                    "layers": plan.counts,
                    "tokens": tokens,
                    "part": part,
                    "estimated_bytes": estimated,
                    "measured_bytes": measured,
                    "error": estimated / measured - 1,
                    "seconds": seconds,
                }
            )
    for mode, cost in costs.items():
        print(shape.name, mode, cost, flush=True)


def main() -> None:
    """Measure every model that was asked for; rows of others stay in the file."""
    parser = command_line(__doc__)
    parser.add_argument("--models", default="qwen2.5-0.5b,qwen3-1.7b", help="by commas")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    needs_gpu()
    here, names = environment("cuda", ("triton", "transformers")), options.models.split(",")
    results = Rows(options.output, here, ("model", "modes", "part"))
    for name in names:
        measure(next(shape for shape in SHAPES if shape.name == name), results.add)
        release("cuda")


if __name__ == "__main__":
    main()
