"""How far back in its sequence a token attends: a window behind it, or the start of its chunk."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Chunks:
    """In place of a window: a token attends to its own chunk, of so many positions of the sequence (Llama 4)."""

    length: int


Window = int | Chunks
"""Positions that a token attends to, itself included."""


def first_seen(position: Tensor, window: Window | None) -> Tensor:
    """The first position that a query at each of these attends to.

    Example:
        >>> import torch
        >>> first_seen(torch.tensor([3, 8, 9]), 4).tolist(), first_seen(torch.tensor([3, 8, 9]), Chunks(4)).tolist()
        ([0, 5, 6], [0, 8, 8])
    """
    if isinstance(window, Chunks):
        return position // window.length * window.length
    return position * 0 if window is None else (position - window + 1).clamp(min=0)


def end_of_queries(position: Tensor, window: Window) -> Tensor:
    """The first position whose query does not attend to a key at each of these, or before it.

    Example:
        >>> import torch
        >>> end_of_queries(torch.tensor([3, 8]), 4).tolist(), end_of_queries(torch.tensor([3, 8]), Chunks(4)).tolist()
        ([7, 12], [4, 12])
    """
    return first_seen(position, window) + window.length if isinstance(window, Chunks) else position + window
