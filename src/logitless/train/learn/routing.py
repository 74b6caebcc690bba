"""The load-balancing loss of a step, and what a step's routers are known by.

    loss = coefficient * load_balancing_loss(chosen, probability)

Both arguments are sums over every token that the step reads, on all ranks: those of prompts and completions, but for
the last of each sequence, from which nothing is predicted. A token counts once for each sequence that it is in, whether
the sequences share it in a packed row or not; padding never counts. So loss and gradient are those of one batch,
however the step is cut.

The gradient of a micro-batch needs ``chosen`` of the whole step before its backward. A rank therefore reads its
micro-batches but the first once more, without gradient and without the head, before the step; the first one's own
pass says the rest. That is exact, and costs a forward pass a micro-batch: up to a third of the step, and nothing where
each rank has one micro-batch.
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
        policy: a mixture of experts.
        coefficient: of the loss, above 0.
        ranks: that train together; each calls ``share`` at least once, or ``settle``.
    """

    def __init__(self, policy: Policy, coefficient: float, ranks: Ranks = Ranks.alone()) -> None:
        assert policy.routers is not None
        self._policy, self._coefficient, self._ranks = policy, coefficient, ranks
        self._experts_per_token = policy.routers.experts_per_token
        self._chosen = RoutingSums.zero(policy.routers, policy.device).counted
        self._settled = False

    def count(self, batches: Iterable[PackedBatch]) -> None:
        """Count the chosen experts of micro-batches, each by a pass of the backbone without gradient."""
        for batch in batches:
            for sums in self._policy.routing_of(batch):
                self._chosen = self._chosen + sums.counted

    def settle(self) -> None:
        """Add the counts of all ranks; a collective."""
        self._chosen, self._settled = self._ranks.sum_over_all(self._chosen), True

    def share(self, found: Iterable[RoutingSums]) -> Float[Tensor, ""]:
        """What a micro-batch adds to the loss, its coefficient included; differentiable.

        Args:
            found: of its pass. The first micro-batch of the step is counted here, unless ``settle`` was called.
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
    """The numbers of a step's routers, float64, by the names of ``metrics.py``; none of a dense model.

    Args:
        found: of the micro-batches of this rank, without gradient.
        policy: that was trained.
        coefficient: of the load-balancing loss.
        ranks: that trained together; a collective.
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
        "router/dropped_fraction": torch.zeros_like(sums.entropy),  # no expert has a limit
    }
    if coefficient:
        numbers["loss/router"] = load_balancing_loss(
            sums.counted, sums.probability, experts_per_token=routers.experts_per_token
        )
    return numbers
