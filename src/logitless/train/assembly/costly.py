"""Warnings about choices of a recipe that make it more than twice as slow on a GPU.

On an H200, Qwen2.5-0.5B takes 4.1 times as long to train a step with transformers' layers under autocast as with
row-invariant ones, and 9.7 times as long to sample with transformers as with the GPU engine (docs/performance.md has
both with their result files).
"""

import torch

from logitless.train.assembly.resolve import ENGINE, LAYERS, SPLIT, Resolved

_PAGE = "docs/performance.md#what-the-defaults-save"
_STEP = f"a training step takes about 4 times and sampling about 10 times as long ({_PAGE})"
_SAMPLING = f"sampling takes about 10 times as long ({_PAGE})"


def costly_choices(chosen: Resolved, device: torch.device) -> list[str]:
    """A warning for each choice that makes a run on a GPU more than twice as slow, with a remedy; none on a CPU.

    Args:
        chosen: resolved recipe of the run.
    """
    recipe, because = chosen.recipe, chosen.because
    engine = recipe.rollout.engine
    samples_here = engine.samples_policy and not engine.bitwise
    if device.type != "cuda":
        return []
    if because.get(LAYERS) == SPLIT:
        remedy = (
            "parallel.replicate keeps weights whole on each process; rollout.engine: vllm_server samples elsewhere."
        )
        return [f"WARNING: {SPLIT}: {_SAMPLING}. {remedy}"] * samples_here
    if recipe.model.layers != "row_invariant":
        cause, remedy = _why_not_row_invariant(chosen)
        return [f"WARNING: layers are not the row-invariant ones, for {cause}: {_STEP}. {remedy}"]
    if not samples_here:
        return []
    cause = because.get(ENGINE, "rollout.engine: transformers")
    remedy = chosen.remedies.get(ENGINE, "Leave rollout.engine out.")
    return [f"WARNING: transformers samples, for {cause}: {_SAMPLING}. {remedy}"]


def _why_not_row_invariant(chosen: Resolved) -> tuple[str, str]:
    """Why a model does not have row-invariant layers, and the remedy."""
    section, cause = chosen.recipe.model, chosen.because.get(LAYERS)
    if cause is None:
        return f"model.layers: {section.layers}", "Leave model.layers out."
    remedies, lora = [chosen.remedies[LAYERS]], section.lora
    if lora is not None and lora.dropout > 0:
        remedies.insert(0, "Leave model.lora.dropout out.")
    if lora is not None and not {*lora.modules_to_save} <= {"lm_head"}:
        remedies.insert(0, "Leave model.lora.modules_to_save out.")
    return cause, " ".join(filter(None, remedies)) or "rollout.engine: vllm_server samples such a model faster."
