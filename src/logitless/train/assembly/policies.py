"""The policy of a recipe and its reference, for a run and for a forecast of one."""

import math

import torch
from torch import nn

from logitless.distributed.arrangement import Arrangement
from logitless.models.activations import ActivationPlan, fit_activations
from logitless.models.lora import frozen_copy
from logitless.models.value_head import ValueHead
from logitless.objective.algorithm import Algorithm
from logitless.train.assembly.algorithm import value_head_of
from logitless.train.assembly.process import autocast_of
from logitless.train.learn.policy import AdaptersOff, Policy, Scorer
from logitless.train.learn.sampler_weights import SamplerWeights
from logitless.train.recipe.config import Recipe
from logitless.train.recipe.teacher import START


def policy_of(recipe: Recipe, model: nn.Module, value_head: ValueHead | None = None) -> Policy:
    """A policy with the recipe's settings around a model.

    Args:
        value_head: for an algorithm with a value loss.
    """
    return Policy(
        model,
        autocast=autocast_of(recipe.model),
        memory_budget=recipe.train.head_memory_budget,
        value_head=value_head,
        share_prompts=recipe.train.share_prompts,
    )


def policies_of(
    recipe: Recipe, algorithm: Algorithm, model: nn.Module
) -> tuple[Policy, Scorer | None, ActivationPlan | None]:
    """The policy; its frozen copy, for a KL or as a teacher, or None; the activation plan if the recipe sets a limit.

    Args:
        model: that is trained.
    """
    policy = policy_of(recipe, model, value_head_of(recipe, algorithm, model))
    reference: Scorer | None = None
    if recipe.reads_reference and recipe.model.lora is not None:
        reference = AdaptersOff(policy)
    elif needs_start(recipe):
        reference = policy_of(recipe, frozen_copy(model, dtype=getattr(torch, recipe.model.dtype)))
    plan: ActivationPlan | None = None
    if recipe.train.activation_memory is not None:  # after the reference was copied, which keeps no activations
        plan = fit_activations(
            model, num_tokens=recipe.train.tokens_per_micro_batch, budget=recipe.train.activation_memory
        )
    return policy, reference, plan


def needs_start(recipe: Recipe) -> bool:
    """Whether a frozen copy of the policy is kept, as the reference or as a teacher; LoRA's needs no copy."""
    is_teacher = recipe.teacher is not None and recipe.teacher.has(START)
    return recipe.model.lora is None and (recipe.reads_reference or is_teacher)


def sampler_weights_of(recipe: Recipe, policy: Policy) -> SamplerWeights | None:
    """What holds the weights of earlier versions for score centering; None without it."""
    place = recipe.algorithm.score_centering
    return None if place is None else SamplerWeights(policy, place=place, most=held_versions(recipe))


def held_versions(recipe: Recipe) -> int:
    """Most versions of the weights that are held for score centering, those of the current block included."""
    return 0 if recipe.algorithm.score_centering is None else recipe.rollout.staleness + 1


def centering_line(recipe: Recipe) -> tuple[str, ...]:
    """What is held for score centering, in words; nothing without it."""
    place, number = recipe.algorithm.score_centering, held_versions(recipe)
    return () if place is None else (f"score centering: the last {number} versions of the weights, on the {place}",)


def scores_all_rows(recipe: Recipe, arrangement: Arrangement, weight: torch.Tensor) -> bool:
    """Whether a sharded LM head scores the tokens of all ranks together (``parallel.vocabulary``).

    Under ``auto``, if that sends fewer bytes for the largest micro-batch (``head_traffic``).

    Args:
        arrangement: of its processes.
        weight: of the LM head, sharded or not yet.
    """
    chosen = recipe.parallel.vocabulary
    if chosen != "auto" or arrangement.replicate > 1:
        return chosen == "all_rows"
    cut, tokens = arrangement.weights, math.ceil(recipe.train.tokens_per_micro_batch / arrangement.sequence)
    if cut == 1:
        return False
    number = min(weight.element_size(), getattr(torch, recipe.model.trained_dtype).itemsize)
    return head_traffic(weight, cut, tokens, number, all_rows=True) < head_traffic(
        weight, cut, tokens, number, all_rows=False
    )


def head_traffic(weight: torch.Tensor, cut: int, tokens: int, number: int, *, all_rows: bool) -> int:
    """Bytes that a rank sends for a sharded LM head in the forward and backward of a micro-batch.

    ``own_rows``: every shard travels twice, and its float32 gradient once. ``all_rows``: hidden states go to all ranks,
    and their float32 gradients are summed over all.

    Args:
        weight: [V, D], trained or not.
        cut: number of shards.
        tokens: N, of each rank.
        number: bytes of a number in products.
        all_rows: count ``all_rows``; else ``own_rows``.

    Example:
        >>> weight = torch.zeros(100, 8)
        >>> [head_traffic(weight, 2, 10, 2, all_rows=way) for way in (False, True)]
        [1600, 800]
    """
    if all_rows:
        return tokens * weight.shape[1] * (number + 8) * (cut - 1)
    return weight.numel() * (2 * number + (4 if weight.requires_grad else 0)) * (cut - 1) // cut
