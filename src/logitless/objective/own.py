"""A user's surrogate or advantage, by its import path, tried on a few numbers before training.

The code runs in the trainer's process. The trial checks that numbers are finite, that there is a gradient, and that
advantages have the level they state; shapes are checked at every call.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch

from logitless.errors import ConfigurationError, LogitlessError
from logitless.objective.advantage import AdvantageInputs, Estimator
from logitless.objective.objective import Objective
from logitless.objective.ranges import Level
from logitless.objective.surrogate import PolicyLoss
from logitless.objective.surrogate.policy_loss import RatioLevel
from logitless.own_code import described, made
from logitless.types import TokenBatch

_LENGTHS = (1, 3, 4, 2)
"""Tokens of each trial sequence; two sequences a prompt."""


@dataclass(frozen=True, kw_only=True)
class _Own:
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    name: Literal["own"] = "own"
    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OwnSurrogate(_Own):
    """A surrogate of yours, by its import path; it runs in the trainer's process, with your rights.

    Args:
        factory: `package.module:name`, or `./file.py:name` beside the recipe; returns a `PolicyLoss`
            (docs/extending.md).
        options: keyword arguments of the factory.

    Example:
        >>> OwnSurrogate(factory="logitless.objective.surrogate:Clip", options={"ratio_max": 1.5}).made().ratio_max
        1.5
    """

    def made(self) -> PolicyLoss:
        """The surrogate.

        Raises:
            ConfigurationError: it cannot be imported or made, raises, or gives a loss of another shape, that is not
                finite or has no gradient through ``logp``.
        """
        key = "algorithm.surrogate.factory"
        surrogate = made(self.factory, self.options, what="a surrogate", key=key)
        _require(isinstance(surrogate, PolicyLoss), "a PolicyLoss", type(surrogate).__name__, self.factory)
        with _naming_factory(self.factory, self.options):
            check_surrogate(surrogate, self.factory)
        return surrogate  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class OwnAdvantage(_Own):
    """An advantage of yours, by its import path; it runs in the trainer's process, with your rights.

    Args:
        factory: `package.module:name`, or `./file.py:name` beside the recipe; returns an `Estimator`
            (docs/extending.md).
        options: keyword arguments of the factory.

    Example:
        >>> OwnAdvantage(factory="logitless.objective.advantage:GroupCentered", options={"clip": 2.0}).made().clip
        2.0
    """

    def made(self) -> Estimator:
        """The estimator.

        Raises:
            ConfigurationError: it cannot be imported or made, raises, or gives advantages of another shape, that are
                not finite, not 0 for an unscored completion, or that vary below its ``level``.
        """
        estimator = made(self.factory, self.options, what="an advantage", key="algorithm.advantage.factory")
        _require(isinstance(estimator, Estimator), "an Estimator", type(estimator).__name__, self.factory)
        with _naming_factory(self.factory, self.options):
            check_estimator(estimator, self.factory)
        return estimator  # type: ignore[no-any-return]


def check_surrogate(surrogate: PolicyLoss, factory: str) -> None:
    """Try a surrogate at ratios of 1 and around 1.

    Args:
        surrogate: the user's.
        factory: its name in errors.

    Raises:
        ConfigurationError: no such ``reads`` or ``level``, a loss or a gradient that is not finite, or no gradient
            at all.
        InputError: a loss of another shape, or a ratio that it reads against its ``reads``.
    """
    for attribute, choices in (("reads", get_args(RatioLevel)), ("level", get_args(Level))):
        given = getattr(surrogate, attribute)
        _require(given in choices, f"`{attribute}` to be one of {', '.join(choices)}", repr(given), factory)
    sequence = torch.arange(len(_LENGTHS)).repeat_interleave(torch.tensor(_LENGTHS))
    generator = torch.Generator().manual_seed(0)
    size = len(sequence)
    logp_old = -2 * torch.rand(size, generator=generator)
    batch = TokenBatch(
        sequence=sequence,
        num_sequences=len(_LENGTHS),
        advantage=torch.tensor([1.0, -1.0, 0.5, -0.5])[sequence],
        token_weight=torch.full((size,), 1 / size),
        logp_old=None if surrogate.reads == "none" else logp_old,
        logp_ref=logp_old if surrogate.reads_reference else None,
    )
    objective, has_gradient = Objective(surrogate=surrogate), False
    block = objective.block_statistics(batch, generator=generator)
    batch = batch if block is None else block.attach(batch)
    for spread in (0.0, 0.1):
        logp = logp_old + spread * (2 * torch.rand(size, generator=generator) - 1)
        output = objective(logp.requires_grad_(), None, batch, block=block, generator=generator)
        assert output.grad_logp is not None
        for what, values in (("loss", output.token_loss), ("gradient", output.grad_logp)):
            wrong = int((~values.isfinite()).sum())
            _require(wrong == 0, f"a finite {what} for each token", f"{wrong} of {size} that are not", factory)
        has_gradient = has_gradient or bool(output.grad_logp.count_nonzero())
    _require(has_gradient, "a loss that is differentiable in logp", "no gradient for any token", factory)


def check_estimator(estimator: Estimator, factory: str) -> None:
    """Try an estimator on two prompts with two completions each, one of them unscored.

    Args:
        estimator: the user's.
        factory: its name in errors.

    Raises:
        ConfigurationError: advantages that are not finite, not 0 for the unscored completion, or that vary below
            ``level``.
        InputError: advantages of another shape.
    """
    sequence = torch.arange(len(_LENGTHS)).repeat_interleave(torch.tensor(_LENGTHS))
    rewards = torch.tensor([0.0, 1.0, 2.0, float("nan")])
    inputs = AdvantageInputs(
        rewards=rewards,
        group=torch.tensor([0, 0, 1, 1]),
        sequence=sequence,
        turn=torch.zeros_like(sequence),
        scores=rewards[:, None],
        weights=torch.ones(1),
        values=torch.linspace(0, 1, len(sequence)) if estimator.needs_values else None,
        logp_old=torch.full((len(sequence),), 0.5).log() if estimator.reads_scores else None,
        baseline=torch.zeros_like(rewards) if estimator.reads_baseline else None,
        sum_squares=torch.full((len(sequence),), 0.5) if estimator.reads_scores else None,
        columns=dict.fromkeys(estimator.reads_columns, [[0.0, 1.0]] * len(rewards)),
    )
    advantage = estimator.checked(inputs).advantage
    unscored = advantage[sequence == 3]
    _require(bool((unscored == 0).all()), "advantage 0 for a completion without a reward", str(unscored), factory)
    if estimator.level(kl_in_reward=False) == "sequence":
        first = torch.tensor([advantage[sequence == each][0] for each in range(len(_LENGTHS))])
        _require(
            bool((advantage == first[sequence]).all()),
            "one advantage a completion, as its level 'sequence' says",
            str(advantage),
            factory,
        )


def _require(condition: bool, needed: str, given: str, factory: str) -> None:
    if not condition:
        raise ConfigurationError(
            needed=f"{needed} from {factory}",
            given=given,
            remedy="Correct it; docs/extending.md has an example to begin with.",
        )


@contextmanager
def _naming_factory(factory: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Turn any error inside into one that names the factory and its options."""
    try:
        yield
    except ConfigurationError:
        raise
    except LogitlessError as error:
        _require(False, error.needed, error.given, factory)
    except Exception as error:
        raise ConfigurationError(
            needed=f"a part that can be called, from {factory}",
            given=described(error),
            remedy=f"Correct that line, or its options {dict(options)}." if options else "Correct that line.",
        ) from error
