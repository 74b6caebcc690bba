"""Checks of what an objective is given: choices that exist, and optional tensors that turn out to be obligatory."""

from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from logitless.errors import ConfigurationError, InputError

_REMEDIES = {
    "logp_old": "Score the batch with the policy that it was drawn from and set TokenBatch.logp_old",
    "logp_ref": "Score the batch with the reference policy and set TokenBatch.logp_ref",
    "logp_sampler": "Keep the log-probabilities of the engine that sampled and set TokenBatch.logp_sampler",
    "entropy": "Pass the entropy that the head gives beside logp",
    "entropy_old": "Keep the entropy of the scoring pass and set TokenBatch.entropy_old",
    "entropy_weight": "Set TokenBatch.entropy_weight to the step's Objective.entropy_weight(...)",
    "turn": "Set TokenBatch.turn",
    "value": "Score the batch with a policy that has a value head",
    "value_old": "Keep the values of the scoring pass and set TokenBatch.value_old",
    "value_target": "Set TokenBatch.value_target to that of advantage.Gae",
    "value_weight": "Set TokenBatch.value_weight to the step's objective.value.value_weight(...)",
    "scores": "Give the scores of each reward function in AdvantageInputs.scores",
    "weights": "Give the weights of the reward functions in AdvantageInputs.weights",
    "selected": "Attach the block's selection with Objective.block_statistics(block).attach(block)",
}


def required(value: Tensor | None, name: str) -> Tensor:
    """The tensor, or an error that names what is missing.

    Raises:
        InputError: the value is None.

    Example:
        >>> import torch
        >>> required(torch.ones(1), "logp_old")
        tensor([1.])
    """
    if value is None:
        raise InputError(
            needed=f"{name} for every token",
            given="None",
            remedy=f"{_REMEDIES[name]}, or choose an objective without it.",
        )
    return value


def check_choices(part: Any) -> None:
    """Refuse a value that its field's ``Literal`` does not list, for parts that are not read from a validated file.

    Raises:
        ConfigurationError: such a value.

    Example:
        >>> from logitless.objective.ratio import SequenceRatio
        >>> check_choices(SequenceRatio("mean"))
    """
    for name, hint in get_type_hints(type(part)).items():
        hints = [hint, *get_args(hint)]
        choices = [choice for each in hints if get_origin(each) is Literal for choice in get_args(each)]
        value = getattr(part, name)
        if choices and value is not None and value not in choices:
            raise ConfigurationError(
                needed=f"{name} out of {', '.join(map(repr, choices))}", given=repr(value), remedy="Choose one of them."
            )
