"""Load the policy of a run from one of its checkpoints, or from ``model/`` of a finished run.

It is built as on ``--resume``: the recipe's model, then the warm start's weights, then the trained weights. Where the
run has written whole weights, those and the tokenizer beside them take the place of the recipe's, which may be gone.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from logitless.errors import CheckpointError, ConfigurationError
from logitless.models.export import adapter_tensors
from logitless.models.value_head import value_head_for
from logitless.rollout.transformers import TransformersEngine
from logitless.seeds import derived_seed
from logitless.train.assembly.engines import engine_here
from logitless.train.assembly.model import policy_model, tokenizer_of
from logitless.train.assembly.policies import policy_of
from logitless.train.assembly.process import device_of, set_process
from logitless.train.learn.policy import Policy
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.loading import load_recipe
from logitless.train.record.run_folder import RunFolder
from logitless.train.store.checkpoint import checkpoints, damaged, folder_name, read_checkpoint
from logitless.train.store.training_state import restore_parameters


@dataclass(frozen=True)
class SavedPolicy:
    """A policy loaded from a run folder.

    Args:
        recipe: the run's, with ``model`` as the policy is held now.
        source: the checkpoint or ``model/`` that it is from.
    """

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    policy: Policy
    source: Path
    block: int
    step: int

    def engine(self) -> TransformersEngine:
        """An engine in this process that samples with it."""
        engine = engine_here(self.recipe, self.policy.model, self.tokenizer)
        engine.load(self.policy.weights(), self.step)
        return engine


def load_policy(
    folder: RunFolder, which: str = "latest", *, device: str | None = None, exact: bool = False
) -> SavedPolicy:
    """Load a policy; sets up the process as for the run (``set_process``).

    On a GPU it has the recipe's layers. Elsewhere it has transformers' own, which compute the same but for rounding.

    Args:
        which: ``latest`` (checkpoint, or ``model/`` where no checkpoint is left), ``best`` (under
            ``checkpoint.keep_best``), ``model``, a checkpoint's block number or its folder's name.
        device: ``cpu``, ``cuda``, ...; None for the recipe's.
        exact: hold trained weights in float32, as the checkpoint does, even if the run computes in bfloat16.

    Raises:
        ConfigurationError: there is no such checkpoint, or the base model, tokenizer or warm start is missing.
        CheckpointError: its files are damaged.
    """
    recipe = load_recipe(folder.config)
    changes: dict[str, Any] = {"gradient_checkpointing": False, "compile": False}
    if device is not None:
        changes["device"] = device
    if exact:
        changes["trained_dtype"] = "float32"
        changes["quantize"] = None  # an adapter is merged into the base's own weights
    if exact or device_of(recipe.model.model_copy(update=changes)).type != "cuda":
        changes["layers"] = "transformers"
    section = recipe.model.model_copy(update=changes)
    recipe = recipe.model_copy(update={"model": section})
    source = chosen_source(folder, which)
    finished = source == folder.model
    set_process(section, seed=derived_seed(recipe.seed, "process"))
    whole = section.lora is None
    written = [folder.model, folder.warm_start] if whole else [folder.warm_start]
    weights = folder.model if finished and whole else next((each for each in written if _has_weights(each)), None)
    own_tokenizer = {"tokenizer": str(weights)} if whole and weights is not None else {}
    tokenizer = tokenizer_of(section.model_copy(update=own_tokenizer))
    model = policy_model(section, tokenizer, seed=recipe.seed, device=device_of(section), weights=weights).eval()
    if finished:
        if section.lora is not None:
            _read_adapter(model, folder.model)
        policy, progress = policy_of(recipe, model), _summary(folder)
    else:
        checkpoint = read_checkpoint(source)
        policy = policy_of(recipe, model, value_head_for(model, None) if checkpoint.has_values else None)
        restore_parameters(policy.held(), checkpoint.tensors)
        policy.round_master_weights()
        progress = checkpoint.state["progress"]
    return SavedPolicy(recipe, tokenizer, policy, source, int(progress["block"]), int(progress["step"]))


def _has_weights(path: Path) -> bool:
    """Whether a folder of a model is whole; one whose weights were deleted does not stand before the recipe's."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def chosen_source(folder: RunFolder, which: str) -> Path:
    """The checkpoint, or ``model/``, that ``which`` of ``load_policy`` names.

    Raises:
        ConfigurationError: there is none.
    """
    found = checkpoints(folder.checkpoints)
    is_finished = (folder.model / "config.json").is_file() or (folder.model / "adapter_config.json").is_file()
    if is_finished and (which == "model" or (which == "latest" and not found)):
        return folder.model
    if which == "latest" and found:
        return found[-1]
    if which == "best" and found and (best := _best(folder, found[-1])) is not None:
        which = folder_name(best["block"], best["step"])
    elif which == "best" and load_recipe(folder.config).checkpoint.keep_best is None:
        raise ConfigurationError(
            needed=f"checkpoint.keep_best in {folder.config}, for the checkpoint 'best'",
            given="a run without it, which keeps its latest checkpoints alone",
            remedy="Name latest, model or a block's number; set checkpoint.keep_best for the next run.",
        )
    if which.isdigit() and (of_block := [path for path in found if path.name.startswith(f"block-{int(which):06d}-")]):
        return of_block[-1]
    if named := [path for path in found if path.name == which]:
        return named[0]
    there = [path.name for path in found] + (["model"] if is_finished else [])
    raise ConfigurationError(
        needed=f"a checkpoint of {folder.path}: latest, best, model, the number of its block, or its name",
        given=f"{which!r}, and there are {', '.join(there) or 'none'}",
        remedy="Name one that is there; a recipe's checkpoint.every_blocks and keep say which are kept.",
    )


def _read_adapter(model: nn.Module, folder: Path) -> None:
    """Load the adapter of a finished run into the model's adapter."""
    path = folder / "adapter_model.safetensors"
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise damaged(folder, error) from error
    own = dict(adapter_tensors(model))
    if {name: tensor.shape for name, tensor in stored.items()} != {name: tensor.shape for name, tensor in own.items()}:
        raise CheckpointError(
            needed=f"the adapter that the recipe describes in {path}",
            given="another one",
            remedy="Bring back the config.yaml that the run wrote.",
        )
    for name, tensor in own.items():
        tensor.copy_(stored[name])


def _best(folder: RunFolder, last: Path) -> dict[str, Any] | None:
    """Block and step of the best evaluation; None if the run keeps none."""
    loop = read_checkpoint(last).state["loop"]
    best: dict[str, Any] | None = loop.get("best")
    if best is not None and loop.get("unwritten"):
        # A signal stopped the run amid an evaluation; one that was resumed and completed then exported the best.
        best = folder.read_summary().get("exported", best)
    return best


def _summary(folder: RunFolder) -> dict[str, int]:
    """Blocks and steps of a finished run."""
    try:
        found = json.loads(folder.summary.read_bytes())
        exported = found.get("exported") or {"block": found["blocks"], "step": found["steps"]}
        return {"block": int(exported["block"]), "step": int(exported["step"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            needed=f"blocks and steps of the finished run in {folder.summary}",
            given=f"{type(error).__name__}: {error}",
            remedy="Finish the run with --resume, or name a checkpoint.",
        ) from error
