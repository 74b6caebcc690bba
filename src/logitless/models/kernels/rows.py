"""Numbers of rows at which products are checked, and tensors with padding rows up to the next such number.

A library may sum in another order at any number of rows, so it is used only at numbers that the self-check has
compared. Rows do not depend on each other, so a product of T rows is computed with the next checked number of rows, of
which the last hold whatever is in memory. Tensors that enter products are allocated with these padding rows.
"""

import bisect
from typing import Any

import torch
from torch import Tensor

FEW_ROWS = (1, 16, 32, 64, 128, 192, 256, 384, 512)
CHECKED_ROWS = (*FEW_ROWS, *range(768, 16384 + 1, 256))
MOST_ROWS = CHECKED_ROWS[-1]


def divided_up(number: Any, by: Any) -> Any:
    """The quotient rounded up, of numbers or tensors; Triton's own costs the host ten times as much.

    Example:
        >>> divided_up(5, 2)
        3
    """
    return -(-number // by)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``.

    Example:
        >>> power_of_two(1), power_of_two(896)
        (1, 1024)
    """
    return 1 << (number - 1).bit_length()


def as_rows(x: Tensor) -> Tensor:
    """x [T, heads, width] with heads side by side; a view if possible."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def checked_count(num_rows: int) -> int:
    """The smallest checked number of rows that is at least ``num_rows``, which is at most MOST_ROWS.

    Example:
        >>> checked_count(1), checked_count(17), checked_count(600)
        (1, 32, 768)
    """
    return CHECKED_ROWS[bisect.bisect_left(CHECKED_ROWS, num_rows)]


def checked_count_below(num_rows: int) -> int:
    """The largest checked number of rows that is at most ``num_rows``.

    Example:
        >>> checked_count_below(600), checked_count_below(40000)
        (512, 16384)
    """
    return CHECKED_ROWS[bisect.bisect_right(CHECKED_ROWS, num_rows) - 1]


def with_room(num_rows: int) -> int:
    """Rows to allocate for ``num_rows``, padding included.

    Example:
        >>> with_room(600), with_room(16384 + 20)
        (768, 16416)
    """
    whole, rest = divmod(num_rows, MOST_ROWS)
    return whole * MOST_ROWS + (checked_count(rest) if rest else 0)


def empty_rows(num_rows: int, *shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[num_rows, *shape] uninitialised; on a GPU the first rows of a tensor with padding rows."""
    room = with_room(num_rows) if like.is_cuda else num_rows
    rows = torch.empty(room, *shape, dtype=dtype or like.dtype, device=like.device)
    return rows if room == num_rows else rows[:num_rows]


def widened(rows: Tensor, num_rows: int) -> Tensor | None:
    """``rows`` with the padding rows after them, as [num_rows, K]; None if the storage ends before.

    Example:
        >>> x = torch.zeros(8, 2)
        >>> widened(x[:5], 8).shape, widened(x[:5], 9)
        (torch.Size([8, 2]), None)
    """
    if num_rows == rows.shape[0]:
        return rows
    last = rows.storage_offset() + (num_rows - 1) * rows.stride(0) + rows.shape[1]
    if last * rows.element_size() > rows.untyped_storage().nbytes():
        return None
    return rows.as_strided((num_rows, rows.shape[1]), rows.stride())
