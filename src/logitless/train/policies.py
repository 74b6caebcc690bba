"""The policy of a recipe and what scores beside it, made alike for a run and for a forecast of one."""

import torch
from torch import nn

from logitless.models.activations import ActivationPlan, fit_activations
from logitless.models.lora import frozen_copy
from logitless.models.value_head import ValueHead
from logitless.objective.algorithm import Algorithm
from logitless.train.config import Recipe
from logitless.train.policy import AdaptersOff, Policy, Scorer
from logitless.train.setup import value_head_of


def policy_of(recipe: Recipe, model: nn.Module, value_head: ValueHead | None = None) -> Policy:
    """A model as the recipe has it scored and trained.

    Args:
        recipe: checked.
        model: of the recipe.
        value_head: on its last hidden states.
    """
    return Policy(
        model,
        autocast=None if recipe.model.autocast is None else getattr(torch, recipe.model.autocast),
        memory_budget=recipe.train.head_memory_budget,
        value_head=value_head,
        share_prompts=recipe.train.share_prompts,
    )


def policies_of(
    recipe: Recipe, algorithm: Algorithm, model: nn.Module
) -> tuple[Policy, Scorer | None, ActivationPlan | None]:
    """The policy; its reference as it is now, where the recipe has a KL; what layers keep, where it sets a limit.

    Args:
        recipe: checked.
        algorithm: of the recipe.
        model: that is trained.
    """
    policy = policy_of(recipe, model, value_head_of(recipe, algorithm, model))
    reference: Scorer | None = None
    if recipe.kl is not None and recipe.model.lora is not None:
        reference = AdaptersOff(policy)
    elif recipe.kl is not None:
        reference = policy_of(recipe, frozen_copy(model, dtype=getattr(torch, recipe.model.dtype)))
    plan: ActivationPlan | None = None
    if recipe.train.activation_memory is not None:  # after the reference, which is a copy and keeps nothing
        plan = fit_activations(
            model, num_tokens=recipe.train.tokens_per_micro_batch, budget=recipe.train.activation_memory
        )
    return policy, reference, plan
