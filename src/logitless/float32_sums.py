"""Float32 gradients of bfloat16 weights, accumulated by the matrix product that computes them.

For a parameter whose ``grad_dtype`` is float32, autograd would round each product to bfloat16, cast it back and add it:
three more passes over the weight for every micro-batch. Here the product adds its float32 accumulator to
``parameter.grad``, and the backward returns None to autograd.

Hooks on gradients do not run this way. Parameters with hooks, and sharded ones, are left to autograd.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


def sums_in_float32(weight: Tensor) -> bool:
    """Whether a backward should add to this parameter's float32 gradient itself.

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
    """The dtype of a parameter's gradient: ``grad_dtype`` if it is set, else the parameter's.

    Example:
        >>> gradient_dtype(nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)))
        torch.bfloat16
    """
    chosen = parameter.grad_dtype if parameter.is_leaf else None
    return parameter.dtype if chosen is None else chosen


def float32_product(a: Float[Tensor, "N T"], b: Float[Tensor, "T K"]) -> Float[Tensor, "N K"]:
    """``a @ b`` in float32, for inputs of any float dtype.

    Example:
        >>> float32_product(torch.full((1, 2), 200.0).half(), torch.full((2, 1), 200.0).half())
        tensor([[80000.]])
    """
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def add_product(weights: Sequence[nn.Parameter], grad: Float[Tensor, "T N"], x: Float[Tensor, "T K"]) -> None:
    """``weight.grad += grad.T @ x`` for several weights, each with its own columns of ``grad``.

    Args:
        weights: with ``sums_in_float32``, [N_i, K] each, sum N_i = N.
        grad: gradient of ``x @ cat(weights).T``.
        x: input of that product.

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
        # one tensor for all, so that the next call adds to all of them in one product
        product = float32_product(grad.t(), x)
        for weight, part in zip(weights, product.split_with_sizes(sizes), strict=True):
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
    """``weight.grad += grad``; a first gradient is kept without a copy.

    Args:
        weight: with ``sums_in_float32``.
        grad: float32, of the weight's shape; the caller does not use it afterwards.

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
    """``weight.grad[row[t]] += grad[t]``, deterministic.

    Args:
        weight: an embedding with ``sums_in_float32``, [V, D].
        grad: gradient of the rows that were looked up.
        row: their indices, int64.

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
    is_new = torch.ones_like(ordered)
    is_new[1:] = ordered[1:] != ordered[:-1]
    rank_of_ordered = is_new.cumsum(0) - 1  # among the distinct rows
    rank = torch.empty_like(rank_of_ordered).scatter_(0, order, rank_of_ordered)
    summed = torch.ops.aten.embedding_dense_backward(grad.float(), rank, len(row), -1, False)
    distinct = torch.zeros_like(row).scatter_(0, rank_of_ordered, ordered)  # beyond the last: row 0, which gets zeros
    weight.grad.index_add_(0, distinct, summed)


def end_to_end(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """One tensor over all these, without a copy, if they are adjacent rows of one allocation; else None.

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
    address, rows, rest = first.data_ptr(), 0, first.shape[1:]
    for tensor in tensors:
        if tensor is None or tensor.data_ptr() != address or tensor.shape[1:] != rest or not tensor.is_contiguous():
            return None
        address += tensor.numel() * tensor.itemsize
        rows += tensor.shape[0]
    storage = first.untyped_storage()
    if address > storage.data_ptr() + storage.nbytes():  # adjacent by chance, in allocations of their own
        return None
    return first.detach().as_strided((rows, *rest), first.stride(), first.storage_offset())
