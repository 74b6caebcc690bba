"""The tree of micro-batches: every one of them is somewhere once, ranks have equally many, and the sum is one sum."""

import pytest
import torch

from logitless.distributed.tree import TreeSum, places_in_tree


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_every_micro_batch_has_one_place_and_ranks_have_as_many_but_for_one(count, num_ranks):
    shares = [[i for i in places_in_tree(count, rank, num_ranks) if i is not None] for rank in range(num_ranks)]
    assert sorted(i for share in shares for i in share) == list(range(count))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_sums_of_subtrees_along_the_rest_of_the_tree_are_bitwise_those_of_one_rank(count):
    generator = torch.Generator().manual_seed(count)
    parts = [torch.randn(1000, generator=generator) * 10.0 ** (i % 5) for i in range(count)]

    def of_rank(rank, num_ranks):
        total = TreeSum()
        for place in places_in_tree(count, rank, num_ranks):
            total.add([None if place is None else parts[place].clone()])
        return total.whole()

    (one,) = of_rank(0, 1)
    for num_ranks in (2, 4, 8):
        rest = TreeSum()
        for rank in range(num_ranks):
            rest.add(of_rank(rank, num_ranks))
        assert torch.equal(rest.whole()[0], one)
    assert torch.allclose(one, torch.stack(parts).sum(0), rtol=1e-4, atol=1e-1)


def test_a_tensor_that_no_leaf_has_is_absent_from_the_sum():
    total = TreeSum()
    total.add([None, torch.ones(1)])
    total.add([None, None])
    assert total.whole() == [None, torch.ones(1)]
