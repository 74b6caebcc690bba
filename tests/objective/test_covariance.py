"""The choice of tokens by covariance, by hand."""

import math

import pytest
import torch

from logitless.objective.covariance import largest, num_chosen, random_in_band, token_covariance

TRUE = torch.tensor([True] * 4)


def test_covariance_is_centred_over_counted_tokens():
    # mean A = (1 + 1 - 2) / 3 = 0, mean logp = (-1 - 2 - 3) / 3 = -2
    advantage = torch.tensor([1.0, 1.0, -2.0, 50.0])
    logp = torch.tensor([-1.0, -2.0, -3.0, math.nan])
    covariance = token_covariance(advantage, logp.requires_grad_(), torch.tensor([True, True, True, False]))
    assert covariance[:3].tolist() == [1.0, 0.0, 2.0]
    assert not covariance.requires_grad


def test_covariance_means_are_over_all_ranks():
    # the other rank holds A = -1, logp = -3: means 0 and -2 over both
    advantage, logp, counted = torch.tensor([1.0]), torch.tensor([-1.0]), torch.tensor([True])
    other = torch.tensor([[1.0, -1.0, -3.0]])  # how many, A, logp
    covariance = token_covariance(advantage, logp, counted, lambda part: torch.cat([part, other]))
    assert covariance.tolist() == [1.0]


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 1), (4999, 1), (5000, 1), (9999, 1), (10000, 2)])
def test_the_number_is_a_floored_fraction_and_at_least_one(num_tokens, expected):
    assert num_chosen(2e-4, torch.tensor(num_tokens)).item() == expected


def test_the_largest_are_chosen_among_the_eligible():
    key = torch.tensor([5.0, 1.0, 3.0, 4.0])
    eligible = torch.tensor([False, True, True, True])
    assert largest(key, eligible, torch.tensor(2)).tolist() == [False, False, True, True]
    assert largest(key, eligible, torch.tensor(9)).tolist() == eligible.tolist()
    assert largest(key, TRUE, torch.tensor(9)).tolist() == [True] * 4
    assert largest(key, ~TRUE, torch.tensor(2)).tolist() == [False] * 4
    assert largest(key[:0], TRUE[:0], torch.tensor(1)).shape == (0,)


def test_the_largest_are_chosen_over_all_ranks():
    key = torch.tensor([5.0, 1.0, 3.0, 4.0])
    other = torch.tensor([4.5, 0.0])
    assert largest(key, TRUE, torch.tensor(2), lambda part: torch.cat([other, part])).tolist() == [True] + [False] * 3


def test_a_random_choice_stays_in_the_band_and_reaches_every_token_of_it():
    covariance = torch.tensor([1.0, 1.5, 4.9, 5.0])  # the bounds themselves are outside
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(4)
    for _ in range(200):
        chosen = random_in_band(covariance, TRUE, torch.tensor(1), low=1.0, high=5.0, generator=generator)
        assert chosen.sum() == 1
        counts += chosen
    assert counts[[0, 3]].tolist() == [0.0, 0.0]
    assert 60 < counts[1] < 140  # a fair coin, 200 tosses: 5.6 standard deviations


def test_a_random_choice_is_the_seeds():
    covariance = torch.full((50,), 2.0)
    eligible = torch.ones(50, dtype=torch.bool)

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return random_in_band(covariance, eligible, torch.tensor(5), low=1.0, high=5.0, generator=generator)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert draw(1).sum() == 5
