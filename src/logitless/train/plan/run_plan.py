"""``--dry-run``: check everything, load the prompts, print the plan, train nothing.

The model is built on the meta device, so that an 8-billion-weight recipe can be planned on a laptop. Bytes of weights,
gradients and optimizer state are exact; activations and cache are estimates.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from logitless.distributed.arrangement import Arrangement
from logitless.errors import UnavailableError
from logitless.head.blockwise import default_budget
from logitless.models.value_head import ValueHead
from logitless.train.assembly.algorithm import value_head_of
from logitless.train.assembly.checks import check_before_start
from logitless.train.assembly.costly import costly_choices
from logitless.train.assembly.data import prompts_in_words
from logitless.train.assembly.engines import open_engines
from logitless.train.assembly.policies import centering_line, held_versions
from logitless.train.assembly.process import device_of
from logitless.train.assembly.stages import load, read
from logitless.train.assembly.teacher import layers_lines, teacher_line, teachers_on_meta
from logitless.train.optim.master_weights import master_weight
from logitless.train.plan.host_memory import host_memory
from logitless.train.plan.training_memory import (
    SAMPLER_WEIGHTS,
    TrainingMemory,
    kept_bytes,
    memory_of_rank,
    num_bytes,
    sampling_bytes,
)
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.precision import dtype_line
from logitless.train.record.memory import free_host_memory, size_lines, size_text
from logitless.train.record.writers import check_writers
from logitless.types import Prompt


@dataclass(frozen=True)
class Plan:
    """What a recipe will do.

    Args:
        completions_per_block: P * G.
        tokens_per_block: most scored tokens a block can have.
        steps_per_block: optimizer steps at that many tokens, over all epochs.
        steps: at most, over the run.
        memory_bytes: by part; names that end in "(estimate)" are not exact.
        host: host memory beside a GPU; empty under ``model.device: cpu``, where it is ``memory_bytes``.
        chosen: dtype, layers, engine and ``parallel.sampling: auto``, each with its reason; the teacher.
        warnings: choices that make the run more than twice as slow.
    """

    completions_per_block: int
    tokens_per_block: int
    steps_per_block: int
    steps: int
    memory_bytes: Mapping[str, int]
    host: TrainingMemory
    disk_bytes: Mapping[str, int]
    counts: Mapping[str, Mapping[str, int]]
    first_prompt: Prompt
    first_tokens: str
    chosen: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """All parts at once."""
        return sum(self.memory_bytes.values())


def plan_of(recipe: Recipe) -> Plan:
    """Check a recipe and plan it; needs the model's config, not its weights.

    Raises:
        LogitlessError: what a real start would raise before its first rollout.
    """
    inputs = read(recipe)
    check_writers(recipe.writers)
    loaded = load(inputs, device=torch.device("meta"))
    model, chosen = loaded.model, loaded.chosen
    check_before_start(recipe, inputs.data, model, inputs.tokenizer)
    value_head = value_head_of(recipe, inputs.algorithm, model)
    open_engines(chosen.recipe, model, inputs.tokenizer).close()
    rollout, train = recipe.rollout, recipe.train
    completions = rollout.prompts_per_block * rollout.completions_per_prompt
    tokens = completions * rollout.longest_completion
    steps = train.epochs_per_block * max(1, min(round(tokens / train.tokens_per_step), rollout.prompts_per_block))
    return Plan(
        completions_per_block=completions,
        tokens_per_block=tokens,
        steps_per_block=steps,
        steps=steps * train.blocks,
        memory_bytes=memory(recipe, model, value_head),
        host=host_memory(recipe, model, Arrangement()),
        disk_bytes=disk(recipe, model, value_head),
        counts=inputs.data.counts,
        first_prompt=inputs.data.train[0],
        first_tokens=str(inputs.tokenizer.decode(inputs.data.train[0].token_ids)),
        chosen=(
            dtype_line(recipe.model),
            f"layers {chosen.layers_line}",
            f"engine {chosen.engine_line}",
            *((f"parallel.sampling: {inputs.sampling_line}",) if inputs.sampling_line else ()),
            *(() if recipe.teacher is None else (teacher_line(recipe.teacher),)),
            *layers_lines(recipe, teachers_on_meta(recipe), inputs.arrangement),
            *centering_line(recipe),
        ),
        warnings=tuple(costly_choices(chosen, inputs.arrangement, device_of(recipe.model))),
    )


def memory(recipe: Recipe, model: nn.Module, value_head: ValueHead | None) -> dict[str, int]:
    """Bytes of a single process by part (``memory_of_rank``), as if all parts were held at the same time.

    No moment of a step holds all of them; the difference makes up for fragmentation. A resumed run holds no more: its
    checkpoint is read into this model, a tensor at a time.
    """
    alone = memory_of_rank(recipe, model, Arrangement(), value_head)
    end = alone.moments["end"]
    parts = {"trained weights": alone.always["trained weights"], "gradients": end["gradients"], **alone.always}
    parts |= {name: end[name] for name in ("autocast copies", "teacher", SAMPLER_WEIGHTS) if name in end}
    parts["activations or cache (estimate)"] = max(kept_bytes(recipe, model), sampling_bytes(recipe, model))
    parts["head"] = recipe.train.head_memory_budget or default_budget(device_of(recipe.model))
    return parts


def disk(recipe: Recipe, model: nn.Module, value_head: ValueHead | None = None) -> dict[str, int]:
    """Bytes of the run folder by part.

    A checkpoint holds trained weights, AdamW's two moments and, for score centering, earlier weights. While one is
    written, ``checkpoint.keep`` others exist, and under ``checkpoint.keep_best`` the best.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if value_head is not None:
        trained += list(value_head.parameters())
    size = num_bytes(map(master_weight, trained))
    rollout = recipe.rollout
    tokens = rollout.prompts_per_block * rollout.completions_per_prompt * rollout.longest_completion
    held = held_versions(recipe) * num_bytes(p for p in model.parameters() if p.requires_grad)
    parts = {"checkpoints": _most_checkpoints(recipe) * (3 * size + held), "model": size}
    if recipe.warm_start is not None:
        parts["warm start"] = size
    parts["rollouts (estimate)"] = 4 * tokens * recipe.train.blocks
    return parts


def _most_checkpoints(recipe: Recipe) -> int:
    """Most checkpoints on the disk at the same time."""
    return recipe.checkpoint.keep + 1 + (recipe.checkpoint.keep_best is not None)


def check_disk(recipe: Recipe, parts: Mapping[str, int], folder: Path) -> None:
    """Refuse a run that cannot write its folder, or would fill the disk before its last checkpoint.

    Args:
        parts: of ``disk``; estimates are left out.

    Raises:
        UnavailableError: too little is free, or nothing can be written there.
    """
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0
    needed = max(0, sum(size for name, size in parts.items() if not name.endswith("(estimate)")) - there)
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UnavailableError(
            needed=f"a folder to write {folder} in",
            given=f"{existing}, which {'cannot be written' if existing.is_dir() else 'is a file'}",
            remedy="Choose another `output`, or change its permissions.",
        )
    if needed > (free := shutil.disk_usage(existing).free):
        raise UnavailableError(
            needed=f"{size_text(needed)} at {folder} for {_most_checkpoints(recipe)} checkpoints and the weights",
            given=f"{size_text(free)} free",
            remedy="Free disk space, choose another `output`, or lower checkpoint.keep.",
        )


def _replaced(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The parts of the preset that the recipe replaces, each with its name, or its path if it is the user's own."""
    for name in ("ratio", "surrogate", "correction", "advantage", "weighting"):
        part = getattr(recipe.algorithm, name)
        if part is not None:
            yield name, str(getattr(part, "factory", None) or getattr(part, "name", "replaced"))


def _environment(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The environment's name, with the import path of a user's own; nothing for single turns."""
    options = recipe.rollout.environment
    if options is not None:
        own = getattr(options, "factory", None) or getattr(options, "function", None)
        yield "environment", options.name + (f" ({own})" if own else "")


def _host_lines(host: TrainingMemory) -> list[str]:
    """Lines about host memory at its peak, and whether this machine has as much."""
    parts = {**host.at_peak, "total": host.peak_bytes}
    lines = [f"  memory of the host beside a GPU, most while {host.fullest}", *size_lines(parts, max(map(len, parts)))]
    return [*lines, *_short_of_memory(host.peak_bytes)]


def _short_of_memory(needed: int) -> list[str]:
    free = free_host_memory()
    return [f"    more than is available here: {size_text(free)}"] if needed > free else []


def _tokens(plan: Plan) -> str:
    """How many the first prompt has, and what is left of it where its tokenizer drops or replaces characters."""
    number = f"{len(plan.first_prompt.token_ids)} tokens"
    is_whole = plan.first_prompt.text in plan.first_tokens
    return number if is_whole else f"{number}: its tokenizer reads {plan.first_tokens[:100]!r}"


def dry_run(recipe: Recipe) -> str:
    """The plan as text."""
    plan = plan_of(recipe)
    train, width = recipe.train, max(map(len, plan.memory_bytes))
    epochs = "1 epoch" if train.epochs_per_block == 1 else f"{train.epochs_per_block} epochs"
    lines = [
        f"recipe {recipe.name}: checked",
        *(f"  {line}" for line in (*plan.chosen, *plan.warnings)),
        f"  preset             {recipe.algorithm.preset}",
        *(f"  {name:18s} {words}" for name, words in (*_replaced(recipe), *_environment(recipe))),
        *(f"  {name:18s} {prompts_in_words(counts)}" for name, counts in plan.counts.items()),
        f"  first prompt       {plan.first_prompt.text[:100]!r} ({_tokens(plan)})",
        f"  a block            {recipe.rollout.prompts_per_block} prompts x {recipe.rollout.completions_per_prompt} "
        f"completions = {plan.completions_per_block}, at most {plan.tokens_per_block:,} scored tokens",
        f"  steps              at most {plan.steps_per_block} a block ({epochs}), {plan.steps:,} in {train.blocks:,} "
        "blocks",
        f"  micro-batch        {train.tokens_per_micro_batch:,} tokens",
        "  memory",
        *size_lines({**plan.memory_bytes, "total": plan.total_bytes}, width),
    ]
    if device_of(recipe.model).type == "cpu":
        lines += _short_of_memory(plan.total_bytes)
    is_for_gpu = device_of(recipe.model).type == "cuda" or recipe.train.optimizer.moments == "host"
    if plan.host.peak_bytes and is_for_gpu:
        lines += _host_lines(plan.host)
    lines += ["  disk", *size_lines(plan.disk_bytes, width)]
    try:
        check_disk(recipe, plan.disk_bytes, Path(recipe.output) / recipe.name)
    except UnavailableError as refused:
        lines.append(f"    a start here is refused: {refused}")
    return "\n".join(lines)
