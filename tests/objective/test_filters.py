"""Filters by hand, and the quantile against torch's."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.errors import ConfigurationError
from logitless.objective.filters import OffPolicy, TopEntropy, off_policy_keep, quantile
from logitless.objective.ranges import Ranges


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
    for wrong in (-0.1, 1.1):
        with pytest.raises(ConfigurationError, match="from 0 to 1"):
            TopEntropy(wrong)


def test_a_filter_that_settles_nothing_once_a_block_has_no_threshold_to_give():
    assert not OffPolicy(0.5).settles_once_a_block
    with pytest.raises(NotImplementedError, match="off_policy"):
        OffPolicy(0.5).block_threshold(torch.zeros(1), torch.ones(1, dtype=torch.bool))
