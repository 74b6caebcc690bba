"""Sampler corrections by hand."""

import inspect
import math

import pytest
import torch

from logitless.errors import ConfigurationError, InputError
from logitless.objective.correction import (
    SamplerCorrection,
    bounded_weight,
    sampler_log_ratio,
)
from logitless.objective.objective import Objective
from logitless.objective.ranges import Ranges
from logitless.objective.surrogate import Reinforce
from tests.objective.batches import batch_of, double

# Sequence A of tokens 0, 1, B of token 2.
RANGES = Ranges(torch.tensor([0, 0, 1]), 2, torch.ones(3, dtype=torch.bool))


def test_the_log_ratio_is_zero_where_the_sampler_gave_none():
    old, sampler = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.5, math.nan, -1.0])
    assert sampler_log_ratio(old.requires_grad_(), sampler).tolist() == [0.5, 0.0, -1.0]
    assert not sampler_log_ratio(old, sampler).requires_grad


@pytest.mark.parametrize(
    ("mode", "low", "high", "expected"),
    [
        ("truncate", None, 3.0, [0.1, 0.5, 3.0, 3.0]),
        ("truncate", 0.5, None, [0.5, 0.5, 3.0, 9.0]),
        ("truncate", 0.5, 3.0, [0.5, 0.5, 3.0, 3.0]),
        ("mask", None, 3.0, [0.1, 0.5, 3.0, 0.0]),  # the bound itself is inside
        ("mask", 0.5, None, [0.0, 0.5, 3.0, 9.0]),
        ("mask", 0.5, 3.0, [0.0, 0.5, 3.0, 0.0]),
        ("mask", None, None, [0.1, 0.5, 3.0, 9.0]),
    ],
)
def test_bounds_truncate_or_mask(mode, low, high, expected):
    weight = torch.tensor([0.1, 0.5, 3.0, 9.0], dtype=torch.float64)
    assert bounded_weight(weight, mode, low, high).tolist() == expected


def test_the_correction_is_the_bounded_exponential():
    # token: exp(log 2), exp(log 3), exp(-log 2) cut to [0.6, 2.5]; sequence: 6 for both
    log_ratio = torch.tensor([math.log(2), math.log(3), -math.log(2)], dtype=torch.float64)
    token = SamplerCorrection(min=0.6, max=2.5)(log_ratio, RANGES)
    assert token.tolist() == pytest.approx([2, 2.5, 0.6])
    masked = SamplerCorrection("sequence", "mask", max=5.0)(log_ratio, RANGES)
    assert masked.tolist() == pytest.approx([0, 0, 0.5])


def test_one_bound_alone_may_lie_on_either_side_of_one():
    log_ratio = torch.tensor([math.log(2), 0, -math.log(4)], dtype=torch.float64)
    assert SamplerCorrection(max=0.5)(log_ratio, RANGES).tolist() == pytest.approx([0.5, 0.5, 0.25])
    assert SamplerCorrection(min=1.5)(log_ratio, RANGES).tolist() == pytest.approx([2, 1.5, 1.5])


def test_an_overflowing_weight_is_bounded_too():
    log_ratio = torch.tensor([200.0, 0.0, 0.0])
    assert SamplerCorrection(max=2.0)(log_ratio, RANGES)[0].item() == 2.0
    assert SamplerCorrection(mode="mask", max=2.0)(log_ratio, RANGES)[0].item() == 0.0


@pytest.mark.parametrize(
    "used", [{"top_p": 0.9}, {"top_k": 1}, {"min_p": 0.05}, {"repetition_penalty": 1.1}, {"others": ("logit_bias",)}]
)
def test_filtered_sampling_is_refused_unless_accepted_by_name(used):
    with pytest.raises(ConfigurationError, match="logit_bias" if "others" in used else next(iter(used))):
        SamplerCorrection(max=2.0).check_sampling(**used)
    SamplerCorrection(max=2.0, filtered_sampling="accept").check_sampling(**used)
    SamplerCorrection(max=2.0).check_sampling()
    SamplerCorrection(max=2.0).check_sampling(top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)


def test_the_sampling_that_is_not_named_is_unfiltered():
    parameters = inspect.signature(SamplerCorrection.check_sampling).parameters
    defaults = {name: each.default for name, each in parameters.items() if name != "self"}
    assert defaults == {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "others": ()}


# --- weights of mean 1


def test_normalized_weights_by_hand():
    # c = 2, 1, 1 after truncation at 2 (from 4, 1, 1); over tokens the mean is 4/3, over completions (2 and 1) 3/2.
    log_ratio = torch.tensor([4.0, 1.0, 1.0]).log()
    token = SamplerCorrection(max=2.0, normalized=True)
    mean = token.block_mean(log_ratio, RANGES)
    assert mean.item() == pytest.approx(4 / 3)
    assert token(log_ratio, RANGES, mean).tolist() == pytest.approx([1.5, 0.75, 0.75])
    sequence = SamplerCorrection("sequence", max=2.0, normalized=True)
    mean = sequence.block_mean(log_ratio, RANGES)
    assert mean.item() == pytest.approx(1.5)
    assert sequence(log_ratio, RANGES, mean).tolist() == pytest.approx([4 / 3, 4 / 3, 2 / 3])


def test_sequences_and_tokens_that_do_not_count_are_not_in_the_mean():
    ranges = Ranges(torch.tensor([0, 0, 1, 2]), 4, torch.tensor([True, False, False, True]))
    log_ratio = torch.tensor([2.0, 1.0, 1.0, 4.0]).log()
    assert SamplerCorrection(mode="mask").block_mean(log_ratio, ranges).item() == pytest.approx(3.0)
    by_sequence = SamplerCorrection("geometric", "mask").block_mean(log_ratio, ranges)
    assert by_sequence.item() == pytest.approx(3.0)  # of sequences 0 (2) and 2 (4)


def test_weights_that_are_all_masked_stay_0():
    correction = SamplerCorrection("token", "mask", max=0.5, normalized=True)
    log_ratio = torch.zeros(3)
    mean = correction.block_mean(log_ratio, RANGES)
    assert mean.item() == 1.0
    assert correction(log_ratio, RANGES, mean).tolist() == [0.0, 0.0, 0.0]


def test_a_normalized_correction_needs_the_blocks_mean():
    with pytest.raises(InputError, match="block_statistics"):
        SamplerCorrection(max=2.0, normalized=True)(torch.zeros(3), RANGES)


def test_an_objective_divides_by_the_mean_of_the_whole_block_however_it_is_cut():
    objective = Objective(surrogate=Reinforce(), correction=SamplerCorrection(max=9.0, normalized=True))
    block = batch_of([0, 1], logp_old=double(3, 1).log() - 2, logp_sampler=[-2, -2])
    statistics = objective.block_statistics(block)
    whole = objective(double(-1, -1), None, block, block=statistics)
    assert whole.correction.tolist() == pytest.approx([1.5, 0.5])
    halves = [objective(double(-1), None, block.take([i]), block=statistics) for i in range(2)]
    assert sum(half.loss.item() for half in halves) == pytest.approx(whole.loss.item())
