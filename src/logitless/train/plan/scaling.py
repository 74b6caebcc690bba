"""``logitless plan RECIPE --gpus N``: memory of each process and bytes sent in a step, for any number of processes.

Both are counted from the recipe and the model's shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from logitless.distributed.arrangement import Arrangement
from logitless.models.lm_head import AttentionHeads, causal_lm
from logitless.models.value_head import ValueHead
from logitless.train.assembly.policies import head_traffic, scores_all_rows
from logitless.train.plan.host_memory import host_memory
from logitless.train.plan.training_memory import (
    TrainingMemory,
    memory_of_rank,
    memory_of_sampler,
    num_bytes,
    own_parameters,
    rows_of_step,
    tokens_of_step,
)
from logitless.train.recipe.config import Recipe
from logitless.train.record.memory import size_lines

MOMENTS = {
    "head": "the backward of the LM head",
    "layers": "the backward of the last layer",
    "end": "the end of a backward",
    "embedding": "the backward of the embedding",
    "sampling": "sampling",
}


@dataclass(frozen=True)
class ProcessForecast:
    """Memory and traffic of one of several processes.

    Args:
        processes: on one machine.
        host: host memory of all processes on a machine.
        sampler: bytes of a process that only samples, by part; empty without any.
        traffic_bytes: sent in an optimizer step, by cause.
        rows: micro-batches in a step.
        tokens: most tokens that a rank reads in a step.
    """

    arrangement: Arrangement
    memory: TrainingMemory
    processes: int
    host: TrainingMemory
    sampler: Mapping[str, int]
    traffic_bytes: Mapping[str, int]
    rows: int
    tokens: int


def forecast(
    recipe: Recipe,
    model: nn.Module,
    arrangement: Arrangement,
    *,
    value_head: ValueHead | None = None,
    processes: int | None = None,
) -> ProcessForecast:
    """Forecast memory and traffic of a recipe on several processes.

    Args:
        processes: on one machine; None: all.
    """
    tokens, rows = tokens_of_step(recipe, arrangement), rows_of_step(recipe, arrangement)
    head: Any = causal_lm(model).get_output_embeddings()
    all_rows = arrangement.is_sharded and scores_all_rows(recipe, arrangement, head.weight)
    memory = memory_of_rank(recipe, model, arrangement, value_head)
    processes = processes or arrangement.replicate * arrangement.weights
    host = host_memory(recipe, model, arrangement, processes=processes)
    if recipe.model.device == "cpu":
        host = TrainingMemory({"memory of its processes": processes * memory.peak_bytes}, host.moments)
    return ProcessForecast(
        arrangement,
        memory,
        processes,
        host,
        memory_of_sampler(recipe, model) if recipe.parallel.num_sampling else {},
        traffic_of_rank(
            model,
            arrangement,
            rows=rows,
            tokens_per_row=min(tokens, recipe.train.tokens_per_micro_batch),
            in_order=recipe.parallel.deterministic,
            all_rows=all_rows,
        ),
        rows,
        tokens // arrangement.sequence,
    )


def traffic_of_rank(
    model: nn.Module,
    arrangement: Arrangement,
    *,
    rows: int,
    tokens_per_row: int,
    in_order: bool = False,
    all_rows: bool = False,
) -> dict[str, int]:
    """Bytes that a rank sends in an optimizer step, by cause; the same for rings and trees.

    Args:
        model: not sharded yet, on any device.
        in_order: gradients are summed along a tree (``parallel.deterministic``): every rank gets those of all.
        all_rows: the LM head scores the tokens of all ranks together (``parallel.vocabulary``).
    """
    cut, copies, split = arrangement.weights, arrangement.replicate, arrangement.sequence
    own = own_parameters(model)
    gradients = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    if in_order:
        return {} if copies == 1 else {"gradients of copies": gradients * (copies - 1)}
    if not arrangement.is_sharded:
        return {} if copies == 1 else {"gradients of copies": 2 * gradients * (copies - 1) // copies}
    config: Any = causal_lm(model).config.get_text_config()
    head = own[-1] if len(own) > config.num_hidden_layers + 1 else own[config.num_hidden_layers]
    gathered = own[:-1] if len(own) > config.num_hidden_layers + 1 else own  # the LM head is not gathered
    weights = sum(map(num_bytes, gathered))
    reduced = 4 * sum(p.numel() for unit in gathered for p in unit if p.requires_grad)
    largest = max(head, key=lambda p: p.numel())
    number = largest.element_size()
    parts = {
        "weights, forward and backward": 2 * rows * weights * (cut - 1) // cut,
        "gradients of shards": rows * reduced * (cut - 1) // cut,
        "tokens for the LM head" if all_rows else "shards of the LM head": rows
        * head_traffic(largest, cut, tokens_per_row // split, number, all_rows=all_rows),
    }
    if copies > 1:
        parts["gradients of copies"] = 2 * rows * (reduced // cut) * (copies - 1) // copies
    if split > 1:
        heads = AttentionHeads.of(config)
        numbers = 2 * (heads.query + max(heads.key, split)) * heads.width * tokens_per_row // split
        passes = 3 if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()) else 2
        layers = config.num_hidden_layers
        parts["tokens for heads"] = rows * passes * layers * numbers * number * (split - 1) // split
    return parts


def forecast_text(recipe: Recipe, found: ProcessForecast, sampling: str, placement: Sequence[str]) -> str:
    """The forecast as text."""
    world = found.arrangement.replicate * found.arrangement.weights
    memory, host = ({**each.at_peak, "peak": each.peak_bytes} for each in (found.memory, found.host))
    width = max(map(len, [*memory, *host, *found.sampler, *found.traffic_bytes]))

    lines = [
        f"recipe {recipe.name} on {world} processes: {found.arrangement.words}",
        *([f"  parallel.sampling: {sampling}"] if sampling else []),
        *(f"  {line}" for line in placement),
        f"  a step reads about {found.tokens:,} tokens a process, in {found.rows} micro-batch{'es' * (found.rows > 1)}",
        f"  memory of each, at its fullest moment ({MOMENTS[found.memory.fullest]})",
        *size_lines(memory, width),
        *(["  memory of each that only samples"] if found.sampler else []),
        *size_lines(found.sampler, width),
        f"  memory of a machine's host, for all its processes ({found.processes}), most while {found.host.fullest}",
        *size_lines(host, width),
        "  sent by each in a step",
        *size_lines(found.traffic_bytes, width),
    ]
    return "\n".join(lines)
