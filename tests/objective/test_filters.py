"""Filters by hand, and the quantile against torch's."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.errors import ConfigurationError, InputError
from logitless.objective.filters import (
    FilterInputs,
    OffPolicy,
    SamplerRejection,
    SecondMoment,
    Stale,
    TopEntropy,
    WholeBlock,
    off_policy_keep,
    quantile,
    second_moment_bound,
)
from logitless.objective.objective import Objective
from logitless.objective.over_ranks import one_rank
from logitless.objective.ranges import Ranges
from tests.objective.batches import batch_of, double


def test_off_policy_drops_negative_sequences_that_drifted():
    # drift = mean(drawn - logp): A (1 + 0) / 2 = 0.5 (kept, at the threshold); B 2; C 2 but A >= 0; D with a NaN: 1 / 2
    ranges = Ranges(torch.tensor([0, 0, 1, 2, 3, 3]), 4, torch.ones(6, dtype=torch.bool))
    drawn = torch.tensor([-1.0, -1.0, -1.0, -1.0, math.nan, -1.0])
    logp = torch.tensor([-2.0, -1.0, -3.0, -3.0, -9.0, -2.0])
    advantage = torch.tensor([-1.0, -1.0, -1.0, 0.0, -1.0, -1.0])
    keep = off_policy_keep(logp, drawn, advantage, ranges, 0.5)
    assert keep.tolist() == [True, True, False, True, True, True]


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=20),
    q=st.sampled_from([0.0, 0.1, 0.25, 1 - 0.2, 1 - 0.7, 0.95, 1.0]),
    hidden=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_quantile_equals_torchs_over_the_counted_values(values, q, hidden, dtype):
    counted = torch.tensor([True] * len(values) + [False] * hidden)
    padded = torch.tensor(values + [1e9] * hidden, dtype=dtype)
    truth = torch.quantile(torch.tensor(values, dtype=dtype), q)
    torch.testing.assert_close(quantile(padded, q, counted), truth, rtol=1e-6, atol=1e-6)
    if not hidden:
        torch.testing.assert_close(quantile(padded, q), truth, rtol=1e-6, atol=1e-6)


def test_quantile_of_nothing_is_not_a_number():
    assert quantile(torch.zeros(0), 0.5).isnan()
    assert quantile(torch.zeros(2), 0.5, torch.tensor([False, False])).isnan()


def test_quantile_takes_more_values_than_torchs():
    values = torch.arange(2**24 + 2, dtype=torch.float32).flip(0)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values, 0.5)
    assert quantile(values, 0.5).item() == pytest.approx(2**23, abs=2)


def test_top_entropy_keeps_a_fraction_from_the_top():
    # entropies 0.1 ... 0.5, quantile 0.4: threshold at the 0.6 quantile, 0.1 + 0.4 * 0.6 = 0.34
    entropy = torch.tensor([0.5, 0.1, 0.3, 0.2, 0.4, 99.0], dtype=torch.float64)
    counted = torch.tensor([True] * 5 + [False])
    assert TopEntropy(0.4).threshold(entropy, counted).item() == pytest.approx(0.34)
    assert TopEntropy(1.0).threshold(entropy, counted).item() == pytest.approx(0.1)
    assert TopEntropy(0.0).threshold(entropy, counted).item() == pytest.approx(0.5)


def test_a_filter_without_a_block_threshold_refuses_to_give_one():
    assert not OffPolicy(0.5).settles_once_a_block
    with pytest.raises(NotImplementedError, match="off_policy"):
        OffPolicy(0.5).block_threshold(WholeBlock(torch.ones(1, dtype=torch.bool)))


# --- rejection of what the sampler and the old policy disagree about


def _inputs(log_ratio, sequence, logp_old=None, counted=None):
    log_ratio = torch.tensor(log_ratio, dtype=torch.float64)
    counted = torch.ones(len(log_ratio), dtype=torch.bool) if counted is None else torch.tensor(counted)
    return FilterInputs(
        logp=torch.zeros_like(log_ratio),
        advantage=torch.ones_like(log_ratio),
        trained=counted,
        sequences=Ranges(torch.tensor(sequence), max(sequence) + 1, counted),
        gather=one_rank,
        logp_old=torch.full_like(log_ratio, -1.0) if logp_old is None else torch.tensor(logp_old, dtype=torch.float64),
        sampler_log_ratio=log_ratio,
    )


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        # k2 of D = 1, 0, 0.2, 0.2: 0.5, 0, 0.02, 0.02; the bound is 0.3
        ("token", [False, True, True, True]),
        ("sequence_sum", [False, False, True, True]),
        ("sequence_mean", [True, True, True, True]),  # 0.25, 0.02
        ("sequence_max", [False, False, True, True]),
    ],
)
def test_a_token_goes_by_itself_or_by_its_sequence(over, expected):
    kept = SamplerRejection(0.3, "k2", over).kept(_inputs([1.0, 0.0, 0.2, 0.2], [0, 0, 1, 1]))
    assert kept.tolist() == expected


def test_k1_has_two_bounds_and_its_sum_lets_differences_cancel():
    inputs = _inputs([1.0, -1.0, 0.4, 0.0], [0, 0, 1, 1])
    assert SamplerRejection(0.5, min=-0.3).kept(inputs).tolist() == [False, False, False, True]
    assert SamplerRejection(0.5).kept(inputs).tolist() == [True, False, True, True]  # k1 = -D: too likely for it
    assert SamplerRejection(0.5, "k1", "sequence_sum", min=-0.3).kept(inputs).tolist() == [True, True, False, False]


def test_a_token_at_a_bound_is_kept():
    assert SamplerRejection(0.5, min=-0.5).kept(_inputs([0.5, -0.5], [0, 1])).tolist() == [True, True]


def test_tokens_that_do_not_count_do_not_reject_their_sequence():
    inputs = _inputs([9.0, 0.1], [0, 0], counted=[False, True])
    for over in ("sequence_sum", "sequence_mean", "sequence_max"):
        assert SamplerRejection(0.3, "k2", over).kept(inputs)[1]


def test_two_rejections_keep_what_both_keep_and_each_goes_by_all_tokens():
    # Of tokens k1 = -D in [-0.5, 0.5]: all but the first. Of sequences the largest k2 at most 0.3: 0.5 and 0.405, 0.02.
    batch = batch_of([0, 0, 1, 1, 2], logp_old=[-2] * 5, logp_sampler=[-3, -2, -2.2, -2.2, -1.1])
    token, whole = SamplerRejection(0.5, min=-0.5), SamplerRejection(0.3, "k2", "sequence_max")
    for filters in ((token, whole), (whole, token)):
        output = Objective(filters=filters)(double(*[-2] * 5).requires_grad_(), None, batch)
        assert output.grad_logp.tolist() == [0.0, 0.0, -1.0, -1.0, 0.0]
        assert {name: dropped.tolist() for name, dropped in output.dropped.items()} == {
            "sampler_rejection_token_k1": [True, False, False, False, True],
            "sampler_rejection_sequence_max_k2": [True, True, False, False, True],
        }


def test_one_rejection_keeps_its_name_and_two_of_one_kind_are_refused():
    output = Objective(filters=(SamplerRejection(0.5),))(double(0), None, batch_of(1, logp_sampler=[-2]))
    assert list(output.dropped) == ["sampler_rejection"]
    with pytest.raises(ConfigurationError, match=r"at most once; given sampler_rejection_token_k1, sampler_reject"):
        Objective(filters=(SamplerRejection(0.5), SamplerRejection(0.7)))


def test_a_rejection_needs_the_samplers_log_probs():
    with pytest.raises(InputError, match="logp_sampler"):
        SamplerRejection(1.0).kept(FilterInputs(**{**vars(_inputs([0.0], [0])), "sampler_log_ratio": None}))


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-3, 3, width=32), max_size=30),
    ignored=st.integers(0, 5),
    bound=st.floats(0.001, 4),
)
def test_the_second_moment_of_what_stays_is_within_its_bound_and_no_more_could_stay(values, ignored, bound):
    log_ratio = torch.tensor([*values, *[9.0] * ignored], dtype=torch.float64)
    counted = torch.tensor([True] * len(values) + [False] * ignored, dtype=torch.bool)
    edge = second_moment_bound(log_ratio, counted, bound)
    squares = torch.tensor(values, dtype=torch.float64).square()
    stays = squares <= edge
    if stays.any():
        assert squares[stays].mean() <= bound * (1 + 1e-9)
    more = squares[~stays]
    if len(more):
        longer = torch.cat([squares[stays], more[more == more.min()]])
        assert longer.mean() > bound * (1 - 1e-9)


def test_the_second_moment_may_be_its_bound_and_where_nothing_stays_is_minus_one():
    both = torch.tensor([True, True])
    found = [second_moment_bound(double(0.5, 2), both, bound).item() for bound in (0.25, 0.2)]
    assert [*found, second_moment_bound(double(), both[:0], 0.2).item()] == [0.25, -1.0, -1.0]


def test_the_most_extreme_tokens_of_a_block_go_first():
    # D^2 = 0.01, 0.04, 0.25, 1: means of prefixes 0.01, 0.025, 0.1, 0.325
    log_ratio = [0.1, -0.2, 0.5, -1.0]
    inputs = _inputs(log_ratio, [0, 0, 1, 1])
    for bound, expected in ((0.005, [0, 0, 0, 0]), (0.03, [1, 1, 0, 0]), (0.11, [1, 1, 1, 0]), (1.0, [1, 1, 1, 1])):
        rule = SecondMoment(bound)
        block = WholeBlock(torch.ones(4, dtype=torch.bool), sampler_log_ratio=torch.tensor(log_ratio).double())
        settled = FilterInputs(**{**vars(inputs), "thresholds": {"second_moment": rule.block_threshold(block)}})
        assert rule.kept(settled).tolist() == [bool(x) for x in expected]


def test_the_second_moment_is_settled_for_the_block_or_refused():
    assert SecondMoment().settles_once_a_block
    with pytest.raises(InputError, match="block_statistics"):
        SecondMoment().kept(_inputs([0.1], [0]))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Stale(2), [True, True, False, True, True]),
        (Stale(3), [True] * 5),
        (Stale(0), [True, False, False, False, False]),
        (Stale(2, over="sequence"), [False, False, False, True, True]),
    ],
)
def test_tokens_of_weights_too_many_steps_ago_are_dropped_by_themselves_or_with_their_completion(rule, expected):
    inputs = FilterInputs(**{**vars(_inputs([0.0] * 5, [0, 0, 0, 1, 1])), "lag": torch.tensor([0, 1, 3, 2, 1])})
    assert rule.kept(inputs).tolist() == expected


def test_a_filter_by_age_needs_ages():
    assert Stale(1).needs == {"lag"}
    with pytest.raises(InputError, match=r"TokenBatch\.lag"):
        Stale(1).kept(_inputs([0.0], [0]))
