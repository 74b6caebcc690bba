"""Arrays end to end in one buffer, beside JSON in which each is its length and dtype: a block has a million numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class Arrays:
    """A buffer to which arrays are added. int64 arrays become int32 where all numbers fit.

    Example:
        >>> arrays = Arrays()
        >>> place = arrays.put(np.array([3, 4]))
        >>> place, taking(arrays.joined())(place).tolist()
        ((2, '<i4'), [3, 4])
    """

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def put(self, array: np.ndarray) -> tuple[int, str]:
        """Add an array; returns its length and dtype."""
        narrow = array.astype(np.int32) if array.dtype == np.int64 else array
        self._arrays.append(narrow if np.array_equal(narrow, array, equal_nan=True) else array)
        return len(array), self._arrays[-1].dtype.str

    def joined(self) -> bytes:
        """The numbers of all arrays."""
        return b"".join(array.tobytes() for array in self._arrays)


def taking(numbers: bytes) -> Callable[[Sequence[Any]], np.ndarray]:
    """Reads arrays, in the order in which they were added, from their lengths and dtypes."""
    begin = 0

    def take(length_and_dtype: Sequence[Any]) -> np.ndarray:
        nonlocal begin
        count, dtype = length_and_dtype
        array = np.frombuffer(numbers, dtype, count, begin)
        begin += array.nbytes
        return array

    return take
