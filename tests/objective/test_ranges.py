"""Sums over contiguous ranges: exact, local, deterministic, differentiable."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.errors import InputError
from logitless.objective.ranges import Ranges, turn_ranges
from tests.objective.counted import Counted


def ranges_of(lengths, counted=None):
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
    counted = torch.ones(len(index), dtype=torch.bool) if counted is None else torch.tensor(counted, dtype=torch.bool)
    return Ranges(index, len(lengths), counted)


def test_only_counted_tokens_enter_a_sum_whatever_the_others_hold():
    ranges = ranges_of([3, 2], counted=[True, False, True, False, False])
    values = torch.tensor([1.0, math.nan, 4.0, math.inf, math.nan])
    assert ranges.sum(values).tolist() == [5.0, 0.0]
    assert ranges.mean(values).tolist() == [2.5, 0.0]


def test_a_nan_stays_in_its_own_range():
    ranges = ranges_of([1, 1, 1])
    assert ranges.sum(torch.tensor([1.0, math.nan, 2.0])).isnan().tolist() == [False, True, False]


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(0, 7), max_size=6), seed=st.integers(0, 99))
def test_sum_mean_and_spread_agree_with_a_loop_in_value_and_gradient(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    counted = (torch.rand(total, generator=generator) < 0.7).tolist()
    values = torch.randn(total, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(total, generator=generator, dtype=torch.float64)
    ranges = ranges_of(lengths, counted)
    found = (ranges.spread(ranges.mean(values) * ranges.sum(values)) * weights).sum()
    found.backward()
    reference = values.detach().clone().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    start = 0
    for length in lengths:
        here = slice(start, start + length)
        chosen = reference[here][torch.tensor(counted[here], dtype=torch.bool)]
        loss = loss + chosen.sum() / max(len(chosen), 1) * chosen.sum() * weights[here].sum()
        start += length
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)
    if total:
        loss.backward()
        torch.testing.assert_close(values.grad, reference.grad, rtol=1e-12, atol=1e-12)


def test_float32_sums_are_correctly_rounded_after_a_large_prefix():
    # A float32 (or differenced) cumulative sum of 1e6 terms near 1e4 would lose the second range altogether.
    large = torch.full((1_000_000,), 1e4)
    small = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 1e-3
    ranges = ranges_of([1_000_000, 1000])
    total = ranges.sum(torch.cat([large, small]))[1].item()
    assert total == torch.tensor(math.fsum(small.tolist())).item()


def test_sums_are_bitwise_repeatable_and_do_not_depend_on_neighbours():
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    together = ranges_of([2000, 3000]).sum(values)
    alone = ranges_of([3000]).sum(values[2000:])
    assert together[1].item() == alone[0].item()
    assert torch.equal(together, ranges_of([2000, 3000]).sum(values))


def test_turns_are_ranges_of_their_own_inside_each_sequence():
    sequence, turn = torch.tensor([0, 0, 0, 2, 2]), torch.tensor([0, 0, 2, 0, 1])
    counted = torch.ones(5, dtype=torch.bool)
    values = torch.tensor([1.0, 3.0, 5.0, 7.0, 9.0])
    for max_turns in (None, 3):
        ranges = turn_ranges(sequence, 3, turn, counted, max_turns=max_turns)
        assert ranges.spread(ranges.mean(values)).tolist() == [2.0, 2.0, 5.0, 7.0, 9.0]
    empty = torch.zeros(0, dtype=torch.long)
    assert turn_ranges(empty, 2, empty, empty.bool()).index.shape == (0,)


@pytest.mark.parametrize(
    ("turn", "options", "message"),
    [
        ([1, 0], {}, "do not decrease"),
        ([0, 5], {"max_turns": 5}, r"range\(5\)"),
        ([-1, 0], {"max_turns": 5}, r"range\(5\)"),
        ([0, 1], {"sum_over_ranks": lambda part: part}, "max_turns"),
    ],
)
def test_turn_ids_that_cannot_be_numbered_are_refused(turn, options, message):
    counted = torch.ones(2, dtype=torch.bool)
    with pytest.raises(InputError, match=message):
        turn_ranges(torch.tensor([0, 0]), 1, torch.tensor(turn), counted, **options)


def test_a_turn_id_may_fall_back_where_a_new_sequence_begins():
    counted = torch.ones(2, dtype=torch.bool)
    assert turn_ranges(torch.tensor([0, 1]), 2, torch.tensor([3, 0]), counted).index.tolist() == [0, 1]


@pytest.mark.parametrize("num_tokens", [2, 131072])
def test_many_short_sequences_cost_no_loop(num_tokens):
    values = torch.rand(num_tokens, requires_grad=True)
    with Counted() as counted:
        ranges = ranges_of([1] * num_tokens)
        ranges.spread(ranges.mean(values)).sum().backward()
    assert 0 < counted.operations < 100
    assert counted.elements < 100 * num_tokens
