"""Token weights: hand-worked numbers, sums to 1 where they should, and no dependence on the split of a step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.errors import InputError
from logitless.objective.weighting import (
    ConstantLength,
    MicroBatchTokenMean,
    SequenceMean,
    SequenceSum,
    TokenMean,
    Totals,
)

COUNTS = (3, 0, 1)
STEP = Totals(num_tokens=10, num_sequences=5, num_micro_batches=4)


def weights(weighting, counts=COUNTS, totals=STEP, **more):
    return weighting(counts, totals, dtype=torch.float64, **more).tolist()


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        (TokenMean(), [1 / 10] * 4),
        (SequenceMean(), [1 / 15, 1 / 15, 1 / 15, 1 / 5]),
        (ConstantLength(7), [1 / 35] * 4),
        (SequenceSum(), [1 / 5] * 4),
        (MicroBatchTokenMean(), [1 / 16] * 4),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_weights_by_hand(weighting, expected):
    assert weights(weighting) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("weighting", [TokenMean, SequenceMean, ConstantLength, SequenceSum])
def test_in_block_scope_a_step_is_an_equal_share_of_the_block(weighting):
    # A block of 20 tokens in 10 sequences and K = 2 steps: K / N_block, K / (B_block |S|), ...
    knobs = {"max_new_tokens": 7} if weighting is ConstantLength else {}
    block = Totals(num_tokens=20, num_sequences=10, num_steps=2.0)
    assert weights(weighting(scope="block", **knobs), totals=block) == pytest.approx(weights(weighting(**knobs)))


def test_trl_s_num_items_in_batch_is_a_block_of_fractional_steps():
    # steps_per_generation 6, accumulation 4, 300 tokens in the generation batch: 6 / (4 * 300)
    generation = Totals(num_tokens=300, num_sequences=60, num_steps=6 / 4)
    assert weights(TokenMean(scope="block"), totals=generation) == pytest.approx([6 / (4 * 300)] * 4, rel=1e-15)


def test_totals_over_ranks_add_up_counts_and_leave_the_number_of_steps():
    here, there = Totals(7, 3, num_steps=2.0, num_micro_batches=2), Totals(5, 0, num_steps=2.0)
    everything = here.over_ranks(lambda counts: counts + torch.tensor([there.num_tokens, there.num_sequences, 1]))
    assert everything == Totals(12, 3, num_steps=2.0, num_micro_batches=3)


def test_dropping_truncated_completions_takes_their_tokens_out_of_n_and_leaves_them_in_b():
    truncated = (True, False, False)
    totals = Totals.of(COUNTS, truncated)
    assert (totals.num_tokens, totals.num_sequences) == (1, 3)
    assert weights(TokenMean(), totals=totals, truncated=truncated) == [0, 0, 0, 1]
    assert weights(SequenceMean(), totals=totals, truncated=truncated) == pytest.approx([0, 0, 0, 1 / 3])
    assert weights(MicroBatchTokenMean(), totals=totals, truncated=truncated) == [0, 0, 0, 1]
    assert weights(SequenceSum(), totals=totals, truncated=truncated) == pytest.approx([0, 0, 0, 1 / 3])


def test_all_truncated_or_no_token_gives_weights_of_zero_not_infinity():
    everything = (True, True, True)
    for weighting in (TokenMean(), SequenceMean(), ConstantLength(7), SequenceSum(), MicroBatchTokenMean()):
        assert weights(weighting, totals=Totals.of(COUNTS, everything), truncated=everything) == [0, 0, 0, 0]
        assert weights(weighting, counts=(0, 0), totals=Totals.of((0, 0))) == []
        assert weights(weighting, counts=(), totals=Totals.of(())) == []


counts_of_a_step = st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any)


@given(counts=counts_of_a_step)
@settings(max_examples=40, deadline=None)
def test_weights_of_a_step_sum_to_one_over_what_each_mean_is_taken_of(counts):
    totals = Totals.of(tuple(counts))
    filled = sum(count > 0 for count in counts)
    assert math.isclose(sum(weights(TokenMean(), tuple(counts), totals)), 1)
    assert math.isclose(sum(weights(MicroBatchTokenMean(), tuple(counts), totals)), 1)
    # Of the sequences: an empty one's share goes to nobody.
    assert math.isclose(sum(weights(SequenceMean(), tuple(counts), totals)), filled / len(counts))
    assert math.isclose(sum(weights(SequenceSum(), tuple(counts), totals)), sum(counts) / len(counts))
    assert math.isclose(sum(weights(ConstantLength(6), tuple(counts), totals)), sum(counts) / len(counts) / 6)


@given(counts=counts_of_a_step, cut=st.integers(0, 8), flags=st.lists(st.booleans(), min_size=8, max_size=8))
@settings(max_examples=40, deadline=None)
def test_weights_made_micro_batch_by_micro_batch_are_those_of_the_step(counts, cut, flags):
    counts, flags = tuple(counts), tuple(flags[: len(counts)])
    totals = Totals.of(counts, flags)
    for weighting in (TokenMean(), SequenceMean(), ConstantLength(6), SequenceSum()):
        parts = [
            weights(weighting, counts[part], totals, truncated=flags[part]) for part in (slice(cut), slice(cut, None))
        ]
        assert parts[0] + parts[1] == weights(weighting, counts, totals, truncated=flags)


def test_the_micro_batch_mean_depends_on_the_cut_and_sums_to_one():
    totals = Totals(num_tokens=4, num_sequences=2, num_micro_batches=2)
    assert weights(MicroBatchTokenMean(), (3,), totals) == pytest.approx([1 / 6] * 3)
    assert weights(MicroBatchTokenMean(), (1,), totals) == [1 / 2]


def test_counts_may_be_a_tensor_and_weights_are_float32_unless_asked():
    actual = TokenMean()(torch.tensor(COUNTS), STEP)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, torch.full((4,), 0.1))


@pytest.mark.parametrize(
    ("counts", "totals"),
    [((3, 1), Totals(num_tokens=3, num_sequences=2)), ((1, 0, 0), Totals(num_tokens=3, num_sequences=2))],
)
def test_totals_smaller_than_the_part_are_refused(counts, totals):
    with pytest.raises(InputError, match="totals of the whole step"):
        TokenMean()(counts, totals)


@pytest.mark.parametrize(
    "wrong", [{"num_tokens": -1}, {"num_sequences": -1}, {"num_steps": 0.0}, {"num_micro_batches": 0}]
)
def test_impossible_totals_are_refused(wrong):
    with pytest.raises(InputError, match="counts of at least 0"):
        Totals(**{"num_tokens": 1, "num_sequences": 1, **wrong})


def test_flags_of_other_sequences_are_refused():
    with pytest.raises(InputError, match="truncated flag for each of 3"):
        TokenMean()(COUNTS, STEP, truncated=(True,))


def test_a_constant_length_without_max_new_tokens_is_refused():
    with pytest.raises(InputError, match="max_new_tokens=None"):
        ConstantLength()(COUNTS, STEP)


def test_the_mean_of_micro_batches_is_a_steps_own_under_totals_of_a_block():
    # two micro-batches, 4 tokens here: 1 / (2 * 4), however many steps the block has
    block = Totals(num_tokens=64, num_sequences=8, num_steps=4.0, num_micro_batches=2)
    assert MicroBatchTokenMean()((1, 3), block).tolist() == [0.125] * 4


def test_what_a_weighting_is_normalised_over_is_the_scope_that_it_has():
    assert [TokenMean(scope=scope).spans_block for scope in ("step", "block")] == [False, True]
    assert not MicroBatchTokenMean().spans_block


def test_the_rollouts_limit_fills_in_a_length_that_was_left_open_and_no_other():
    assert ConstantLength().for_rollouts_of(7) == ConstantLength(7)
    assert ConstantLength(5).for_rollouts_of(7) == ConstantLength(5)
    assert TokenMean().for_rollouts_of(7) == TokenMean()
