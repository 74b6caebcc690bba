"""Gradients of bfloat16 weights that are summed in float32, by the products that make them.

A parameter whose ``grad_dtype`` is float32 gets float32 gradients. autograd would round each product to bfloat16, cast
it and add it, three more passes over the weight for every micro-batch; here the product's own kernel adds its float32
accumulator to ``parameter.grad``, and autograd is handed None.

That passes over hooks on gradients, so that a parameter that has some, or that is not whole on this device, is left to
autograd.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


def sums_in_float32(weight: Tensor) -> bool:
    """Whether products add to this parameter's float32 gradient themselves.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
        >>> before = sums_in_float32(weight)
        >>> weight.grad_dtype = torch.float32
        >>> before, sums_in_float32(weight)
        (False, True)
    """
    return (
        type(weight) is nn.Parameter
        and weight.requires_grad
        and weight.dtype != torch.float32
        and weight.grad_dtype == torch.float32
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    )


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """That of a parameter's gradient, which is its own unless ``grad_dtype`` says otherwise.

    Example:
        >>> gradient_dtype(nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)))
        torch.bfloat16
    """
    chosen = parameter.grad_dtype if parameter.is_leaf else None
    return parameter.dtype if chosen is None else chosen


def float32_product(a: Float[Tensor, "N T"], b: Float[Tensor, "T K"]) -> Float[Tensor, "N K"]:
    """``a @ b`` of numbers of any width, not rounded to theirs.

    Example:
        >>> float32_product(torch.full((1, 2), 200.0).half(), torch.full((2, 1), 200.0).half())
        tensor([[80000.]])
    """
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def add_product(weights: Sequence[nn.Parameter], grad: Float[Tensor, "T N"], x: Float[Tensor, "T K"]) -> None:
    """``weight.grad += grad.T @ x``, for weights whose rows together are the columns of ``grad``.

    Gradients that are made here lie end to end, so that the next call adds to all of them in one product.

    Args:
        weights: with ``sums_in_float32``, [N_i, K] each.
        grad, x: of the rows that were multiplied.

    Example:
        >>> weights = [nn.Parameter(torch.zeros(n, 1, dtype=torch.bfloat16)) for n in (1, 2)]
        >>> for weight in weights:
        ...     weight.grad_dtype = torch.float32
        >>> for _ in range(2):
        ...     add_product(weights, torch.tensor([[1.0, 2.0, 3.0]]).bfloat16(), torch.ones(1, 1).bfloat16())
        >>> weights[1].grad
        tensor([[4.],
                [6.]])
    """
    sums = [weight.grad for weight in weights]
    sizes = [weight.shape[0] for weight in weights]
    if all(each is None for each in sums):
        made = float32_product(grad.t(), x)
        for weight, part in zip(weights, made.split_with_sizes(sizes), strict=True):
            weight.grad = part
        return
    whole = end_to_end(sums)
    parts = [(grad, whole)] if whole is not None else zip(grad.split_with_sizes(sizes, 1), sums, strict=True)
    for number, (part, total) in enumerate(parts):
        if total is None:
            weights[number].grad = float32_product(part.t(), x)
        elif part.is_cuda and part.dtype != torch.float32:
            torch.addmm(total, part.t(), x, out_dtype=torch.float32, out=total)
        else:
            total.addmm_(part.t().float(), x.float())


def add_gradient(weight: nn.Parameter, grad: Tensor) -> None:
    """``weight.grad += grad``, as autograd would; it takes a copy where this keeps the tensor that it is given.

    Args:
        weight: with ``sums_in_float32``.
        grad: float32, of its shape, and nobody else's.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        >>> weight.grad_dtype = torch.float32
        >>> for _ in range(2):
        ...     add_gradient(weight, torch.ones(2))
        >>> weight.grad
        tensor([2., 2.])
    """
    if weight.grad is None:
        weight.grad = grad
    else:
        weight.grad += grad


def add_rows(weight: nn.Parameter, grad: Float[Tensor, "T D"], row: Int[Tensor, "T"]) -> None:
    """``weight.grad[row[t]] += grad[t]``, each row's numbers summed in one order.

    Args:
        weight: with ``sums_in_float32``, [V, D].
        grad: of rows that were looked up.
        row: int64.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2, 1, dtype=torch.bfloat16))
        >>> weight.grad_dtype = torch.float32
        >>> add_rows(weight, torch.ones(3, 1).bfloat16(), torch.tensor([1, 0, 1]))
        >>> weight.grad.tolist()
        [[1.0], [2.0]]
    """
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=torch.float32)
    if not len(row):
        return
    ordered, order = torch.sort(row, stable=True)
    begins = torch.ones_like(ordered)
    begins[1:] = ordered[1:] != ordered[:-1]
    of_sorted = begins.cumsum(0) - 1  # which of the distinct rows
    place = torch.empty_like(of_sorted).scatter_(0, order, of_sorted)
    summed = torch.ops.aten.embedding_dense_backward(grad.float(), place, len(row), -1, False)
    distinct = torch.zeros_like(row).scatter_(0, of_sorted, ordered)  # row 0 gets zeros beyond the last
    weight.grad.index_add_(0, distinct, summed)


def end_to_end(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The tensor whose consecutive rows these are; None where they are not, or one of them is None.

    Example:
        >>> whole = torch.arange(12.0).reshape(6, 2)
        >>> end_to_end([whole[:2], whole[2:5]]).shape, end_to_end([whole[:2], whole[3:]])
        (torch.Size([5, 2]), None)
    """
    first = tensors[0]
    if first is None:
        return None
    if len(tensors) == 1:
        return first.detach() if first.is_contiguous() else None
    place, rows, rest = first.data_ptr(), 0, first.shape[1:]
    for tensor in tensors:
        if tensor is None or tensor.data_ptr() != place or tensor.shape[1:] != rest or not tensor.is_contiguous():
            return None
        place += tensor.numel() * tensor.itemsize
        rows += tensor.shape[0]
    storage = first.untyped_storage()
    if place > storage.data_ptr() + storage.nbytes():  # neighbours by chance, each in memory of its own
        return None
    return first.detach().as_strided((rows, *rest), first.stride(), first.storage_offset())
