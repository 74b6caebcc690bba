"""Warnings about choices of a recipe that make it more than twice as slow on a GPU.

On an H200, Qwen2.5-0.5B takes 4.1 times as long to train a step with transformers' layers under autocast as with
row-invariant ones, and 9.7 times as long to sample with transformers as with the GPU engine (docs/performance.md has
both with their result files).
"""

import torch

from logitless.distributed.arrangement import Arrangement
from logitless.train.assembly.layers import in_words
from logitless.train.assembly.resolve import ENGINE, LAYERS, Resolved, against_whole

_PAGE = "docs/performance.md#what-the-defaults-save"
_STEP = f"a training step takes about 4 times and sampling about 10 times as long ({_PAGE})"
_SAMPLING = f"sampling takes about 10 times as long ({_PAGE})"


def costly_choices(chosen: Resolved, arrangement: Arrangement, device: torch.device) -> list[str]:
    """A warning if layers or engine make a run on a GPU more than twice as slow, with a remedy; none on a CPU.

    Args:
        chosen: resolved recipe of the run.
        arrangement: of its processes; sharded weights are trained with transformers' layers.
        device: of the policy.
    """
    recipe = chosen.recipe
    has_layers, split = recipe.model.layers == "row_invariant", against_whole(recipe, arrangement)
    if device.type != "cuda" or ((has_layers or split) and not recipe.rollout.engine.decodes_in_rounds):
        return []
    what, key = ("transformers samples", ENGINE) if has_layers else ("layers are not the row-invariant ones", LAYERS)
    against = split or chosen.against.get(key)
    cause = f"{key}: transformers" if against is None else in_words(against)
    remedy = f"Leave {key} out." if against is None else " ".join(each.remedy for each in against)
    return [f"WARNING: {what}, for {cause}: {_SAMPLING if has_layers or split else _STEP}. {remedy}"]
