"""Advantages along a sequence: discounted returns (REINFORCE++), and with a value head GAE."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from logitless.errors import InputError
from logitless.objective.advantage.batch_relative import whiten
from logitless.objective.advantage.estimator import (
    AdvantageInputs,
    AdvantageOutput,
    Estimator,
    check_discount,
    refuse_infinite,
)
from logitless.objective.inputs import required, shaped
from logitless.objective.over_ranks import SumOverRanks, one_rank
from logitless.objective.ranges import Level, discounted_returns, ends, turn_index


@shaped
def reinforce_pp(
    token_rewards: Float[Tensor, "N"],
    sequence: Int[Tensor, "N"],
    gamma: float = 1.0,
    sum_over_ranks: SumOverRanks = one_rank,
) -> Float[Tensor, "N"]:
    """Discounted return of each token, whitened over the tokens of the batch.

    ``A = whiten(discounted_returns(r, gamma))``

    Args:
        token_rewards: [N], usually ``pay_at_last_token(...) - beta * (logp_old - logp_ref)``; NaN makes the tokens up
            to it unscored.
        sequence: [N] non-decreasing ids; all of a sequence on one rank.
        gamma: discount a token.
        sum_over_ranks: for whitening over all ranks.

    Returns:
        [N]; 0 for unscored tokens.

    Source: REINFORCE++, arXiv:2501.03262.

    Example:
        >>> reinforce_pp(torch.tensor([0.0, 2.0, 0.0]), torch.tensor([0, 0, 1]))  # returns 2, 2, 0; std sqrt(4 / 3)
        tensor([ 0.5773,  0.5773, -1.1546])
    """
    refuse_infinite(token_rewards)
    returns = discounted_returns(token_rewards, sequence, gamma)
    return whiten(returns, ~returns.isnan(), sum_over_ranks)


@dataclass(frozen=True)
class ReinforcePP(Estimator):
    """See ``reinforce_pp``.

    Args:
        gamma: discount a token, 0 to 1.
    """

    gamma: float = 1.0
    name: Literal["reinforce_pp"] = "reinforce_pp"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_discount("gamma", self.gamma)

    def level(self, *, kl_in_reward: bool) -> Level:
        return "token" if kl_in_reward or self.gamma != 1 else "sequence"

    def __call__(self, inputs: AdvantageInputs, sum_over_ranks: SumOverRanks = one_rank) -> AdvantageOutput:
        advantage = reinforce_pp(inputs.token_rewards(), inputs.sequence, self.gamma, sum_over_ranks)
        return AdvantageOutput(self._clipped(advantage))


@shaped
def gae(
    token_rewards: Float[Tensor, "N"],
    values: Float[Tensor, "N"],
    sequence: Int[Tensor, "N"],
    gamma: float = 1.0,
    lambda_: float = 0.95,
    turn: Int[Tensor, "N"] | None = None,
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """Generalized advantage estimation, with a token or a turn as one action.

    ``A_t = delta_t + gamma * lambda_ * A_{t+1}``, ``delta_t = r_t + gamma * V_{t+1} - V_t``, ``R_t = A_t + V_t``,
    where V and A are 0 after the last token of a sequence.

    With ``turn``, t counts turns: r is the sum over the turn, V the value at its first token, and every token of a turn
    gets its A and R.

    Args:
        token_rewards: [N]; NaN makes the tokens up to it unscored.
        values: [N] of the scoring pass.
        sequence: [N] non-decreasing ids; all of a sequence on one rank.
        gamma, lambda_: in [0, 1].
        turn: [N] ids, non-decreasing inside a sequence, or None for tokens.

    Returns:
        Advantage [N], not whitened, and value target [N]; 0 and the value itself for unscored tokens.

    Source: arXiv:1506.02438 eq. 16.

    Example:
        >>> gae(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25]), torch.tensor([0, 0]), gamma=1.0, lambda_=0.5)
        (tensor([0.1250, 0.7500]), tensor([0.6250, 1.0000]))
    """
    refuse_infinite(token_rewards)
    if not bool(values.isfinite().all()):
        raise InputError(
            needed="a finite value for each token",
            given=f"{len(values)} values, of which {int((~values.isfinite()).sum())} infinite or NaN",
            remedy="Lower the value head's learning rate, or clip its gradient.",
        )
    if turn is not None:
        action = turn_index(sequence, turn)
        first = torch.roll(ends(action), 1)
        paid = discounted_returns(token_rewards, action, 1.0)[first]
        advantage, target = gae(paid, values[first], sequence[first], gamma, lambda_)
        return advantage[action], target[action]
    following = torch.where(ends(sequence), 0, torch.roll(values, -1))
    advantage = discounted_returns(token_rewards + gamma * following - values, sequence, gamma * lambda_)
    advantage = advantage.nan_to_num(nan=0.0)
    return advantage, advantage + values


@dataclass(frozen=True)
class Gae(Estimator):
    """See ``gae``. Value targets come from the advantages before whitening.

    Args:
        gamma: discount an action, 0 to 1.
        lambda_: 1 trusts the returns, 0 the values.
        action: ``token``, or ``turn`` for one advantage an assistant turn (needs turn ids).
        whiten: to mean 0 and standard deviation 1 over the tokens of all ranks.

    Raises:
        InputError: called without values, or ``action="turn"`` without turn ids.

    Example:
        >>> inputs = AdvantageInputs(
        ...     torch.tensor([1.0]), torch.tensor([5]), torch.tensor([0, 0]), values=torch.tensor([0.5, 0.25]))
        >>> found = Gae(lambda_=0.5, whiten=False)(inputs)
        >>> found.advantage, found.value_target
        (tensor([0.1250, 0.7500]), tensor([0.6250, 1.0000]))
    """

    gamma: float = 1.0
    lambda_: float = 0.95
    action: Literal["token", "turn"] = "token"
    whiten: bool = True
    name: Literal["gae"] = "gae"
    needs_values: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_discount("gamma", self.gamma)
        check_discount("lambda_", self.lambda_)

    def level(self, *, kl_in_reward: bool) -> Level:
        del kl_in_reward  # no level is finer than that of the action
        return self.action

    def __call__(self, inputs: AdvantageInputs, sum_over_ranks: SumOverRanks = one_rank) -> AdvantageOutput:
        rewards, values = inputs.token_rewards(), required(inputs.values, "values")
        turn = required(inputs.turn, "turn") if self.action == "turn" else None
        advantage, target = gae(rewards, values, inputs.sequence, self.gamma, self.lambda_, turn)
        scorable = _scorable(rewards, inputs.sequence)
        if self.whiten:
            advantage = whiten(advantage, scorable, sum_over_ranks)
        return AdvantageOutput(self._clipped(advantage), target.masked_fill(~scorable, torch.nan))


def _scorable(token_rewards: Tensor, sequence: Tensor) -> Bool[Tensor, "N"]:
    """Tokens without a missing reward ahead of them in their sequence."""
    return ~discounted_returns(token_rewards, sequence, 1.0).isnan()
