"""The algorithm of a recipe, and its value head."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from logitless.models.value_head import ValueHead, value_head_for
from logitless.objective.algorithm import Algorithm
from logitless.objective.distillation import Distillation
from logitless.objective.own import OwnAdvantage, OwnSurrogate
from logitless.objective.presets import algorithm
from logitless.train.recipe.algorithm import COMPOSED_RULES, value_head_section
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.rule import Composed, check

logger = logging.getLogger("logitless")


def algorithm_of(recipe: Recipe) -> Algorithm:
    """The preset of a recipe with the parts that the recipe replaces, its KL and its completion length.

    Raises:
        ConfigurationError: an unknown preset, unknown parameters, parts that do not go together, or a part of the
            user's own that fails its trial.
    """
    section = recipe.algorithm
    preset = algorithm(section.preset, section.parameters)
    parts: dict[str, Any] = {
        name: value.made() if isinstance(value, OwnSurrogate) else value
        for name in ("ratio", "surrogate", "filters", "correction", "entropy_bonus")
        if (value := getattr(section, name)) is not None
    }
    advantage = section.advantage or preset.advantage
    kl = recipe.kl
    penalty = kl.penalty if kl is not None and kl.placement == "loss" else None
    teacher = recipe.teacher
    weighting = section.weighting or preset.weighting
    found = replace(
        preset,
        objective=replace(preset.objective, **parts, kl=penalty, score_centering=section.score_centering is not None),
        advantage=advantage.made() if isinstance(advantage, OwnAdvantage) else advantage,
        weighting=weighting.for_rollouts_of(recipe.rollout.longest_completion),
        value_loss=section.value_loss or preset.value_loss,
        kl_control=None if kl is None else kl.control,
        kl_in_reward=kl is not None and kl.placement == "reward",
        drop_truncated=recipe.train.drop_truncated or preset.drop_truncated,
        distillation=None
        if teacher is None
        else Distillation(
            0.0 if teacher.divergence is None else teacher.weight, teacher.advantage, teacher.alone, teacher.gamma
        ),
    )
    found.check_completions(recipe.rollout.completions_per_prompt)
    check(COMPOSED_RULES, Composed(recipe, found))
    for note in found.notes:
        logger.info("algorithm: %s", note)
    if recipe.rollout.sampling.filters_distribution and found.objective.correction is None:
        logger.warning(
            "rollout.sampling: tokens are drawn from something else than the policy at its temperature (top_p, top_k, "
            "min_p, a repetition penalty or temperature 0), which the loss does not see; leave them out to be on policy"
        )
    return found


def value_head_of(recipe: Recipe, algorithm: Algorithm, model: nn.Module) -> ValueHead | None:
    """The value head that an algorithm with a value loss starts from; None for any other.

    Args:
        recipe: names a file to start from, or none.
        model: the policy's.

    Raises:
        ConfigurationError: the file holds no value head that fits the model.
    """
    if algorithm.value_loss is None:
        return None
    source = value_head_section(recipe).source
    return value_head_for(model, None if source is None else Path(source))
