"""The choice of tokens by covariance, by hand."""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Barrier

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from logitless.objective.covariance import largest, num_chosen, random_in_band, token_covariance
from logitless.objective.surrogate import KlCov
from logitless.objective.surrogate.policy_loss import SelectionInputs

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


@pytest.mark.parametrize(
    ("fraction", "num_tokens", "expected"),
    [(2e-4, 0, 1), (2e-4, 4999, 1), (2e-4, 5000, 1), (2e-4, 9999, 1), (2e-4, 10000, 2), (0.29, 100, 29), (1 / 3, 6, 2)],
)
def test_the_number_is_a_floored_fraction_and_at_least_one(fraction, num_tokens, expected):
    assert num_chosen(fraction, torch.tensor(num_tokens)).item() == expected


@given(
    key=st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 2.0]), max_size=12),
    eligible=st.integers(0, 2**12 - 1),
    number=st.integers(1, 14),
    cuts=st.lists(st.integers(0, 12), max_size=3),
)
def test_exactly_so_many_are_chosen_and_of_equal_keys_the_first_on_any_number_of_ranks(key, eligible, number, cuts):
    may = [bool(eligible >> index & 1) and value > -math.inf for index, value in enumerate(key)]
    best = sorted((index for index in range(len(key)) if may[index]), key=lambda index: (-key[index], index))
    expected = [index in best[:number] for index in range(len(key))]
    whole, flags = torch.tensor(key), torch.tensor(may, dtype=torch.bool)
    assert largest(whole, flags, torch.tensor(number)).tolist() == expected
    borders = [0, *sorted(min(cut, len(key)) for cut in cuts), len(key)]
    found = on_ranks(
        [partial(largest, whole[start:end], flags[start:end], torch.tensor(number)) for start, end in pairwise(borders)]
    )
    assert torch.cat(found).tolist() == expected


def on_ranks(calls):
    """What each call returns when its ``gather`` puts together the rows that all of them give, in this order."""
    together = Barrier(len(calls))
    given: list[Tensor | None] = [None] * len(calls)

    def gather(rank, rows):
        given[rank] = rows
        together.wait(60)
        everyone = torch.cat(given)
        together.wait(60)
        return everyone

    with ThreadPoolExecutor(len(calls)) as ranks:
        running = [ranks.submit(call, partial(gather, rank)) for rank, call in enumerate(calls)]
        return [each.result(60) for each in running]


def test_one_completion_under_kl_cov_penalises_the_promised_share_of_its_tokens():
    # One advantage: A - mean A is 0 at every token, and so is every covariance.
    logp = -torch.rand(1000, generator=torch.Generator().manual_seed(0))
    inputs = SelectionInputs(logp, torch.ones(1000), torch.ones(1000, dtype=torch.bool))
    assert KlCov(fraction=2e-3, scope="micro_batch").select(inputs).nonzero()[:, 0].tolist() == [0, 1]


def test_ranks_that_draw_the_same_numbers_choose_exactly_so_many_under_clip_cov():
    def draw(gather):
        return random_in_band(
            torch.full((4,), 2.0),
            TRUE,
            torch.tensor(3),
            low=1.0,
            high=5.0,
            generator=torch.Generator().manual_seed(0),
            gather=gather,
        )

    assert torch.cat(on_ranks([draw, draw])).sum() == 3


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
