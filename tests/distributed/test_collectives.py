"""Rows of all ranks: their order, unequal lengths, dtypes, and groups of some ranks.

Sums over ranks: their value, and the gradient of a loss that the ranks hold parts of.
"""

import pytest
import torch
import torch.distributed as dist

from logitless.distributed import gather_over_group, sum_over_group
from tests.ranks import run_on_ranks


def rows_of_a_rank(rank, parts):
    return gather_over_group(dist.group.WORLD)(parts[rank])


# Lengths by rank, the first or last one empty among them; what follows the first dimension; what a number is.
@pytest.mark.parametrize("lengths", [(3, 1), (0, 2), (2, 0, 5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize(
    ("rest", "dtype"),
    [((), torch.float64), ((), torch.bool), ((2,), torch.float32), ((3, 2), torch.bfloat16), ((0,), torch.int64)],
    ids=str,
)
def test_the_rows_of_all_ranks_are_end_to_end_in_the_order_of_ranks(lengths, rest, dtype):
    numbers = torch.randint(0, 100, (sum(lengths), *rest))
    whole = numbers % 2 == 0 if dtype == torch.bool else numbers.to(dtype)
    for found in run_on_ranks(len(lengths), rows_of_a_rank, whole.split(lengths)):
        assert found.dtype == dtype
        assert torch.equal(found, whole)


def leave_argument_alone(rank):
    rows, numbers = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T.requires_grad_(), torch.tensor([[1, 2], [3, 4]]).T
    together, total = gather_over_group(dist.group.WORLD)(rows), sum_over_group(dist.group.WORLD)(numbers)
    return rows.tolist(), together.tolist(), together.requires_grad, numbers.tolist(), total.tolist()


def test_the_argument_is_left_as_it_is_need_not_be_contiguous_and_gets_no_gradient_from_rows():
    rows = [[1, 3], [2, 4]]
    assert run_on_ranks(2, leave_argument_alone) == [(rows, rows + rows, False, rows, [[2, 6], [4, 8]])] * 2


def only_some_ranks(rank):
    pair = dist.new_group([1, 3])
    if rank in (1, 3):
        return gather_over_group(pair)(torch.full((rank,), rank)).tolist(), sum_over_group(pair)(
            torch.tensor(rank)
        ).item()
    return None


def test_ranks_outside_the_group_take_no_part():
    assert run_on_ranks(4, only_some_ranks) == [None, ([1, 3, 3, 3], 4)] * 2


# --- sums


def weighted_squares(rank, num_ranks):
    """Rank r holds x_r and the part (r + 1) * y^2 of the loss, y = sum_r x_r."""
    total = sum_over_group(dist.group.WORLD)
    x = torch.tensor([1.0 + rank, -0.5 * rank], dtype=torch.float64, requires_grad=True)
    y = total(x)
    ((rank + 1) * y.square()).sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_are_those_of_the_sum_of_every_rank_s_loss(num_ranks):
    # y = [1 + 2 (+ 3 + 4), -0.5 (- 1 - 1.5)]; L = (1 + 2 (+ 3 + 4)) y^2; dL/dx_r = 2 (1 + 2 ...) y on every rank.
    y = {2: [3.0, -0.5], 4: [10.0, -3.0]}[num_ranks]
    gradient = {2: [18.0, -3.0], 4: [200.0, -60.0]}[num_ranks]
    for value, grad in run_on_ranks(num_ranks, weighted_squares, num_ranks):
        assert value.tolist() == y
        assert grad.tolist() == gradient


def mean_of_a_split_sequence(rank, num_ranks, logp, weight):
    """exp(mean logp) of one sequence, its tokens spread over the ranks, weighed token by token."""
    total = sum_over_group(dist.group.WORLD)
    mine = logp.chunk(num_ranks)[rank].clone().requires_grad_()
    sums = total(torch.stack([mine.sum(), mine.new_tensor(float(len(mine)))]))
    loss = (weight.chunk(num_ranks)[rank] * torch.exp(sums[0] / sums[1])).sum()
    loss.backward()
    return loss.detach(), mine.grad


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_sequence_split_over_ranks_has_the_loss_and_gradient_of_one_rank(num_ranks):
    logp = torch.randn(11, dtype=torch.float64)
    weight = torch.rand(11, dtype=torch.float64)
    whole = logp.clone().requires_grad_()
    loss = (weight * torch.exp(whole.mean())).sum()
    loss.backward()
    parts = run_on_ranks(num_ranks, mean_of_a_split_sequence, num_ranks, logp, weight)
    torch.testing.assert_close(sum(part for part, _ in parts), loss.detach(), rtol=1e-14, atol=0)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in parts]), whole.grad, rtol=1e-14, atol=0)


def gradient_of_gradient(rank):
    x = torch.tensor(1.0 + rank, dtype=torch.float64, requires_grad=True)
    y = sum_over_group(dist.group.WORLD)(x)
    (first,) = torch.autograd.grad(y**3, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    return first.item(), second.item()


def test_it_can_be_differentiated_twice():
    # Two ranks, y = 3, L = 2 y^3: dL/dx_r = 6 y^2 = 54. The sum over ranks of these is 12 y^2, and its derivative
    # by x_r is 24 y = 72.
    assert run_on_ranks(2, gradient_of_gradient) == [(54.0, 72.0)] * 2
