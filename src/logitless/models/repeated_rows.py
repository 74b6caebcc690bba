"""``x[index]`` with repeated indices and a deterministic gradient.

torch sums the gradients of a repeated row with atomics, in no fixed order and in the dtype of x. Here they are summed
in the order of ``index``, in float32 (float64 for float64 inputs).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from logitless.transfer import sent


@dataclass(frozen=True)
class RepeatedRows:
    """An index of rows, sorted for the gradient of its repeated rows. Build it with ``RepeatedRows.of``.

    Args:
        index: [U] rows of x.
        first: [U'] for each distinct row of the index, in ascending order, where in ``index`` it occurs first.
        again: for the K rows that occur more than once, the most frequent first: the rows [K], their first occurrences
            in ``index`` [K], then their second ones [K], their third ones [J] for the J <= K rows that have
            one, and so on. None if no row is repeated.

    Example:
        >>> rows = RepeatedRows.of(torch.tensor([1, 1, 0]))
        >>> x = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
        >>> rows.take(x).flatten().tolist()
        [2.0, 2.0, 1.0]
        >>> rows.take(x).sum().backward()
        >>> x.grad.flatten().tolist()
        [1.0, 2.0, 0.0]
    """

    index: Int[Tensor, "U"]
    first: Int[Tensor, "U2"]
    again: tuple[Tensor, ...] | None

    @classmethod
    def of(cls, index: Int[Tensor, "U"]) -> "RepeatedRows":
        """From an index on the CPU."""
        given = index.numpy()  # numpy is faster than torch on arrays this small
        order = np.argsort(given, kind="stable")
        ordered = given[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(given)])
        first = torch.from_numpy(order[starts])
        counts = np.diff(starts, append=len(given))
        often = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts > 1)]
        if not len(often):
            return cls(index, first, None)
        begins, turns = starts[often], counts[often]
        again = [ordered[begins], order[begins]]
        again += [order[begins[: np.count_nonzero(turns > turn)] + turn] for turn in range(1, turns[0])]
        return cls(index, first, tuple(map(torch.from_numpy, again)))

    def to(self, device: torch.device | str) -> "RepeatedRows":
        """A copy on another device, in one transfer."""
        tensors = [self.index, self.first, *(self.again or ())]
        index, first, *again = sent(torch.cat(tensors), device).split([len(each) for each in tensors])  # type: ignore[no-untyped-call]
        return RepeatedRows(index, first, tuple(again) or None)

    def take(self, x: Float[Tensor, "T *rest"]) -> Float[Tensor, "U *rest"]:
        """``x[index]``.

        Gradient: to x, summed over the occurrences of each row in the order of ``index``, in float32; deterministic.
        """
        taken: Tensor = _Take.apply(x, self)  # type: ignore[no-untyped-call]
        return taken

    def summed(self, grad: Float[Tensor, "U *rest"], num_rows: int) -> Float[Tensor, "T *rest"]:
        """The gradient of ``take``, for an x of so many rows."""
        out = grad.new_zeros(num_rows, *grad.shape[1:])
        if self.again is None:
            return out.index_copy_(0, self.index, grad)
        out.index_copy_(0, self.index[self.first], grad.index_select(0, self.first))
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        row, first, *further = self.again
        total = grad.index_select(0, first).to(wide)
        for place in further:
            total[: len(place)] += grad.index_select(0, place).to(wide)
        return out.index_copy_(0, row, total.to(grad.dtype))


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RepeatedRows) -> Tensor:
        ctx.rows, ctx.num_rows = rows, len(x)
        return x.index_select(0, rows.index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.rows.summed(grad, ctx.num_rows), None
