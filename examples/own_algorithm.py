"""A surrogate and an advantage of one's own: a template to copy beside a recipe. docs/extending.md explains it.

algorithm:
  surrogate: {name: own, factory: ./own_algorithm.py:Topr, options: {ratio_max: 1.0}}
  advantage: {name: own, factory: ./own_algorithm.py:Ranks}
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from logitless.objective.advantage import AdvantageInputs, OnePerCompletion
from logitless.objective.inputs import required
from logitless.objective.over_ranks import SumOverRanks
from logitless.objective.surrogate import PolicyLoss, SurrogateInputs, SurrogateTerms


@dataclass(frozen=True)
class Topr(PolicyLoss):
    """``-w A logp``, w = 1 where A >= 0, else ``min(ratio, ratio_max)`` without a gradient (arXiv:2503.14286)."""

    ratio_max: float = 1.0

    def __call__(self, inputs: SurrogateInputs) -> SurrogateTerms:
        """The loss of each token, [N]: no mean, no weight, no KL, which are taken around it."""
        ratio = required(inputs.log_ratio, "logp_old").detach().exp()
        weight = torch.where(inputs.advantage >= 0, 1.0, ratio.clamp(max=self.ratio_max))
        return SurrogateTerms(-weight * inputs.advantage * inputs.logp)


@dataclass(frozen=True, kw_only=True)
class Ranks(OnePerCompletion):
    """The rank of a completion's reward among those of its prompt: -1 for the lowest, 1 for the highest."""

    def per_completion(self, inputs: AdvantageInputs, sum_over_ranks: SumOverRanks) -> Tensor:
        """[B]; 0 where there is no reward (NaN) and where there is nothing to compare with."""
        del sum_over_ranks  # for statistics over the completions of all processes; a prompt's are on one of them
        rewards = inputs.completion_rewards()
        beside = inputs.group[:, None] == inputs.group  # [B, B]; comparisons with NaN are False
        below = (beside & (rewards[:, None] > rewards)).sum(1)
        above = (beside & (rewards[:, None] < rewards)).sum(1)
        others = (beside & ~rewards.isnan()).sum(1) - 1
        return torch.where(rewards.isnan(), 0.0, (below - above) / others.clamp(min=1))
