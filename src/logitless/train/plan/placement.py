"""What ``parallel`` leaves to the GPUs: a copy of the weights on each or shards of one, and who samples with shards."""

from dataclasses import replace

import torch
from torch import nn

from logitless.distributed.arrangement import Arrangement
from logitless.distributed.ranks import Ranks
from logitless.train.assembly.checks import arrangement_of
from logitless.train.assembly.model import policy_model
from logitless.train.assembly.process import device_of
from logitless.train.assembly.resolve import GPU_RULES, Placed
from logitless.train.assembly.stages import Inputs
from logitless.train.plan.training_memory import memory_of_rank
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.rule import unmet
from logitless.train.record.memory import size_text

COPY_SHARE = 0.8
"""Of a GPU's memory that a process with all weights may need by the forecast, which is within a tenth of the truth."""


def placed(recipe: Recipe, model: nn.Module, arrangement: Arrangement, room: int | None) -> tuple[Recipe, list[str]]:
    """The recipe with copies of the weights, or with ``parallel.sampling_shards``, and the choice in words."""
    if room is None and recipe.parallel.shard == "auto" and arrangement.is_sharded:
        copy = memory_of_rank(recipe, model, Arrangement(replicate=arrangement.world)).peak_bytes
        return recipe, [f"parallel.shard: auto; a GPU has a copy if it can sample with it and holds {size_text(copy)}"]
    found, copies = with_copies(recipe, model, arrangement, room)
    if copies:
        return found, [f"parallel.replicate: {copies}"]
    found, shards = with_sampling_shards(recipe, model, arrangement, room)
    return found, [f"parallel.sampling_shards: {shards}"] if shards else []


def with_copies(recipe: Recipe, model: nn.Module, arrangement: Arrangement, room: int | None) -> tuple[Recipe, str]:
    """The recipe with a copy of the weights on each GPU for ``parallel.shard: auto``, and why; empty for shards.

    Copies have row-invariant layers and the engine ``gpu``; shards are trained with transformers' layers, which take
    four times as long for a step and ten times to sample (``costly.py``).
    """
    parallel = recipe.parallel
    is_free = parallel.shard == "auto" and parallel.vocabulary == "auto" and not parallel.has_copy
    is_free &= recipe.model.layers == "auto" and recipe.rollout.engine.choices is not None
    if not is_free or room is None or arrangement != Arrangement(shard=arrangement.world):
        return recipe, ""
    copies = parallel.model_copy(update={"shard": 1, "replicate": arrangement.world})
    found = recipe.model_copy(update={"parallel": copies})
    needed = memory_of_rank(found, model, Arrangement(replicate=arrangement.world)).peak_bytes
    if needed > COPY_SHARE * room or unmet(GPU_RULES, Placed(found, model)):
        return recipe, ""
    return found, f"{arrangement.world}, for with whole weights a GPU needs {size_text(needed)} of {size_text(room)}"


def with_sampling_shards(
    recipe: Recipe, model: nn.Module, arrangement: Arrangement, room: int | None
) -> tuple[Recipe, str]:
    """The recipe with a number for ``parallel.sampling_shards: auto``, and the choice in words; empty without a choice.

    Where training shards weights, the engine ``gpu`` samples with a copy: a whole one on each GPU where it fits, else
    one that all share. Without it transformers would gather whole weights, and take ten times as long.

    Args:
        model: of ``policy_model``, not sharded, on any device, ``meta`` included.
        room: bytes of the smallest GPU; None: unknown, or without a limit.
    """
    parallel, is_free = recipe.parallel, recipe.rollout.engine.choices is not None
    if parallel.num_sampling or parallel.has_copy or not is_free or not arrangement.is_sharded or room is None:
        return recipe, ""
    for number in (1, arrangement.world):
        found = recipe.model_copy(update={"parallel": parallel.model_copy(update={"sampling_shards": number})})
        if unmet(GPU_RULES, Placed(found, model)):
            return recipe, ""
        needed = memory_of_rank(found, model, arrangement).peak_bytes
        if needed <= COPY_SHARE * room:
            break
    else:  # the run may fit all the same, or ends and says what it needs
        if memory_of_rank(recipe, model, arrangement).peak_bytes <= room:
            return recipe, ""
    return found, f"{number}, for so a GPU needs {size_text(needed)} of {size_text(room)}"


def resolve_placement(inputs: Inputs, ranks: Ranks) -> tuple[Inputs, list[str]]:
    """``placed`` for the GPUs of a run. A collective."""
    recipe, arrangement = inputs.recipe, inputs.arrangement
    if not arrangement.is_sharded or device_of(recipe.model).type == "cpu":
        return inputs, []
    model = policy_model(recipe.model, inputs.tokenizer, seed=0, device=torch.device("meta"))
    room = min(ranks.all_gather_object(room_of(device_of(recipe.model))))
    recipe, lines = placed(recipe, model, arrangement, room)
    return replace(inputs, recipe=recipe, arrangement=arrangement_of(recipe, arrangement.world)), lines


def room_of(device: torch.device) -> int | None:
    """Bytes that this process may allocate on a GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(total * torch.cuda.get_per_process_memory_fraction(index))
