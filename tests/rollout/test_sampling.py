import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from logitless.errors import ConfigurationError
from logitless.rollout.sampling import History, SamplingOptions, penalized, sample, sampling_logp


@settings(max_examples=50, deadline=None)
@given(
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([None, 1, 3, 50]),
    top_p=st.sampled_from([0.1, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    penalty=st.sampled_from([1.0, 1.3, 0.8]),
    seed=st.integers(0, 10**6),
)
def test_the_distribution_is_that_of_the_processors_of_transformers(temperature, top_k, top_p, min_p, penalty, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 40, generator=generator) * 3
    ids = torch.randint(0, 40, (5, 7), generator=generator)
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature)])
    if top_k is not None:
        theirs.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        theirs.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        theirs.append(MinPLogitsWarper(min_p))
    options = SamplingOptions(
        max_new_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
    )
    seen = torch.zeros(5, 40, dtype=torch.bool).scatter(1, ids, True)
    expected = theirs(ids, logits.clone()).softmax(-1)
    torch.testing.assert_close(sampling_logp(logits, options, History(seen)).exp(), expected)


def test_presence_and_frequency_are_taken_off_what_the_completion_has_and_bias_is_added():
    """z - presence [n > 0] - frequency n + bias, as OpenAI's API has them."""
    options = SamplingOptions(max_new_tokens=4, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((3, -100.0),))
    counts = torch.tensor([[0, 1, 3, 0]])
    found = penalized(torch.ones(1, 4), options, History(counts=counts))
    assert found.tolist() == [[1.0, 0.25, -0.25, -99.0]]


def test_no_end_can_be_drawn_before_the_minimum_is_reached():
    options = SamplingOptions(max_new_tokens=4, min_new_tokens=2)
    history = History(length=torch.tensor([0, 1, 2]), ends=torch.tensor([2, 0]))
    found = penalized(torch.zeros(3, 4), options, history).isfinite()
    assert found.tolist() == [[False, True, False, True]] * 2 + [[True] * 4]


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    """Sorted 0.5, 0.3, 0.15, 0.05: two tokens hold 0.8, which 0.8 accepts and 0.81 does not."""
    logits = torch.tensor([[0.05, 0.5, 0.15, 0.3]], dtype=torch.float64).log()
    for top_p, kept in ((0.5, 1), (0.79, 2), (0.81, 3), (0.96, 4)):
        logp = sampling_logp(logits, SamplingOptions(max_new_tokens=1, top_p=top_p))
        assert int(logp.isfinite().sum()) == kept
        torch.testing.assert_close(logp.exp().sum(), torch.tensor(1.0, dtype=torch.float64))


def test_a_token_is_drawn_as_often_as_it_is_likely():
    """Evenly spaced uniforms hit each token exactly its share of times."""
    p = torch.tensor([0.125, 0.0, 0.5, 0.25, 0.125])
    uniform = (torch.arange(64, dtype=torch.float64) + 0.5) / 64
    sampled = sample(p.log().expand(64, 5), uniform)
    assert torch.bincount(sampled, minlength=5).tolist() == [8, 0, 32, 16, 8]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), u=st.sampled_from([0.0, 0.5, 1 - 2.0**-32]))
def test_a_filtered_token_is_never_drawn(seed, u):
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(seed)) * 5
    logp = sampling_logp(logits, SamplingOptions(max_new_tokens=1, top_k=3))
    token = sample(logp, torch.full((20,), u, dtype=torch.float64))
    assert logp.gather(1, token[:, None]).isfinite().all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": float("inf")},
        {"logit_bias": ((3, float("nan")),)},
        {"logit_bias": ((3, 1.0), (3, 2.0))},
        {"min_new_tokens": 5},
        {"stop": ("",)},
        {"temperature": 0.0, "top_p": 0.9},
    ],
)
def test_a_value_out_of_range_is_an_error(wrong):
    with pytest.raises(ConfigurationError):
        SamplingOptions(**{"max_new_tokens": 4, **wrong})


def test_an_unknown_key_in_a_recipe_is_an_error():
    recipe = TypeAdapter(SamplingOptions)
    assert recipe.validate_python({"max_new_tokens": 4, "stop": ["\n"], "temperature": 1}).stop == ("\n",)
    with pytest.raises(ValidationError, match="top_q"):
        recipe.validate_python({"max_new_tokens": 4, "top_q": 0.5})


@pytest.mark.parametrize(
    ("options", "filters"),
    [
        ({}, False),
        ({"temperature": 0.7}, False),
        ({"temperature": 0.0}, True),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": 0.5}, True),
        ({"logit_bias": ((3, 1.0),)}, True),
        ({"min_new_tokens": 1}, True),
    ],
)
def test_filters_are_told_from_a_plain_temperature(options, filters):
    assert SamplingOptions(max_new_tokens=4, **options).filters_distribution is filters
