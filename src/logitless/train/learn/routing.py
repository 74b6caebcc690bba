"""The load-balancing loss of an optimizer step, and the metrics of its routers.

    loss = coefficient * load_balancing_loss(chosen, probability)

Both arguments are sums over every token of the step's prompts and completions, on all ranks, except the last token of
each sequence, from which nothing is predicted. A token that sequences share in a packed row counts once per sequence;
padding never counts. So loss and gradient do not depend on how the step is split into micro-batches.

The gradient of a micro-batch needs ``chosen`` of the whole step before its backward. So each rank first runs all its
micro-batches but the first through the backbone without gradient; the first one is counted in its training pass. This
is exact, and costs one more forward pass per further micro-batch: up to a third of the step, and nothing if each rank
has one micro-batch.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from logitless.distributed.ranks import Ranks
from logitless.models.router import RoutingSums
from logitless.objective.load_balancing import load_balancing_loss
from logitless.train.learn.policy import Policy
from logitless.types import PackedBatch


class RouterLoss:
    """The load-balancing loss of one optimizer step.

    Args:
        ranks: that train together; each calls ``share`` at least once, or ``settle``.
    """

    def __init__(self, policy: Policy, coefficient: float, ranks: Ranks = Ranks.alone()) -> None:
        assert policy.routers is not None
        self._policy, self._coefficient, self._ranks = policy, coefficient, ranks
        self._experts_per_token = policy.routers.experts_per_token
        self._chosen = RoutingSums.zero(policy.routers, policy.device).counted
        self._settled = False

    def count(self, batches: Iterable[PackedBatch]) -> None:
        """Count the experts that micro-batches choose, each with a backbone pass without gradient."""
        for batch in batches:
            for sums in self._policy.routing_of(batch):
                self._chosen = self._chosen + sums.counted

    def settle(self) -> None:
        """Add the counts of all ranks; a collective."""
        self._chosen, self._settled = self._ranks.sum_over_all(self._chosen), True

    def share(self, found: Iterable[RoutingSums]) -> Float[Tensor, ""]:
        """A micro-batch's share of the loss, times the coefficient; differentiable.

        Args:
            found: sums of its forward pass. The step's first micro-batch is counted here, unless ``settle`` was called.
        """
        sums = list(found)
        if not self._settled:
            self._chosen = sum((each.counted for each in sums), self._chosen)
            self.settle()
        losses = (
            load_balancing_loss(self._chosen, each.probability, experts_per_token=self._experts_per_token)
            for each in sums
        )
        return self._coefficient * sum(losses, self._chosen.new_zeros(()))


def routing_numbers(
    found: Iterable[RoutingSums], policy: Policy, *, coefficient: float = 0.0, ranks: Ranks = Ranks.alone()
) -> dict[str, Tensor]:
    """A step's router metrics, float64, by the names of ``metrics.py``; empty for a dense model. A collective.

    Args:
        found: sums of this rank's micro-batches, without gradient.
    """
    routers = policy.routers
    if routers is None:
        return {}
    mine = sum(found, RoutingSums.zero(routers, policy.device))
    sums = mine.unflat(ranks.sum_over_all(mine.flat))
    load = sums.load / sums.load.mean(-1, keepdim=True)
    numbers = {
        "router/entropy": sums.entropy * routers.experts_per_token / sums.load.sum(),
        "router/load_max": load.max(),
        "router/load_min": load.min(),
        "router/dropped_fraction": torch.zeros_like(sums.entropy),  # no expert has a capacity
    }
    if coefficient:
        numbers["loss/router"] = load_balancing_loss(
            sums.counted, sums.probability, experts_per_token=routers.experts_per_token
        )
    return numbers
