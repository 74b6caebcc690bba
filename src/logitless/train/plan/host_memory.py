"""Host memory of a run on GPUs, counted from shapes, at each of its moments.

    reading the model   the model in the dtype that it is read in, until it is on the GPU: in each process, or, if it is
                        sharded from there, in the first one alone, with its master weights and its reference
    training            page-locked memory (master weights and optimizer state, the reference, inputs of layers), a
                        tensor that is copied for a checkpoint, and a teacher or earlier weights that wait on the host
    writing the model   page-locked memory, and the model as the first process writes it

Master weights and optimizer state are counted in whole pages, other page-locked memory in powers of two, as PyTorch
allocates it. Not counted: libraries (Python, PyTorch, CUDA) in each process, prompts and completions, workers of
rewards, and cached files, among them those of a model that is read in the dtype that it is stored in. A sharded model
is counted as read once, although every process may have to read it (``assembly.stages.load``).
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
from logitless.train.assembly.policies import held_versions, needs_start
from logitless.train.optim.locked_memory import locked_bytes
from logitless.train.optim.master_weights import master_weight
from logitless.train.plan.training_memory import (
    SAMPLER_WEIGHTS,
    TrainingMemory,
    layer_bytes,
    num_bytes,
    shard_bytes,
    teacher_bytes,
)
from logitless.train.recipe.config import Recipe

ROWS = 2
"""Packed rows whose inputs of layers are on the host: a row is launched while the one before it is still computed."""


def page_locked(size: int) -> int:
    """Bytes of page-locked memory that PyTorch allocates for ``size`` bytes: the next power of two.

    Example:
        >>> page_locked(5), page_locked(8), page_locked(0)
        (8, 8, 0)
    """
    return 1 << (size - 1).bit_length() if size else 0


def host_memory(recipe: Recipe, model: nn.Module, arrangement: Arrangement, *, processes: int = 1) -> TrainingMemory:
    """Host memory of all processes on the first one's machine.

    Args:
        recipe: checked. Under ``model.device: cpu`` the result is empty: there is no memory beside a GPU's.
        model: of ``policy_model``, not sharded yet, on any device, ``meta`` included.
    """
    if recipe.model.device == "cpu":
        return TrainingMemory({}, {"training": {}})
    trained = [p for p in model.parameters() if p.requires_grad]
    locked = _page_locked(recipe, model, arrangement, processes)
    copied = max((shard_bytes(master_weight(p), arrangement.weights) for p in trained), default=0)
    lora = recipe.model.lora is not None
    if recipe.teacher is not None and recipe.teacher.place == "host":
        locked["teacher"] = math.ceil(processes * teacher_bytes(recipe) / arrangement.weights)
    if recipe.algorithm.score_centering == "host":
        locked[SAMPLER_WEIGHTS] = processes * held_versions(recipe) * sum(page_locked(p.nbytes) for p in trained)
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
    """Bytes while the model is read. Weights are rounded, and adapters made, on the device that it is moved to."""
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
    if needs_start(recipe):  # a copy, whose weights get their dtype one after the other
        size = getattr(torch, section.dtype).itemsize
        reference = sum(p.numel() * max(p.element_size(), size) for p in parameters)
    return num_bytes(parameters) + masters + reference - mapped


def _page_locked(recipe: Recipe, model: nn.Module, arrangement: Arrangement, processes: int) -> dict[str, int]:
    """Page-locked bytes by part. They stay allocated until the run ends, for PyTorch keeps freed blocks."""
    section = recipe.model
    trained = [p for p in model.parameters() if p.requires_grad]
    found: dict[str, int] = {}
    if recipe.train.optimizer.moments == "host":
        # of one process: ``arrangement_of`` refuses several
        found["master weights and optimizer state, page-locked"] = 3 * sum(
            locked_bytes(master_weight(p).nbytes) for p in trained
        )
    on_host = arrangement.is_sharded and recipe.parallel.reference == "host"
    if on_host and needs_start(recipe):
        size = getattr(torch, section.dtype).itemsize
        shards = [shard_bytes(p, arrangement.weights) // p.element_size() * size for p in trained]
        found["reference, page-locked"] = processes * sum(map(page_locked, shards))
    if inputs := _input_bytes(recipe, model, arrangement):
        found["inputs of layers, page-locked (estimate)"] = processes * inputs
    return found


def _input_bytes(recipe: Recipe, model: nn.Module, arrangement: Arrangement) -> int:
    """Page-locked inputs of layers of a process: the choice of ``fit_activations``, from estimated costs."""
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
