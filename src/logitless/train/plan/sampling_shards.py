"""Over how many processes the copy that samples is sharded: what ``parallel.sampling_shards: auto`` stands for."""

from dataclasses import replace

import torch
from torch import nn

from logitless.distributed.arrangement import Arrangement
from logitless.distributed.ranks import Ranks
from logitless.train.assembly.model import policy_model
from logitless.train.assembly.process import device_of
from logitless.train.assembly.resolve import GPU_RULES, Placed
from logitless.train.assembly.stages import Inputs
from logitless.train.plan.training_memory import memory_of_rank
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.rule import unmet
from logitless.train.record.memory import size_text


def with_sampling_shards(
    recipe: Recipe, model: nn.Module, arrangement: Arrangement, room: int | None
) -> tuple[Recipe, str]:
    """The recipe with a number for ``parallel.sampling_shards: auto``, and the choice in words; empty without a choice.

    All processes share a copy where weights are sharded, ``rollout.engine: auto`` would have to gather more of them
    than fits on a GPU, and the engine ``gpu`` can run.

    Args:
        model: of ``policy_model``, not sharded, on any device, ``meta`` included.
        arrangement: of the processes.
        room: bytes of the smallest GPU; None: unknown, or without a limit.
    """
    parallel, is_free = recipe.parallel, recipe.rollout.engine.choices is not None
    if parallel.num_sampling or parallel.has_copy or not is_free or not arrangement.is_sharded or room is None:
        return recipe, ""
    needed = memory_of_rank(recipe, model, arrangement).peak_bytes
    if needed <= room:
        return recipe, ""
    shards = parallel.model_copy(update={"sampling_shards": arrangement.world})
    found = recipe.model_copy(update={"parallel": shards})
    if unmet(GPU_RULES, Placed(found, model)):  # the run may fit all the same, or ends and says what it needs
        return recipe, ""
    shared = memory_of_rank(found, model, arrangement).peak_bytes
    why = f"for {size_text(needed)} with whole weights do not fit into {size_text(room)}"
    return found, f"{arrangement.world}, {why}; so it is {size_text(shared)}"


def resolve_sampling_shards(inputs: Inputs, ranks: Ranks) -> tuple[Inputs, str]:
    """``with_sampling_shards`` for the GPUs of a run. A collective.

    Args:
        inputs: of the run.
        ranks: that train.
    """
    recipe, arrangement = inputs.recipe, inputs.arrangement
    if not arrangement.is_sharded or device_of(recipe.model).type == "cpu":
        return inputs, ""
    model = policy_model(recipe.model, inputs.tokenizer, seed=0, device=torch.device("meta"))
    room = min(ranks.all_gather_object(room_of(device_of(recipe.model))))
    found, line = with_sampling_shards(recipe, model, arrangement, room)
    return replace(inputs, recipe=found), line


def room_of(device: torch.device) -> int | None:
    """Bytes that this process may allocate on a GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(total * torch.cuda.get_per_process_memory_fraction(index))
