"""Advantages along a sequence without a value head: whitened discounted returns."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from logitless.objective.advantage.estimator import AdvantageInputs, AdvantageOutput, Estimator, check_discount
from logitless.objective.advantage.groups import refuse_infinite
from logitless.objective.advantage.runs import discounted_returns
from logitless.objective.advantage.whitening import whiten
from logitless.objective.inputs import shaped
from logitless.objective.over_ranks import SumOverRanks, one_rank
from logitless.objective.ranges import Level


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
        sequence: [N] non-decreasing ids; a sequence lies whole on one rank.
        gamma: discount a token.
        sum_over_ranks: for whitening over all ranks.

    Returns:
        [N]; 0 for unscored tokens.

    Source: REINFORCE++, arXiv:2501.03262.

    Example:
        >>> import torch
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
