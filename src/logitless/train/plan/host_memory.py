"""What processes hold in the memory of their machine's host beside their GPUs, counted from shapes, moment by moment.

    reading the model   the model in the dtype that it is read in, until it is on the GPU: by each process, or, where it
                        is cut from there, by the first one alone, with its master weights and its reference
    training            what waits page-locked (master weights and optimizer state, the reference, inputs of layers),
                        and a tensor that is copied for a checkpoint
    writing the model   what is page-locked still, and the model as the first process writes it

Page-locked memory is counted as it is taken: master weights and optimizer state in whole pages, the rest as PyTorch
takes it. Not counted: libraries (Python, PyTorch, CUDA) in each process, prompts and completions, workers of rewards,
and files that the kernel keeps in memory until somebody else needs it: among them those of a model that is read in the
dtype that they have. A model that is cut is counted as read once, also where ``train.run`` finds that each process
has to.
"""

import math

import torch
from torch import nn

from logitless.distributed.arrangement import Arrangement
from logitless.errors import ConfigurationError
from logitless.models.activations import ActivationPlan, Cost, Mode
from logitless.models.lm_head import causal_lm
from logitless.models.loading import stored_dtype
from logitless.train.assembly.model import is_cut_from_host
from logitless.train.optim.locked_memory import locked_bytes
from logitless.train.optim.master_weights import master_weight
from logitless.train.plan.training_memory import TrainingMemory, has_reference, layer_bytes, num_bytes, shard_bytes
from logitless.train.recipe.config import Recipe

ROWS = 2
"""Packed rows whose inputs of layers wait on the host: a row is launched while the one before it is at work."""


def page_locked(size: int) -> int:
    """Bytes that PyTorch takes for so many of page-locked memory: the next power of two (its ``CachingHostAllocator``).

    Example:
        >>> page_locked(5), page_locked(8), page_locked(0)
        (8, 8, 0)
    """
    return 1 << (size - 1).bit_length() if size else 0


def host_memory(recipe: Recipe, model: nn.Module, arrangement: Arrangement, *, processes: int = 1) -> TrainingMemory:
    """The bytes of all processes on the machine of the first one, in its host's memory.

    Args:
        recipe: checked. On a CPU (``model.device``) everything is in the host's memory, and nothing beside it.
        model: of ``policy_model``, not sharded yet, on any device, ``meta`` included.
        arrangement: of all processes of the run.
        processes: of this machine.
    """
    if recipe.model.device == "cpu":
        return TrainingMemory({}, {"training": {}})
    trained = [p for p in model.parameters() if p.requires_grad]
    locked = _page_locked(recipe, model, arrangement, processes)
    copied = max((shard_bytes(master_weight(p), arrangement.weights) for p in trained), default=0)
    lora = recipe.model.lora is not None
    written = {"the adapter" if lora else "the model": num_bytes(trained if lora else model.parameters())}
    return TrainingMemory(
        {},
        {
            "reading the model": {"the model": _read_bytes(recipe, model, arrangement, processes)},
            "training": locked
            | {"a tensor on its way to a checkpoint": copied * (processes if arrangement.is_sharded else 1)},
            "writing the model": locked | written,
        },
    )


def _read_bytes(recipe: Recipe, model: nn.Module, arrangement: Arrangement, processes: int) -> int:
    """Weights that are trained are rounded, and adapters made, where the model is then: mostly on the GPU."""
    section, parameters, full = recipe.model, list(model.parameters()), recipe.model.lora is None
    read = [master_weight(p) for p in parameters if full or not p.requires_grad]
    stored = (
        None if section.random_weights else stored_dtype(section.source, trust_remote_code=section.trust_remote_code)
    )
    mapped = num_bytes(p for p in read if p.dtype == stored)
    if not is_cut_from_host(recipe, arrangement):
        return processes * (num_bytes(read) - mapped)
    masters = num_bytes(master_weight(p) for p in parameters if master_weight(p) is not p)
    reference = 0
    if has_reference(recipe):  # a copy, whose weights get their dtype one after the other
        size = getattr(torch, section.dtype).itemsize
        reference = sum(p.numel() * max(p.element_size(), size) for p in parameters)
    return num_bytes(parameters) + masters + reference - mapped


def _page_locked(recipe: Recipe, model: nn.Module, arrangement: Arrangement, processes: int) -> dict[str, int]:
    """By part; none of it is given back before the run ends: master weights and optimizer state are in use until then,
    and of the rest PyTorch keeps freed blocks for the next that asks."""
    section, engine = recipe.model, recipe.rollout.engine
    trained = [p for p in model.parameters() if p.requires_grad]
    found: dict[str, int] = {}
    if recipe.train.optimizer.moments == "host":
        # of one process: with several ``arrangement_of`` refuses them
        found["master weights and optimizer state, page-locked"] = 3 * sum(
            locked_bytes(master_weight(p).nbytes) for p in trained
        )
    on_host = arrangement.is_sharded and recipe.parallel.reference == "host"
    if on_host and has_reference(recipe):
        size = getattr(torch, section.dtype).itemsize
        shards = [shard_bytes(p, arrangement.weights) // p.element_size() * size for p in trained]
        found["reference, page-locked"] = processes * sum(map(page_locked, shards))
    if inputs := _input_bytes(recipe, model, arrangement):
        found["inputs of layers, page-locked (estimate)"] = processes * inputs
    if engine.sleeping_dtype is not None:
        size = getattr(torch, engine.sleeping_dtype).itemsize
        found["vLLM's weights while it sleeps (estimate)"] = size * sum(p.numel() for p in model.parameters())
    return found


def _input_bytes(recipe: Recipe, model: nn.Module, arrangement: Arrangement) -> int:
    """Of a process, by the choice that ``fit_activations`` makes from measured costs, here from estimated ones."""
    budget = recipe.train.activation_memory
    if budget is None:
        return 0
    config = causal_lm(model).config.get_text_config()  # type: ignore[union-attr, operator]
    number, num_layers = recipe.model.activation_bytes, config.num_hidden_layers
    tokens = math.ceil(recipe.train.tokens_per_micro_batch / arrangement.sequence)
    kept, made = layer_bytes(model, number)
    one = config.hidden_size * number
    again = kept + made
    costs: dict[Mode, Cost] = {"keep": Cost(kept, made), "recompute": Cost(one, again), "host": Cost(0, again)}
    try:
        plan = ActivationPlan.of(costs, num_layers=num_layers, num_tokens=tokens, budget=budget)
    except ConfigurationError:  # too little for what is estimated; what is measured may be less
        return ROWS * num_layers * page_locked(one * tokens)
    return ROWS * plan.counts["host"] * page_locked(one * tokens)
