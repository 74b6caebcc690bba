"""The interface of advantage estimators.

An estimator is a frozen dataclass, called as ``estimator(inputs, sum_over_ranks) -> AdvantageOutput``. Its class
attributes say what it needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logitless.errors import ConfigurationError, InputError
from logitless.objective.inputs import check_knobs, check_shapes, required, shapes_of
from logitless.objective.over_ranks import SumOverRanks, one_rank
from logitless.objective.ranges import Level, Ranges, pay_at_last_token, turn_index

EPSILON = 1e-4
"""Added to every standard deviation and median deviation before dividing by it."""


@dataclass(frozen=True)
class AdvantageInputs:
    """The rewards of a batch, and what else estimators read.

    Args:
        rewards: [B] one a completion, paid at its last token; NaN = unscored.
        group: [B] id of each completion's prompt, in any order.
        sequence: [N] completion of each trained token, non-decreasing, in ``range(B)``.
        kl: [N] nats, times its coefficient, subtracted from each token's reward; or None.
        turn_rewards: [K] paid at the last token of each turn besides ``rewards``, in the order of
            ``turn_index(sequence, turn)``; or None.
        turn: [N] turn ids, non-decreasing inside a sequence, or None.
        scores: [B, F] of each reward function; NaN where it could not score.
        weights: [F] of the functions.
        values: [N] of the scoring pass, or None without a value head.
        logp_old: [N] of the scoring pass, or None.
        sum_squares: [N] sum of the squared probabilities of the same pass, or None.
        baseline: [B] reward of a greedy completion of the same prompt, NaN if it has none; or None.
        columns: of the data, by name, a value a completion.
        state: of the estimator after the block before.

    Raises:
        InputError: tensors of other ranks, or lengths that do not fit together.

    Example:
        >>> inputs = AdvantageInputs(
        ...     rewards=torch.tensor([5.0]), group=torch.tensor([0]), sequence=torch.tensor([0, 0]),
        ...     kl=torch.tensor([1.0, 0.5]))
        >>> inputs.completion_rewards(), inputs.token_rewards()
        (tensor([3.5000]), tensor([-1.0000,  4.5000]))
    """

    rewards: Float[Tensor, "B"]
    group: Int[Tensor, "B"]
    sequence: Int[Tensor, "N"]
    kl: Float[Tensor, "N"] | None = None
    turn_rewards: Float[Tensor, "K"] | None = None
    turn: Int[Tensor, "N"] | None = None
    scores: Float[Tensor, "B F"] | None = None
    weights: Float[Tensor, "F"] | None = None
    values: Float[Tensor, "N"] | None = None
    logp_old: Float[Tensor, "N"] | None = None
    sum_squares: Float[Tensor, "N"] | None = None
    baseline: Float[Tensor, "B"] | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    state: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_shapes(vars(self), shapes_of(type(self).__annotations__))

    def column(self, name: str) -> Sequence[Any]:
        """B values of a column of the data.

        Raises:
            InputError: there is no such column.
        """
        if len(self.columns.get(name, ())) != len(self.rewards):
            raise InputError(
                needed=f"column {name!r} of each of {len(self.rewards)} completions",
                given=", ".join(self.columns) or "no columns",
                remedy="Give every row of the data this column, or choose another algorithm.advantage.",
            )
        return self.columns[name]

    def completion_rewards(self) -> Float[Tensor, "B"]:
        """[B] reward and turn rewards of each completion, minus its KL."""
        total = self.rewards
        tokens = Ranges(self.sequence, len(total), torch.ones_like(self.sequence, dtype=torch.bool))
        if self.turn_rewards is not None:
            total = total + tokens.sum(self._paid_at_turns(self.turn_rewards))
        return total if self.kl is None else total - tokens.sum(self.kl)

    def token_rewards(self) -> Float[Tensor, "N"]:
        """[N] rewards at the tokens where they are paid, 0 elsewhere, minus the KL."""
        paid = pay_at_last_token(self.rewards, self.sequence)
        if self.turn_rewards is not None:
            paid = paid + self._paid_at_turns(self.turn_rewards)
        return paid if self.kl is None else paid - self.kl

    def _paid_at_turns(self, turn_rewards: Tensor) -> Tensor:
        return pay_at_last_token(turn_rewards, turn_index(self.sequence, required(self.turn, "turn")))


@dataclass(frozen=True)
class AdvantageOutput:
    """Advantages and value targets.

    Args:
        advantage: [N]; 0 for tokens of an unscored completion.
        value_target: [N] returns, NaN where there is none; None for an estimator without values.
        state: what the estimator reads with the next block; None for one that reads a single block.
    """

    advantage: Float[Tensor, "N"]
    value_target: Float[Tensor, "N"] | None = None
    state: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Estimator(ABC):
    """Base class of the estimators.

    Args:
        clip: bound of the advantage's absolute value, applied last; None for no bound.

    Attributes:
        name: what recipes call it.
        needs_values: whether it reads values, which need a value head.
        compares_group: whether it needs at least two completions a prompt.
        reads_functions: whether it reads ``scores`` instead of ``rewards``.
        reads_scores: whether it reads ``logp_old`` and ``sum_squares``, from a scoring pass.
        reads_baseline: whether it reads ``baseline``, for which each prompt gets a greedy completion.
        takes_kl: whether a KL can be subtracted from the rewards that it reads.

    Raises:
        ConfigurationError: a bound that is not positive.
    """

    clip: float | None = None
    name = "own"
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    needs_values: ClassVar[bool] = False
    compares_group: ClassVar[bool] = False
    reads_functions: ClassVar[bool] = False
    reads_scores: ClassVar[bool] = False
    reads_baseline: ClassVar[bool] = False
    takes_kl: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.clip is not None and not self.clip > 0:
            raise ConfigurationError(
                needed="a positive advantage clip", given=str(self.clip), remedy="Leave clip out to switch it off."
            )

    @property
    def reads_columns(self) -> tuple[str, ...]:
        """Columns of the data that it reads; what it compares may then be of other prompts or blocks."""
        return ()

    @property
    def fewest_completions(self) -> int:
        """How many completions a prompt must have for an advantage other than 0."""
        return 2 if self.compares_group else 1

    @abstractmethod
    def level(self, *, kl_in_reward: bool) -> Level:
        """The level at which advantages are constant: token, turn or sequence.

        Args:
            kl_in_reward: whether a KL makes rewards differ between tokens.
        """

    @abstractmethod
    def __call__(self, inputs: AdvantageInputs, sum_over_ranks: SumOverRanks = one_rank) -> AdvantageOutput:
        """The advantages of a batch.

        Args:
            inputs: of this rank; all of a group on one rank.
            sum_over_ranks: for statistics over all ranks.

        Raises:
            InputError: an input that it reads is missing.
        """

    def checked(self, inputs: AdvantageInputs, sum_over_ranks: SumOverRanks = one_rank) -> AdvantageOutput:
        """A call whose result is checked.

        Raises:
            InputError: an input is missing, or the result has another shape or is not finite.
        """
        found, size = self(inputs, sum_over_ranks), len(inputs.sequence)
        given = None
        if not isinstance(found, AdvantageOutput):
            given = type(found).__name__
        elif found.advantage.shape != (size,):
            given = f"a tensor {list(found.advantage.shape)}"
        elif wrong := int((~found.advantage.isfinite()).sum()):
            given = f"{wrong} of {size} that are not finite"
        if given is not None:
            raise InputError(
                needed=f"AdvantageOutput with a finite advantage for each of {size} tokens from {self.name!r}",
                given=given,
                remedy="Give 0 where there is nothing to compare; look for rewards that are not finite.",
            )
        return found

    def _clipped(self, advantage: Tensor) -> Tensor:
        return advantage if self.clip is None else clip(advantage, self.clip)


@dataclass(frozen=True, kw_only=True)
class OnePerCompletion(Estimator):
    """An estimator with one advantage a completion."""

    compares_group: ClassVar[bool] = True

    def level(self, *, kl_in_reward: bool) -> Level:
        del kl_in_reward  # summed over the completion
        return "sequence"

    def __call__(self, inputs: AdvantageInputs, sum_over_ranks: SumOverRanks = one_rank) -> AdvantageOutput:
        advantage = self.per_completion(inputs, sum_over_ranks)
        if advantage.shape != inputs.rewards.shape:
            raise InputError(
                needed=f"one advantage for each of {len(inputs.rewards)} completions from {self.name!r}",
                given=f"a tensor {list(advantage.shape)}",
                remedy="Return a vector [B]; it is spread over the tokens of each completion.",
            )
        return AdvantageOutput(self._clipped(advantage)[inputs.sequence])

    @abstractmethod
    def per_completion(self, inputs: AdvantageInputs, sum_over_ranks: SumOverRanks) -> Float[Tensor, "B"]:
        """One advantage a completion, before the clip."""


def check_discount(name: str, value: float) -> None:
    """Raises ConfigurationError unless the discount is in [0, 1]."""
    if not 0 <= value <= 1:
        raise ConfigurationError(
            needed=f"{name} from 0 to 1", given=str(value), remedy=f"Set {name} to 1 for no discount."
        )


def refuse_infinite(rewards: Tensor) -> None:
    """Raises InputError if a reward is infinite."""
    if bool(rewards.isinf().any()):
        raise InputError(
            needed="a finite reward, or NaN where unscorable, for each completion",
            given=f"{rewards.numel()} rewards, of which {int(rewards.isinf().sum())} infinite",
            remedy="Bound the reward functions.",
        )


def clip(advantage: Float[Tensor, "*N"], limit: float) -> Float[Tensor, "*N"]:
    """Clamp to ``[-limit, limit]``."""
    return advantage.clamp(-limit, limit)


def num_clipped(advantage: Float[Tensor, "*N"], limit: float) -> Int[Tensor, ""]:
    """How many advantages are at the limit or beyond.

    Example:
        >>> num_clipped(clip(torch.tensor([-7.0, 0.5]), 5.0), 5.0)
        tensor(1)
    """
    return (advantage.abs() >= limit).sum()
