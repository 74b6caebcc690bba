"""Rows of all ranks: their order, unequal lengths, dtypes, and groups of some ranks."""

import pytest
import torch
import torch.distributed as dist

from logitless.distributed import gather_over_group
from tests.ranks import run_on_ranks


def test_one_rank_alone_needs_no_process_group_and_gets_its_own_tensor():
    rows = torch.tensor([1.0, -2.0])
    assert gather_over_group(None)(rows) is rows


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
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T.requires_grad_()
    together = gather_over_group(dist.group.WORLD)(rows)
    return rows.tolist(), together.tolist(), together.requires_grad


def test_the_argument_is_left_as_it_is_need_not_be_contiguous_and_gets_no_gradient():
    rows = [[1, 3], [2, 4]]
    assert run_on_ranks(2, leave_argument_alone) == [(rows, rows + rows, False)] * 2


def only_some_ranks(rank):
    pair = dist.new_group([1, 3])
    return gather_over_group(pair)(torch.full((rank,), rank)).tolist() if rank in (1, 3) else None


def test_ranks_outside_the_group_take_no_part():
    assert run_on_ranks(4, only_some_ranks) == [None, [1, 3, 3, 3], None, [1, 3, 3, 3]]
