"""Warnings about choices of a recipe that make it more than twice as slow on a GPU.

On an H200, Qwen2.5-0.5B takes 4.1 times as long to train a step with transformers' layers under autocast as with
row-invariant ones, and 9.7 times as long to sample with transformers as with the GPU engine. Qwen3-1.7B takes 2.1 to
2.3 times as long to train a step with moments in 8 bits or on the host, and 3.6 times as long if prompts are not
shared; SmolLM2-135M 4.2 times as long to train a row of 511 tokens without CUDA graphs. docs/performance.md has these
with their result files.
"""

from collections.abc import Iterator

import torch

from logitless.distributed.arrangement import Arrangement
from logitless.train.assembly.layers import in_words
from logitless.train.assembly.resolve import ENGINE, LAYERS, Resolved, against_whole
from logitless.train.recipe.config import Recipe

_PAGE = "docs/performance.md#what-the-defaults-save"
_STEP = f"a training step takes about 4 times and sampling about 10 times as long ({_PAGE})"
_SAMPLING = f"sampling takes about 10 times as long ({_PAGE})"


def costly_choices(chosen: Resolved, arrangement: Arrangement, device: torch.device) -> list[str]:
    """A warning for each choice that makes a run on a GPU more than twice as slow, with a remedy; none on a CPU.

    Args:
        chosen: resolved recipe of the run.
        arrangement: of its processes; sharded weights are trained with transformers' layers.
        device: of the policy.
    """
    if device.type != "cuda":
        return []
    return [f"WARNING: {each}" for each in (*_layers_and_engine(chosen, arrangement), *_settings(chosen.recipe))]


def _layers_and_engine(chosen: Resolved, arrangement: Arrangement) -> Iterator[str]:
    recipe = chosen.recipe
    has_layers, split = recipe.model.layers == "row_invariant", against_whole(recipe, arrangement)
    if (has_layers or split) and not recipe.rollout.engine.decodes_in_rounds:
        return
    what, key = ("transformers samples", ENGINE) if has_layers else ("layers are not the row-invariant ones", LAYERS)
    against = split or chosen.against.get(key)
    cause = f"{key}: transformers" if against is None else in_words(against)
    remedy = f"Leave {key} out." if against is None else " ".join(each.remedy for each in against)
    yield f"{what}, for {cause}: {_SAMPLING if has_layers or split else _STEP}. {remedy}"


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
    may_have_graphs = recipe.model.layers == "row_invariant" and not recipe.parallel.deterministic
    if not recipe.train.cuda_graphs and may_have_graphs:
        yield (
            "train.cuda_graphs: false: a training step of short rows of a small model takes up to 4 times as long "
            "(docs/performance.md#small-models-wait-for-the-cpu). Leave it out."
        )
