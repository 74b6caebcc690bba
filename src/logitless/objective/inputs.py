"""Checks of an objective's inputs: required tensors, options, shapes, and controllers' states."""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from torch import Tensor

from logitless.errors import CheckpointError, ConfigurationError, InputError

P = ParamSpec("P")
R = TypeVar("R")

_REMEDIES = {
    "logp_old": "Score the batch with the policy that it was sampled from and set TokenBatch.logp_old",
    "logp_ref": "Score the batch with the reference policy and set TokenBatch.logp_ref",
    "logp_sampler": "Keep the log-probabilities of the engine that sampled and set TokenBatch.logp_sampler",
    "entropy": "Pass the entropy that the head gives beside logp",
    "entropy_old": "Keep the entropy of the scoring pass and set TokenBatch.entropy_old",
    "entropy_weight": "Set TokenBatch.entropy_weight to the step's Objective.entropy_weight(...)",
    "turn": "Set TokenBatch.turn",
    "lag": "Set TokenBatch.lag, for example by pack(..., version=...)",
    "values": "Score the batch with a value head and set AdvantageInputs.values",
    "value": "Score the batch with a policy that has a value head",
    "value_old": "Keep the values of the scoring pass and set TokenBatch.value_old",
    "value_target": "Set TokenBatch.value_target to that of advantage.Gae",
    "value_weight": "Set TokenBatch.value_weight to the step's objective.value.value_weight(...)",
    "baseline": "Sample a greedy completion of each prompt and set AdvantageInputs.baseline to its reward",
    "sum_squares": "Score the batch with sum_squares=True and set AdvantageInputs.sum_squares",
    "scores": "Give the scores of each reward function in AdvantageInputs.scores",
    "weights": "Give the weights of the reward functions in AdvantageInputs.weights",
    "observed": "Pack the batch with observed=True and score it so",
    "selected": "Attach the block's selection with Objective.block_statistics(block).attach(block)",
}


def required(value: Tensor | None, name: str) -> Tensor:
    """The tensor; raises InputError, which names what is missing, if it is None."""
    if value is None:
        raise InputError(
            needed=f"{name} for every token",
            given="None",
            remedy=f"{_REMEDIES[name]}, or choose an objective without it.",
        )
    return value


def check_knobs(part: Any, *finite: str) -> None:
    """Refuse impossible values of a dataclass, for one that was not read from a validated recipe.

    Args:
        part: a dataclass.
        finite: names of the numbers that must not be infinite.

    Raises:
        ConfigurationError: a value that its field's ``Literal`` does not list, NaN, or an infinite one of ``finite``.
    """
    for name, hint in get_type_hints(type(part)).items():
        hints = [hint, *get_args(hint)]
        choices = [choice for each in hints if get_origin(each) is Literal for choice in get_args(each)]
        value = getattr(part, name)
        if choices and value is not None and value not in choices:
            raise ConfigurationError(
                needed=f"{name} out of {', '.join(map(repr, choices))}", given=repr(value), remedy="Choose one of them."
            )
        if isinstance(value, float) and (math.isnan(value) or (name in finite and math.isinf(value))):
            raise ConfigurationError(
                needed=f"a finite {name}" if name in finite else f"a number as {name}",
                given=str(value),
                remedy="Use the default, or any number in its place.",
            )


def known(value: Any, choices: Collection[Any], what: str) -> Any:
    """The value, if it is one of the choices.

    Raises:
        ConfigurationError: it is none of them; the message names the nearest.

    Example:
        >>> known("grpoo", ["grpo", "dapo"], "preset")
        Traceback (most recent call last):
        logitless.errors.ConfigurationError: needed a preset; given 'grpoo'. Did you mean 'grpo'?
    """
    if value not in choices:
        names = [str(choice) for choice in choices]
        small = {name.lower(): name for name in names}  # "GRPO" is like no name of small letters
        near = [small[name] for name in difflib.get_close_matches(str(value).lower(), small)]
        raise ConfigurationError(
            needed=f"{'an' if what[0] in 'aeiou' else 'a'} {what}",
            given=repr(value),
            remedy=f"Did you mean {near[0]!r}?" if near else f"Choose from {', '.join(names) or 'none'}.",
        )
    return value


def restore_state(controller: Any, state: Mapping[str, float], names: Sequence[str]) -> None:
    """Set these attributes of a controller from its ``state_dict``.

    Raises:
        CheckpointError: the state has other names.
    """
    if set(state) != set(names):
        raise CheckpointError(
            needed=f"a state of {type(controller).__name__} ({', '.join(names)})",
            given=", ".join(sorted(state)) or "an empty one",
            remedy="Load a checkpoint of this version.",
        )
    for name, value in state.items():
        setattr(controller, name, value)


def shaped(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: refuse tensors whose rank or length does not fit the annotations; equal letters are equal lengths.

    Without it [N, 1] and [N] would broadcast to [N, N], whose sum is a wrong loss.

    Example:
        >>> import torch
        >>> from jaxtyping import Float
        >>> @shaped
        ... def product(some: Float[Tensor, "N"], other: Float[Tensor, "N"]) -> Tensor:
        ...     return some * other
        >>> product(torch.ones(2), torch.ones(2))
        tensor([1., 1.])
        >>> product(torch.ones(2), torch.ones(2, 1))
        Traceback (most recent call last):
        logitless.errors.InputError: needed other [N] with N = 2; given a tensor [2, 1]. ...
    """
    names = tuple(inspect.signature(function).parameters)
    shapes = shapes_of(function.__annotations__)

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        check_shapes(dict(zip(names, args, strict=False)) | options, shapes)
        return function(*args, **options)

    return checked


def shapes_of(hints: Mapping[str, Any]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """The allowed shapes of each annotated tensor as tuples of letters; shapes with ``...`` or ``*`` are left out.

    Example:
        >>> from jaxtyping import Float
        >>> shapes_of({"rewards": Float[Tensor, "B F"], "group": Float[Tensor, "B"] | None, "clip": float})
        {'rewards': (('B', 'F'),), 'group': (('B',),)}
    """
    found = {}
    for name, hint in hints.items():
        letters = [each.dim_str for each in (get_args(hint) or (hint,)) if hasattr(each, "dim_str")]
        if name != "return" and letters and not any("*" in each or "..." in each for each in letters):
            found[name] = tuple(tuple(each.split()) for each in letters)
    return found


def check_shapes(values: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[str, ...], ...]]) -> None:
    """Raises InputError for the first tensor of another rank, or of another length than a tensor before it."""
    lengths: dict[str, int] = {}
    for name, allowed in shapes.items():
        value = values.get(name)
        if not isinstance(value, Tensor):
            continue
        fitting = [letters for letters in allowed if len(letters) == value.dim()]
        expected = fitting[0] if fitting else allowed[0]
        known = {letter: lengths[letter] for letter in expected if letter in lengths}
        if not fitting or any(value.shape[i] != known.get(each, value.shape[i]) for i, each in enumerate(expected)):
            where = " and ".join(f"{letter} = {length}" for letter, length in known.items())
            raise InputError(
                needed=f"{name} [{', '.join(expected)}]" + (f" with {where}" if known else ""),
                given=f"a tensor {list(value.shape)}",
                remedy="Give tensors of the documented ranks; squeeze(1) turns [N, 1] into [N].",
            )
        lengths |= dict(zip(expected, value.shape, strict=True))
