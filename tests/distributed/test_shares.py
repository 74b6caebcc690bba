"""Who does what: every piece once, loads close together, the same answer on every rank."""

from hypothesis import given
from hypothesis import strategies as st

from logitless.distributed.shares import in_order, shares_by_cost

COSTS = st.lists(st.floats(0.0, 1e6), max_size=30)
NUM_RANKS = st.integers(1, 5)


@given(costs=COSTS, num_ranks=NUM_RANKS)
def test_every_piece_is_in_one_share_and_shares_keep_the_order(costs, num_ranks):
    shares = shares_by_cost(costs, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    assert all(list(share) == sorted(share) for share in shares)
    assert shares_by_cost(costs, 1) == [tuple(range(len(costs)))]


@given(costs=COSTS, num_ranks=NUM_RANKS)
def test_no_two_ranks_differ_by_more_than_the_costliest_piece(costs, num_ranks):
    loads = [sum(costs[i] for i in share) for share in shares_by_cost(costs, num_ranks)]
    assert max(loads) - min(loads) <= max(costs, default=0.0) * (1 + 1e-9)


@given(count=st.integers(0, 20), num_ranks=NUM_RANKS)
def test_shares_of_every_nth_come_together_in_the_order_of_the_whole(count, num_ranks):
    assert in_order([list(range(rank, count, num_ranks)) for rank in range(num_ranks)]) == list(range(count))
