"""Which rank does what, as pure functions with the same answer on every rank."""

from collections.abc import Sequence
from typing import TypeVar

_Made = TypeVar("_Made")


def shares_by_cost(costs: Sequence[float], num_ranks: int) -> list[tuple[int, ...]]:
    """Assign pieces to ranks with similar loads: the costliest first, each to the least loaded rank.

    The largest load is at most 4/3 of the smallest possible one.

    Returns:
        The indices of each rank's pieces, ascending. Ties go to the lower index and the lower rank.

    Source: Graham 1969, longest processing time first.

    Example:
        >>> shares_by_cost([1.0, 5.0, 2.0, 2.0], 2)
        [(1,), (0, 2, 3)]
    """
    loads = [0.0] * num_ranks
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for piece in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], r))
        loads[rank] += costs[piece]
        shares[rank].append(piece)
    return [tuple(sorted(share)) for share in shares]


def attention_cost(pairs: float, hidden_size: int) -> float:
    """Cost of attention in tokens of a short sequence: ``pairs / (6 D)``.

    A layer's products take about ``24 D^2`` operations a token, attention ``4 D`` a pair.

    Args:
        pairs: of a token and one that it attends to; of a causal sequence about ``length^2 / 2``.
        hidden_size: D; 0 leaves attention out.

    Example:
        >>> attention_cost(1200 * 1200 / 2, hidden_size=100)
        1200.0
    """
    return pairs / (6 * hidden_size) if hidden_size else 0.0


def in_order(shares: Sequence[Sequence[_Made]]) -> list[_Made]:
    """The ranks' results for every n-th item each (``Ranks.shared``), in the original order.

    Example:
        >>> in_order([["a", "c", "e"], ["b", "d"]])
        ['a', 'b', 'c', 'd', 'e']
    """
    longest = max((len(share) for share in shares), default=0)
    return [share[i] for i in range(longest) for share in shares if i < len(share)]
