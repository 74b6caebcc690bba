"""Warnings about choices of a recipe that make it more than twice as slow on a GPU.

On an H200, Qwen2.5-0.5B takes 4.1 times as long to train a step with transformers' layers under autocast as with
row-invariant ones, and 9.7 times as long to sample with transformers as with the GPU engine. Qwen3-1.7B takes 2.1 to
2.3 times as long to train a step with moments in 8 bits or on the host, and 3.6 times as long if prompts are not
shared; SmolLM2-135M 4.2 times as long to train a row of 511 tokens without CUDA graphs. docs/performance.md has these
with their result files.
"""

from collections.abc import Iterator, Sequence

import torch

from logitless.distributed.arrangement import Arrangement
from logitless.errors import LogitlessError, UnavailableError
from logitless.installed import too_old, unused_gpu
from logitless.train.assembly.layers import in_words
from logitless.train.assembly.resolve import ENGINE, LAYERS, Resolved, against_whole
from logitless.train.recipe.config import Recipe

_PAGE = "(measured on an H200: docs/performance.md#what-the-defaults-save)"
_SAMPLING = f"sampling takes about 10 times as long {_PAGE}"


def costly_choices(chosen: Resolved, arrangement: Arrangement, device: torch.device) -> list[str]:
    """A warning for each choice that makes a run on a GPU more than twice as slow, with a remedy; on a CPU for a GPU
    that torch does not see.

    Args:
        chosen: resolved recipe of the run.
        arrangement: of its processes; sharded weights are trained with transformers' layers.
        device: of the policy.
    """
    if device.type != "cuda":
        unused = unused_gpu() if chosen.recipe.model.device == "auto" else ""
        return [f"WARNING: the device is the CPU: {unused}. With model.device: cpu nothing is said."] if unused else []
    faster = () if too_old(device) else (*_layers(chosen, arrangement), *_engine(chosen))
    return [f"WARNING: {each}" for each in (*faster, *_settings(chosen.recipe))]


def _layers(chosen: Resolved, arrangement: Arrangement) -> Iterator[str]:
    model, engine = chosen.recipe.model, chosen.recipe.rollout.engine
    split, key = against_whole(chosen.recipe, arrangement), "trained_dtype" if model.lora is None else "dtype"
    if model.layers == "row_invariant":
        if getattr(model, key) == "float32":
            yield (
                f"model.{key}: float32: row-invariant layers are slow in it, for tensor cores do not multiply it, and "
                f"docs/bits.md promises nothing for it. Leave model.{key} out."
            )
        return
    if split and not engine.decodes_in_rounds:
        return
    cause, remedy = _cause(LAYERS, split or chosen.against.get(LAYERS))
    if engine.decodes_in_rounds and not _can_have_layers(chosen):
        remedy += " rollout.engine: {name: vllm_server} samples faster."
    sampling = " and sampling about 10 times" if engine.samples_policy else ""
    cost = _SAMPLING if split else f"a training step takes about 4 times{sampling} as long {_PAGE}"
    yield f"layers are not the row-invariant ones, for {cause}: {cost}. {remedy}"


def _engine(chosen: Resolved) -> Iterator[str]:
    against, has_layers = chosen.against.get(ENGINE), chosen.recipe.model.layers == "row_invariant"
    is_named = against is None and _can_have_layers(chosen)
    if chosen.recipe.rollout.engine.decodes_in_rounds and (has_layers or is_named):
        cause, remedy = _cause(ENGINE, against)
        yield f"transformers samples, for {cause}: {_SAMPLING}. {remedy}"


def _cause(key: str, against: Sequence[LogitlessError] | None) -> tuple[str, str]:
    """Why a key is ``transformers``, and the remedy; ``against`` is None where the recipe says so."""
    if against is None:
        return f"{key}: transformers", f"Leave {key} out."
    return in_words(against), " ".join(each.remedy for each in against)


def _can_have_layers(chosen: Resolved) -> bool:
    """Whether another recipe would give this model row-invariant layers on this GPU."""
    return not any(isinstance(each, UnavailableError) for each in chosen.against.get(LAYERS, ()))


def _settings(recipe: Recipe) -> Iterator[str]:
    moments = recipe.train.optimizer.moments
    if moments != "float32" and recipe.model.lora is None:
        yield (
            f"train.optimizer.moments: {moments}: a training step can take more than twice as long "
            "(docs/performance.md#where-the-optimizers-numbers-are). Leave it out where the GPU holds 18 bytes "
            "a weight."
        )
    if not recipe.train.share_prompts and recipe.rollout.completions_per_prompt > 1:
        yield (
            "train.share_prompts: false: a training step can take more than three times as long "
            "(docs/performance.md#what-a-step-does-not-compute). Leave it out."
        )
    without_graphs = ["train.cuda_graphs: false"] * (not recipe.train.cuda_graphs)
    without_graphs += ["parallel.deterministic: true"] * recipe.parallel.deterministic
    if without_graphs and recipe.model.layers == "row_invariant":
        yield (
            f"{', '.join(without_graphs)}: without CUDA graphs a training step of short rows of a small model takes up "
            "to 4 times as long (docs/performance.md#small-models-wait-for-the-cpu). Leave it out."
        )
