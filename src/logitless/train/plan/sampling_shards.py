"""Over how many processes the copy that samples is sharded: what ``parallel.sampling_shards: auto`` stands for."""

from dataclasses import replace

import torch
from torch import nn

from logitless.distributed.arrangement import Arrangement
from logitless.distributed.ranks import Ranks
from logitless.train.assembly.model import policy_model
from logitless.train.assembly.process import device_of
from logitless.train.assembly.stages import Inputs
from logitless.train.plan.training_memory import memory_of_rank
from logitless.train.recipe.config import Recipe
from logitless.train.record.memory import size_text


def with_sampling_shards(
    recipe: Recipe, model: nn.Module, arrangement: Arrangement, room: int | None
) -> tuple[Recipe, str]:
    """The recipe with a number for ``parallel.sampling_shards: auto``, and the choice in words; empty without a choice.

    Weights that are not sharded need no copy. With ``rollout.engine: gpu`` the copy is whole on every process if it
    fits there beside all else, and else shared by all. ``auto`` takes that engine only if whole weights do not fit,
    which ``transformers`` would gather.

    Args:
        model: of ``policy_model``, not sharded, on any device, ``meta`` included.
        arrangement: of the processes.
        room: bytes of the smallest GPU; None: unknown, or without a limit.
    """
    engine = recipe.rollout.engine
    may = arrangement.is_sharded and (engine.bitwise or engine.choices is not None)
    if recipe.parallel.has_copy or not may:
        return recipe, ""
    whole = _with(recipe, 1) if engine.bitwise else recipe
    if room is None:
        return whole, "1, for no GPU here has a limit" if engine.bitwise else ""
    needed = memory_of_rank(whole, model, arrangement).peak_bytes
    if needed <= room:
        return whole, f"1, for {size_text(needed)} fit on a GPU" if engine.bitwise else ""
    found = _with(recipe, arrangement.world)
    shared = memory_of_rank(found, model, arrangement).peak_bytes
    why = f"with whole weights {size_text(needed)} would be needed on a GPU of {size_text(room)}"
    return found, f"{arrangement.world}, for {why}; so it is {size_text(shared)}"


def resolve_sampling_shards(inputs: Inputs, ranks: Ranks) -> tuple[Inputs, str]:
    """``with_sampling_shards`` for the GPUs of a run. A collective.

    Args:
        inputs: of the run.
        ranks: that train.
    """
    recipe, arrangement = inputs.recipe, inputs.arrangement
    if not arrangement.is_sharded or recipe.parallel.has_copy:
        return inputs, ""
    model = policy_model(recipe.model, inputs.tokenizer, seed=0, device=torch.device("meta"))
    rooms = [each for each in ranks.all_gather_object(room_of(device_of(recipe.model))) if each is not None]
    found, line = with_sampling_shards(recipe, model, arrangement, min(rooms, default=None))
    return replace(inputs, recipe=found), line


def room_of(device: torch.device) -> int | None:
    """Bytes that this process may allocate on a GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return int(total * torch.cuda.get_per_process_memory_fraction(device))


def _with(recipe: Recipe, number: int) -> Recipe:
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"sampling_shards": number})})
