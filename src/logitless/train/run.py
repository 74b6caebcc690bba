"""A run from its recipe: made anew, or continued from its latest checkpoint."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.distributed.ranks import Ranks
from logitless.errors import ConfigurationError
from logitless.models.lora import frozen_copy
from logitless.models.value_head import ValueHead
from logitless.objective.algorithm import Algorithm
from logitless.rollout.environment import Environment, SingleTurn
from logitless.seeds import derived_seed
from logitless.train.checkpoint import load_checkpoint
from logitless.train.collector import Collector
from logitless.train.config import Recipe
from logitless.train.engines import Engines, open_engines
from logitless.train.evaluate import evaluation_of
from logitless.train.journal import Journal
from logitless.train.learner import Learner
from logitless.train.live_view import LiveView
from logitless.train.loop import Loop
from logitless.train.optimizer import implementation
from logitless.train.policy import AdaptersOff, Policy, Scorer
from logitless.train.recipe import dump_recipe, load_recipe
from logitless.train.report import write_report
from logitless.train.run_folder import RunFolder, create_run_folder, open_run_folder
from logitless.train.setup import (
    Data,
    algorithm_of,
    data_of,
    device_of,
    effects,
    policy_model,
    rewards_of,
    set_process,
    tokenizer_of,
    value_head_of,
    value_head_section,
)
from logitless.train.warm_start import warm_start
from logitless.train.writers import open_writers

OpenEngines: TypeAlias = Callable[[Recipe, nn.Module, PreTrainedTokenizerBase], Engines]


def start(
    recipe: Recipe,
    *,
    numbered: bool = False,
    resume: bool = False,
    open_engines: OpenEngines = open_engines,
    environment: Environment | None = None,
    ranks: Ranks = Ranks.alone(),
) -> tuple[RunFolder, bool]:
    """Run a recipe, or continue it.

    Args:
        recipe: checked.
        numbered: where the name is taken, take ``name-2``, ``name-3``, ...
        resume: continue the run of this name from its latest checkpoint; the recipe must be the one it was started
            with, but for its number of blocks, its output folder, checkpoints and writers.
        open_engines: what opens the engines, from the recipe, the model and its tokenizer; for engines that no recipe
            names.
        environment: what answers the policy; None for single turns.
        ranks: that train together; each calls this with the same recipe, and the first one writes.

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
    root = Path(recipe.output)
    if resume:
        folder = open_run_folder(root / recipe.name)
        _check_same(load_recipe(folder.config), recipe)
        saved = load_checkpoint(folder.checkpoints)
        began = time.perf_counter()
        model = _model(recipe, tokenizer, _warm_start(folder) if _warm_start(folder).exists() else None)
        engines = open_engines(recipe, model, tokenizer)
    else:
        saved, began = None, time.perf_counter()
        model = _model(recipe, tokenizer)
        engines = open_engines(recipe, model, tokenizer)
        folder = _new_folder(root, recipe.name, numbered, ranks)  # so late that a wrong recipe leaves none behind
    if ranks.is_first:
        folder.write_config(dump_recipe(recipe))
    done = saved.state["progress"] if saved is not None else {"block": 0, "step": 0}
    with ExitStack() as stack:
        stack.callback(engines.close)
        view = stack.enter_context(
            LiveView(recipe.train.blocks, first_block=done["block"], title=folder.path.name, silent=not ranks.is_first)
        )
        writers = open_writers(
            recipe.writers if ranks.is_first else (),
            folder=folder.path,
            run_name=folder.path.name,
            config=recipe.model_dump(mode="json"),
            first_step=done["step"],
        )
        for writer in writers:
            stack.callback(writer.close)
        policy, reference = _policies(
            recipe, algorithm, tokenizer, data, folder, view, model, saved.folder if saved else None, ranks
        )
        ranks.copy_of_first(policy.named_parameters().values())
        journal = Journal(folder, view, writers, policy.device, ranks)
        weights = {r.name: r.weight for r in rewards}
        learner = Learner(recipe, algorithm, policy, reference, reward_weights=weights, ranks=ranks)
        environment = environment or SingleTurn()
        collector = Collector(
            data.train, engines.training, environment, rewards, recipe.rollout, seed=recipe.seed, ranks=ranks
        )
        evaluation = evaluation_of(recipe, engines.evaluation, environment, data.held_out, rewards, ranks)
        loop = Loop(recipe, collector, learner, evaluation, journal, tokenizer)
        view.message(f"optimizer AdamW ({implementation(learner.optimizer)})")
        if saved is None:
            journal.seconds["start"] = time.perf_counter() - began
        else:
            loop.restore(saved)
        complete = loop.run()
    progress = learner.progress
    counts = {"blocks": progress.block, "steps": progress.step, "skipped_steps": progress.skipped}
    journal.write_summary({"name": recipe.name, **counts})
    if ranks.is_first:
        write_report(folder.path)
    return folder, complete


def _new_folder(root: Path, name: str, numbered: bool, ranks: Ranks) -> RunFolder:
    """The folder that the first rank makes."""
    made = create_run_folder(root, name, unique=numbered) if ranks.is_first else None
    return RunFolder(Path(ranks.of_first(None if made is None else str(made.path))))


def _warm_start(folder: RunFolder) -> Path:
    return folder.path / "warm_start"


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
    checkpoint: Path | None,
    ranks: Ranks,
) -> tuple[Policy, Scorer | None]:
    """The policy at its starting point or checkpoint, and the reference: the policy as reinforcement learning began."""
    section, warm = recipe.model, _warm_start(folder)

    def policy_of(model: nn.Module, value_head: ValueHead | None = None) -> Policy:
        autocast = None if section.autocast is None else getattr(torch, section.autocast)
        return Policy(model, autocast=autocast, memory_budget=recipe.train.head_memory_budget, value_head=value_head)

    for line in effects(section, device_of(section), model):
        view.message(line)
    if recipe.warm_start is not None and ranks.of_first(not warm.exists()):
        view.phase("warm start")
        warm_start(
            policy_of(model), data.warm_start, tokenizer, recipe.warm_start, recipe.train, seed=recipe.seed, view=view
        )
        if ranks.is_first:
            policy_of(model).save(warm, tokenizer)
        ranks.barrier()  # the others may read it now
        if section.lora is not None:  # merge what was learnt, start from a fresh adapter
            model = _model(recipe, tokenizer, warm)
    reference: Scorer | None = None
    if section.lora is None:
        if recipe.kl is not None:
            reference = policy_of(frozen_copy(model, dtype=getattr(torch, section.dtype)))
        if checkpoint is not None:
            model = _model(recipe, tokenizer, checkpoint / "model")
    policy = policy_of(model, value_head_of(recipe, algorithm, model, checkpoint))
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
