"""How numbers of several ranks reach an objective: by a callable that it is given, for it knows no process group."""

from collections.abc import Callable

from torch import Tensor

SumOverRanks = Callable[[Tensor], Tensor]
"""Element-wise sum of a tensor over the ranks that share a batch (``distributed.sum_over_group``)."""

GatherOverRanks = Callable[[Tensor], Tensor]
"""The rows of every rank end to end, in the same order on every rank; lengths may differ
(``distributed.gather_over_group``)."""


def one_rank(part: Tensor) -> Tensor:
    """Both of a run on one rank: the whole is the part itself.

    Example:
        >>> import torch
        >>> one_rank(torch.tensor([3.0]))
        tensor([3.])
    """
    return part
