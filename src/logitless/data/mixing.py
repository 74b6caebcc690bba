"""The order of prompts of several sources, each with its share of every block; resumable.

The next prompt comes from the source that is furthest behind its share. Only the order inside a source is random.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from logitless.data.prompts import PromptOrder
from logitless.errors import CheckpointError, DataError
from logitless.seeds import derived_seed


class MixedOrder:
    """An endless order over the prompts of several sources; each epoch of a source is a permutation.

    ``next source = argmax_s (share[s] * (drawn + 1) - drawn[s])``, the first listed where two are equal

    Args:
        members: indices of the prompts of each source, by name.
        weights: of each source, above 0; its share is its weight over their sum.
        most: the largest number of prompts asked for at once.

    Raises:
        DataError: a source has fewer prompts than one request may take of it.

    Example:
        >>> order = MixedOrder({"sums": range(6), "words": range(6, 10)}, {"sums": 3.0, "words": 1.0}, seed=0, most=4)
        >>> [sum(index < 6 for index in order.next(4)) for _ in range(3)]
        [3, 3, 3]
    """

    def __init__(
        self, members: Mapping[str, Sequence[int]], weights: Mapping[str, float], *, seed: int, most: int
    ) -> None:
        total = math.fsum(weights[name] for name in members)
        self.shares = {name: weights[name] / total for name in members}
        for name, indices in members.items():
            needed = most_of(self.shares[name], most, len(members))
            if len(indices) < needed:
                raise DataError(
                    needed=f"at least {needed} prompts of the source {name!r}, as many as one request for {most} may "
                    f"take at a share of {self.shares[name]:.3g}",
                    given=f"{len(indices)}, without those held out",
                    remedy="Give more data, or lower its weight or rollout.prompts_per_block.",
                )
        self._members = {name: tuple(indices) for name, indices in members.items()}
        self._drawn = dict.fromkeys(members, 0)
        self._orders = {name: PromptOrder(len(m), derived_seed(seed, "source", name)) for name, m in members.items()}

    def next(self, count: int) -> list[int]:
        """The next ``count`` indices of prompts."""
        sources = [self._next_source() for _ in range(count)]
        drawn = {name: iter(order.next(sources.count(name))) for name, order in self._orders.items()}
        return [self._members[name][next(drawn[name])] for name in sources]

    def _next_source(self) -> str:
        """The source that is furthest behind its share; counts the prompt as drawn from it."""
        drawn = sum(self._drawn.values()) + 1
        name = max(self._drawn, key=lambda each: self.shares[each] * drawn - self._drawn[each])
        self._drawn[name] += 1
        return name

    def state_dict(self) -> dict[str, Any]:
        """What the next prompts depend on, as plain numbers."""
        orders = {name: order.state_dict() for name, order in self._orders.items()}
        return {"shares": self.shares, "drawn": dict(self._drawn), "orders": orders}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``.

        Raises:
            CheckpointError: the state belongs to other sources, weights, numbers of prompts or another seed.
        """
        if state.get("shares") != self.shares:
            raise CheckpointError(
                needed=f"sources with the shares {state.get('shares')}, as when the checkpoint was written",
                given=str(self.shares),
                remedy="Resume with the sources and weights of the run.",
            )
        self._drawn = {name: int(state["drawn"][name]) for name in self._orders}
        for name, order in self._orders.items():
            order.load_state_dict(state["orders"][name])


def most_of(share: float, count: int, num_sources: int) -> int:
    """The most prompts that one request for ``count`` takes from a source: below ``share * count + num_sources``.

    Example:
        >>> most_of(0.75, 4, 2), most_of(0.75, 100, 2)
        (4, 76)
    """
    return min(count, math.ceil(share * count + num_sources) - 1)
