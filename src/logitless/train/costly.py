"""Choices of a recipe that cost more than a factor of two on this GPU, each with what to do about it.

On an H200, Qwen2.5-0.5B takes 4.1 times as long to train a step with transformers' layers under autocast as with
row-invariant ones, and 9.7 times as long to sample with transformers as with the GPU engine (docs/performance.md has
both with their result files).
"""

import torch
from torch import nn

from logitless.train.config import AutoEngineSection, Recipe, TransformersEngineSection
from logitless.train.engines import not_on_gpu_because
from logitless.train.precision import automatic_dtype
from logitless.train.setup import own_layers_because, runs_row_invariant

_PAGE = "docs/performance.md#what-the-defaults-save"
_STEP = f"a training step takes about 4 times and sampling about 10 times as long ({_PAGE})"
_SAMPLING = f"sampling takes about 10 times as long ({_PAGE})"


def costly_choices(recipe: Recipe, device: torch.device, model: nn.Module, *, is_split: bool = False) -> list[str]:
    """A warning for each choice that makes a run on a GPU more than twice as slow; none on a CPU.

    Args:
        recipe: resolved.
        device: that the run is on.
        model: of the recipe, on the device or on ``meta``.
        is_split: weights or sequences are split over processes, for which row-invariant layers and the GPU engine are
            not made.
    """
    engine = recipe.rollout.engine
    samples_here = isinstance(engine, AutoEngineSection | TransformersEngineSection)
    if device.type != "cuda":
        return []
    if is_split:
        remedy = (
            "parallel.replicate keeps weights whole on each process; rollout.engine: vllm_server samples elsewhere."
        )
        return [f"WARNING: weights or sequences are split over processes: {_SAMPLING}. {remedy}"] * samples_here
    if not runs_row_invariant(recipe.model, device, model):
        cause, remedy = _why_own_layers(recipe, device, model)
        return [f"WARNING: layers are not the row-invariant ones, for {cause}: {_STEP}. {remedy}"]
    if isinstance(engine, TransformersEngineSection):
        cause, remedy = "rollout.engine: transformers", "Leave rollout.engine out."
    elif isinstance(engine, AutoEngineSection) and (cause := not_on_gpu_because(recipe, model)):
        remedy = (
            "rollout.staleness: 0 samples with the GPU engine, in turns with training."
            if recipe.rollout.staleness > 0
            else "Leave train.scoring_backend, train.training_backend and an LM head in model.lora.targets out."
        )
    else:
        return []
    return [f"WARNING: transformers samples, for {cause}: {_SAMPLING}. {remedy}"]


def _why_own_layers(recipe: Recipe, device: torch.device, model: nn.Module) -> tuple[str, str]:
    """What keeps a model from row-invariant layers, and what to do."""
    section = recipe.model
    if section.layers not in ("auto", "row_invariant"):
        return f"model.layers: {section.layers}", "Leave model.layers out."
    cause = own_layers_because(section, model, device) or "this GPU's self-check found against them"
    held = "trained_dtype" if section.lora is None else "dtype"
    lowered = automatic_dtype(section.model_copy(update={"autocast": None}))[0] != "float32"
    keys = [key for key in ("autocast", "compile", "quantize") if getattr(section, key)]
    keys += ["attention"] * (section.attention != "packed")
    keys += [held] * (lowered and getattr(section, held) == "float32" and section.autocast is None)
    lora = section.lora
    keys += ["lora.dropout"] * (lora is not None and lora.dropout > 0)
    keys += ["lora.modules_to_save"] * (lora is not None and not {*lora.modules_to_save} <= {"lm_head"})
    if keys:
        needs = " where the GPU holds the base in 16 bits" if section.quantize else ""
        return cause, f"Leave {' and '.join(f'model.{key}' for key in keys)} out{needs}."
    return cause, "docs/bits.md lists what they cover; rollout.engine: vllm samples such a model faster."
