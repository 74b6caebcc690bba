"""Sums and gathers over ranks, which objectives take as callables: they know no process group."""

from collections.abc import Callable

from torch import Tensor

SumOverRanks = Callable[[Tensor], Tensor]
"""Element-wise, differentiable sum of a tensor over ranks (``distributed.sum_over_group``)."""

GatherOverRanks = Callable[[Tensor], Tensor]
"""The rows of all ranks end to end, in the same order on each; lengths may differ
(``distributed.gather_over_group``).
"""


def one_rank(part: Tensor) -> Tensor:
    """``SumOverRanks`` and ``GatherOverRanks`` of a single rank: the identity."""
    return part
