"""Sums along a binary tree of micro-batches: the same order of additions for any number of ranks.

    positions of 5 micro-batches in a tree of 8:     0 4 2 . 1 . 3 .
    one rank                                        (0 4 2 . 1 . 3 .)
    two ranks                                       (0 4 2 .)(1 . 3 .)
    four ranks                                      (0 4)(2 .)(1 .)(3 .)

Micro-batch i has the position whose binary digits are those of i reversed, so that ranks have about equally many. A
rank sums its subtree; the ranks' sums are added along the rest of the tree, in pairs, left to right. A missing leaf
adds nothing.
"""

from typing import TypeAlias

from torch import Tensor

Sums: TypeAlias = list[Tensor | None]


def places_in_tree(count: int, rank: int, num_ranks: int) -> list[int | None]:
    """The micro-batches at a rank's positions of the tree; None where there is none.

    Args:
        num_ranks: a power of two.

    Example:
        >>> places_in_tree(5, 0, 2), places_in_tree(5, 1, 2)
        ([0, 4, 2, None], [1, None, 3, None])
    """
    bits = max((max(count, num_ranks) - 1).bit_length(), 0)
    size = 2**bits
    mine = range(rank * size // num_ranks, (rank + 1) * size // num_ranks)
    found = [int(format(position, f"0{bits}b")[::-1], 2) if bits else 0 for position in mine]
    return [i if i < count else None for i in found]


class TreeSum:
    """The sum of lists of tensors along a tree; keeps at most one list a level.

    Example:
        >>> import torch
        >>> total = TreeSum()
        >>> for x in (1.0, 2.0, 3.0, 4.0):
        ...     total.add([torch.tensor(x)])
        >>> total.whole()
        [tensor(10.)]
    """

    def __init__(self) -> None:
        self._nodes: list[tuple[int, Sums]] = []

    def add(self, leaf: Sums) -> None:
        """Add the next leaf, whose tensors are overwritten; None adds nothing."""
        level, node = 0, leaf
        while self._nodes and self._nodes[-1][0] == level:
            node = [_pair(left, right) for left, right in zip(self._nodes.pop()[1], node, strict=True)]
            level += 1
        self._nodes.append((level, node))

    def whole(self) -> Sums:
        """The sum of all leaves, whose number is a power of two."""
        ((_, node),) = self._nodes
        return node


def _pair(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)
