"""Packed rows by rank: whole groups, equally many rows, and on one rank the step's own."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from logitless.data.packing import Packing, plan_epoch, rows_by_rank
from logitless.types import PackedInputs

LIMIT = 20


def inputs_of(counts):
    """One prompt token and one scored token of each two; sequences without scored tokens are not read."""
    lengths = tuple(2 * n for n in counts)
    ids = torch.zeros(sum(lengths), dtype=torch.long)
    return PackedInputs(ids, ids, lengths, torch.arange(sum(counts)), counts)


@given(
    counts=st.lists(st.integers(0, 10), min_size=1, max_size=24),
    group_size=st.integers(1, 4),
    num_ranks=st.integers(1, 4),
    tokens_per_step=st.integers(5, 60),
)
def test_each_sequence_with_tokens_is_on_one_rank_with_its_group_and_all_have_equally_many_rows(
    counts, group_size, num_ranks, tokens_per_step
):
    inputs = inputs_of(tuple(counts))
    groups = [list(range(len(counts)))[i : i + group_size] for i in range(0, len(counts), group_size)]
    packing = Packing(LIMIT, hidden_size=8)
    steps = plan_epoch(groups, inputs, tokens_per_step=tokens_per_step, packing=packing, seed=0)
    for step in steps:
        rows = rows_by_rank(step, groups, inputs, num_ranks=num_ranks, packing=packing)
        assert len(rows) == num_ranks
        assert len({len(each) for each in rows}) == 1
        assert not rows[0] or any(each[-1] for each in rows)  # no row that is empty everywhere
        there = [{s for row in each for s in row} for each in rows]
        scored = [s for s in step.sequences if counts[s]]
        assert sorted(s for each in rows for row in each for s in row) == sorted(scored)
        for group in groups:
            assert sum(bool(each & set(group)) for each in there) <= 1
        for row in (row for each in rows for row in each):
            assert sum(inputs.lengths[s] for s in row) <= LIMIT
        assert rows_by_rank(step, groups, inputs, num_ranks=1, packing=packing) == [step.micro_batches]


def test_a_rank_without_a_group_has_empty_rows():
    inputs = inputs_of((3, 3))
    step = plan_epoch([[0, 1]], inputs, tokens_per_step=6, packing=Packing(6), seed=0)[0]
    rows = rows_by_rank(step, [[0, 1]], inputs, num_ranks=2, packing=Packing(6, hidden_size=8))
    assert rows == [((0,), (1,)), ((), ())]


def test_one_long_sequence_weighs_as_much_as_many_short_ones():
    inputs = inputs_of((10, 2, 2, 2, 2, 2))  # 20 + 400 / 12 = 53.3 against 4 + 16 / 12 = 5.3 each
    groups = [[s] for s in range(6)]
    step = plan_epoch(groups, inputs, tokens_per_step=99, packing=Packing(40), seed=0)[0]
    rows = rows_by_rank(step, groups, inputs, num_ranks=2, packing=Packing(40, hidden_size=1))
    assert rows[0] == ((0,),)
    assert sorted(rows[1][0]) == [1, 2, 3, 4, 5]
