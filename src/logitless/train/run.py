"""A run from its recipe: made anew, or continued from its latest checkpoint."""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.errors import ConfigurationError
from logitless.models.lora import frozen_copy
from logitless.models.value_head import ValueHead, save_value_head
from logitless.objective.algorithm import Algorithm
from logitless.rollout.transformers import TransformersSampler
from logitless.train.block import derived_seed
from logitless.train.checkpoint import load_checkpoint
from logitless.train.config import Recipe
from logitless.train.live_view import LiveView
from logitless.train.loop import Trainer
from logitless.train.optimizer import implementation
from logitless.train.policy import AdaptersOff, Policy, Scorer
from logitless.train.recipe import dump_recipe, load_recipe
from logitless.train.report import write_report
from logitless.train.run_folder import RunFolder, create_run_folder, open_run_folder, write_folder_atomically
from logitless.train.setup import (
    Data,
    algorithm_of,
    data_of,
    device_of,
    effects,
    policy_model,
    recorded_of,
    rewards_of,
    set_process,
    tokenizer_of,
    value_head_of,
    value_head_section,
)
from logitless.train.warm_start import warm_start
from logitless.train.writers import open_writers


def start(recipe: Recipe, *, numbered: bool = False, resume: bool = False) -> tuple[RunFolder, bool]:
    """Run a recipe, or continue it.

    Args:
        recipe: checked.
        numbered: where the name is taken, take ``name-2``, ``name-3``, ...
        resume: continue the run of this name from its latest checkpoint; the recipe must be the one it was started
            with, but for its number of blocks, its output folder, checkpoints and writers.

    Returns:
        The run folder, and whether the run is complete (False after Ctrl-C).

    Raises:
        LogitlessError: anything that is wrong with the recipe, the data, the model or the machine, and a run that
            cannot go on.
    """
    set_process(recipe.model, seed=derived_seed(recipe.seed, "process"))
    tokenizer = tokenizer_of(recipe.model)
    data = data_of(recipe, tokenizer)
    rewards = rewards_of(recipe, [*data.train, *data.held_out])
    algorithm = algorithm_of(recipe)
    recorded = recorded_of(recipe)
    root = Path(recipe.output)
    if resume:
        folder = open_run_folder(root / recipe.name)
        _check_same(load_recipe(folder.config), recipe)
        saved = load_checkpoint(folder.checkpoints)
        began = time.perf_counter()
        model = _model(recipe, tokenizer, folder.warm_start if folder.warm_start.exists() else None)
    else:
        saved, began = None, time.perf_counter()
        model = _model(recipe, tokenizer)
        folder = create_run_folder(root, recipe.name, unique=numbered)  # so late that a wrong recipe leaves none behind
    folder.write_config(dump_recipe(recipe))
    done = saved.state["progress"] if saved is not None else {"block": 0, "step": 0}
    with ExitStack() as stack:
        view = stack.enter_context(LiveView(recipe.train.blocks, first_block=done["block"], title=folder.path.name))
        writers = open_writers(
            recipe.writers,
            folder=folder.path,
            run_name=folder.path.name,
            config=recipe.model_dump(mode="json"),
            first_step=done["step"],
        )
        for writer in writers:
            stack.callback(writer.close)
        policy, reference = _policies(recipe, algorithm, tokenizer, data, folder, view, model)
        sampler = TransformersSampler(
            policy.model, tokenizer, max_rows=recipe.rollout.max_rows, autocast=policy.autocast
        )
        trainer = Trainer(
            recipe,
            algorithm,
            policy,
            reference,
            tokenizer,
            recorded or sampler,
            sampler,
            rewards,
            data,
            folder,
            view,
            writers,
        )
        view.message(f"optimizer AdamW ({implementation(trainer.optimizer)})")
        if saved is None:
            trainer.progress.seconds["start"] = time.perf_counter() - began
        else:
            trainer.restore(saved)
        complete = trainer.run()
    if complete:
        _export(policy, tokenizer, folder)
    folder.write_summary(trainer.summary())
    write_report(folder.path)
    return folder, complete


def _export(policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: RunFolder) -> None:
    """Leave what was trained in the formats that other programs read."""
    write_folder_atomically(folder.model, lambda path: policy.save(path, tokenizer))
    if policy.value_head is not None:
        save_value_head(policy.value_head, folder.value_head)


def _model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, weights: Path | None = None) -> nn.Module:
    section = recipe.model
    return policy_model(section, tokenizer, seed=recipe.seed, device=device_of(section), weights=weights)


def _policies(
    recipe: Recipe,
    algorithm: Algorithm,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    folder: RunFolder,
    view: LiveView,
    model: nn.Module,
) -> tuple[Policy, Scorer | None]:
    """The policy at its starting point or checkpoint, and the reference: the policy as reinforcement learning began."""
    section, warm = recipe.model, folder.warm_start

    def policy_of(model: nn.Module, value_head: ValueHead | None = None) -> Policy:
        autocast = None if section.autocast is None else getattr(torch, section.autocast)
        return Policy(model, autocast=autocast, memory_budget=recipe.train.head_memory_budget, value_head=value_head)

    for line in effects(section, device_of(section), model):
        view.message(line)
    if recipe.warm_start is not None and not warm.exists():
        view.phase("warm start")
        warm_start(
            policy_of(model), data.warm_start, tokenizer, recipe.warm_start, recipe.train, seed=recipe.seed, view=view
        )
        write_folder_atomically(warm, lambda path: policy_of(model).save(path, tokenizer))
        if section.lora is not None:  # merge what was learnt, start from a fresh adapter
            model = _model(recipe, tokenizer, warm)
    reference: Scorer | None = None
    if section.lora is None and recipe.kl is not None:
        reference = policy_of(frozen_copy(model, dtype=getattr(torch, section.dtype)))
    policy = policy_of(model, value_head_of(recipe, algorithm, model))
    if policy.value_head is not None:
        num_weights = sum(p.numel() for p in policy.value_head.parameters())
        factor = value_head_section(recipe).learning_rate_factor
        view.message(f"value head: {num_weights:,} weights, at {factor:g} times the learning rate")
    if section.lora is not None and recipe.kl is not None:
        reference = AdaptersOff(policy)
    return policy, reference


_MAY_CHANGE = {"output", "checkpoint", "writers"}


def _check_same(before: Recipe, now: Recipe) -> None:
    """A resumed run is the same run: only where and how often it is written may change, and how long it is."""

    def fixed(recipe: Recipe) -> dict[str, Any]:
        kept = {k: v for k, v in recipe.model_dump(mode="json").items() if k not in _MAY_CHANGE}
        kept["train"].pop("blocks")
        return kept

    old, new = fixed(before), fixed(now)
    changed = [f"{k}.{i}" for k in old for i in _changed(old[k], new[k])]
    if changed:
        raise ConfigurationError(
            needed="the recipe that the run was started with",
            given=f"another {', '.join(changed)}",
            remedy="Repeat the --set of the first start, or start a run of another name.",
        )


def _changed(old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [str(key) for key in {*old, *new} if old.get(key) != new.get(key)]
    return ["value"] if old != new else []
