"""A fork: a new run that starts from a checkpoint of another one, with other keys.

It takes over weights, optimizer state, counts of blocks and steps, adaptive coefficients, and the position in the
prompts. With unchanged keys it is bitwise the run that it was forked from.

State that a changed key makes meaningless starts anew: the position in other prompts or under another seed, and the
coefficient of another KL or entropy bonus. A change of what the weights themselves depend on (``_FIXED``) is refused.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from logitless.errors import ConfigurationError
from logitless.objective.algorithm import Algorithm
from logitless.train.assembly.algorithm import algorithm_of
from logitless.train.collect.collector import Collector
from logitless.train.learn.learner import Learner
from logitless.train.recipe.changes import MOVED, Change, as_json, changes
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.loading import load_recipe
from logitless.train.record.provenance import digests_of
from logitless.train.record.run_folder import RunFolder, open_run_folder
from logitless.train.saved_policy import chosen_source
from logitless.train.store.atomic import write_folder_atomically
from logitless.train.store.checkpoint import Checkpoint, checkpoints, read_checkpoint

_FIXED = (*("model.source", "model.random_weights", "model.lora", "model.quantize"), "warm_start")
"""Keys that the trained weights, or under LoRA their frozen base, depend on."""


@dataclass(frozen=True)
class Parent:
    """The run and the checkpoint that a fork starts from.

    Args:
        checkpoint: at the end of one of its blocks.
    """

    folder: RunFolder
    recipe: Recipe
    checkpoint: Checkpoint

    @property
    def progress(self) -> Mapping[str, Any]:
        """Blocks and steps done, among others."""
        return dict(self.checkpoint.state["progress"])

    def as_json(self, recipe: Recipe) -> dict[str, Any]:
        """For ``provenance.json`` of a fork with this recipe."""
        place = {name: self.progress[name] for name in ("block", "step")}
        run = {"run": str(self.folder.path.absolute()), "checkpoint": self.checkpoint.folder.name}
        changed = [change for change in changes(self.recipe, recipe) if change.key not in ("name", "output")]
        return run | place | {"changed": as_json(changed)}

    def copy_warm_start(self, folder: RunFolder) -> None:
        """Copy the result of the parent's warm start to the fork, whose reference (and under LoRA whose base) it is."""

        def write(path: Path) -> None:
            shutil.copytree(self.folder.warm_start, path, dirs_exist_ok=True)

        if self.folder.warm_start.is_dir():
            write_folder_atomically(folder.warm_start, write)


def parent_of(named: str) -> Parent:
    """The run and the checkpoint that ``RUN`` or ``RUN:CHECKPOINT`` names.

    Args:
        named: a run folder, then a colon and a block's number or a checkpoint's name; without these, the latest
            checkpoint that was written at the end of a block.

    Raises:
        ConfigurationError: no such run or checkpoint, or one in the middle of a block.
        CheckpointError: its files are damaged.
    """
    run, colon, which = (named, "", "") if Path(named).is_dir() else named.rpartition(":")
    folder = open_run_folder(Path(run if colon else named))
    if which:
        found = read_checkpoint(_checkpoint(folder, which))
        if found.state["block"] is not None:
            raise _amid_a_block(found.folder.name)
        return Parent(folder, load_recipe(folder.config), found)
    there = checkpoints(folder.checkpoints)
    at_ends = (found for path in reversed(there) if (found := read_checkpoint(path)).state["block"] is None)
    latest = next(at_ends, None)
    if latest is None:
        raise _amid_a_block(", ".join(path.name for path in there) or "none")
    return Parent(folder, load_recipe(folder.config), latest)


def check_fork(parent: Parent, recipe: Recipe, algorithm: Algorithm) -> None:
    """Refuse a fork that the checkpoint's weights or optimizer state do not fit.

    Raises:
        ConfigurationError: a changed key of the model, the optimizer state or the value loss.
    """
    found = changes(parent.recipe, recipe)
    fixed = list(_FIXED)
    if recipe.model.random_weights:
        fixed.append("seed")  # of the frozen base and of the reference
    if recipe.model.lora is not None:
        fixed.append("model.dtype")
    refused = [change.words for change in found if change.is_below(fixed) and not change.is_below(MOVED)]
    moments = [r.train.optimizer.moments for r in (parent.recipe, recipe)]
    if moments.count("8bit") == 1:  # the state is the same on the device and on the host
        refused.append(Change(("train", "optimizer", "moments"), *moments).words)
    if refused:
        raise ConfigurationError(
            needed=f"the weights and the optimizer state of {parent.checkpoint.folder}",
            given=f"another {'; '.join(refused)}, with which they do not go",
            remedy="Leave these keys as in the other run's config.yaml, or start from its exported weights: "
            "logitless export RUN, then model.source.",
        )
    has_values = parent.checkpoint.has_values
    if has_values != (algorithm.value_loss is not None):
        raise ConfigurationError(
            needed=f"an algorithm {'with' if has_values else 'without'} a value loss, as that of {parent.folder.path}",
            given=f"algorithm.preset: {recipe.algorithm.preset}",
            remedy="Choose such an algorithm, or start from the other run's exported weights.",
        )


def carried(
    parent: Parent, recipe: Recipe, data: Mapping[str, str], learner: Learner, collector: Collector
) -> tuple[Checkpoint, list[str]]:
    """The checkpoint that the fork starts from, some of its state replaced by fresh, and lines that say which.

    Args:
        data: digests of the fork's data by name.
    """
    old, state, anew = parent.recipe, dict(parent.checkpoint.state), []
    before, now = algorithm_of(old), learner.algorithm
    controllers, fresh = dict(state["controllers"]), learner.controllers.state_dict()
    if (old.kl, before.kl_control) != (recipe.kl, now.kl_control):
        controllers |= {"kl": fresh["kl"], "kl_of_epoch": fresh["kl_of_epoch"]}
        anew.append("the KL coefficient (another kl)")
    if before.objective.entropy_bonus != now.objective.entropy_bonus:
        controllers["entropy"] = fresh["entropy"]
        anew.append("the entropy bonus's coefficient (another entropy_bonus)")
    other_data = digests_of(parent.folder).get("train") != data.get("train")
    if before.advantage != now.advantage and state.get("advantage"):
        state["advantage"] = {}
        anew.append("what the advantage remembers (another advantage)")
    if old.seed != recipe.seed or other_data or _changes_order(old, recipe):
        state["collector"] = collector.state_dict()
        anew.append("the place in the prompts (other data.train or another seed)")
    progress = dict(state["progress"])
    if old.train.tokens_per_micro_batch != recipe.train.tokens_per_micro_batch:
        progress["halvings"] = []
    state |= {
        "progress": progress,
        "controllers": controllers,
        "journal": {"lines": 0, "seconds": {}, "summary": {}},
        "loop": {**state["loop"], "block_metrics": {}, "unwritten": {}, "patience": None, "best": None},
    }
    done = f"{progress['block']} blocks and {progress['step']} steps"
    lines = [
        f"fork of {parent.folder.path}: begins after {done} with its weights, optimizer state, coefficients and place "
        "in the prompts"
    ]
    return replace(parent.checkpoint, state=state), lines + [f"begins anew: {'; '.join(anew)}"] * bool(anew)


def _changes_order(old: Recipe, new: Recipe) -> bool:
    """Whether ``data.train`` differs in more than paths, for example in the weights of a mixture."""
    return any(change.is_below(("data.train",)) and not change.is_below(MOVED) for change in changes(old, new))


def _checkpoint(folder: RunFolder, which: str) -> Path:
    path = chosen_source(folder, which)
    if path == folder.model:
        raise ConfigurationError(
            needed="a checkpoint to fork, with the optimizer's state",
            given="model/, which has weights alone",
            remedy="Name a block's number or a checkpoint, or set model.source to this folder in a new run.",
        )
    return path


def _amid_a_block(given: str) -> ConfigurationError:
    return ConfigurationError(
        needed="a checkpoint at the end of a block: a fork with other keys cannot finish a block that was begun with "
        "these",
        given=given,
        remedy="Name an earlier one as RUN:BLOCK, or finish the block with --resume.",
    )
