"""Tokens sampled on the device: their distribution, and that nothing but their own row decides."""

import pytest
import torch

from logitless.rollout.gpu.token_sampling import key_of, sample_tokens
from logitless.rollout.sampling import History, SamplingOptions, sampling_logp
from tests.models.kernels import ahead

pytest.importorskip("triton")

OPTIONS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "penalty": {"repetition_penalty": 1.7},
    "all": {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rows(count, columns=11):
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(3)).mul(2).to(DEVICE)


def keys(count):
    return torch.tensor([key_of(5, "p", g) for g in range(count)], device=DEVICE)


def positions(count):
    return torch.arange(count, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("name", OPTIONS)
def test_logp_is_that_of_the_processed_distribution_and_nothing_filtered_out_is_drawn(name):
    options, logits = SamplingOptions(max_new_tokens=1, **OPTIONS[name]), rows(6)
    seen = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.3
    sampled = sample_tokens(logits, keys(6), positions(6), options, History(seen))
    expected = sampling_logp(logits, options, History(seen)).gather(1, sampled.token[:, None])[:, 0]
    assert sampled.finite.all()
    assert expected.isfinite().all()
    if name == "temperature":
        assert sampled.logp is None  # the head's, then
    else:
        torch.testing.assert_close(sampled.logp, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["temperature", "all"])
def test_tokens_are_drawn_as_often_as_they_are_likely(name):
    count = (50 if name == "all" else 400) if DEVICE == "cpu" else 20000
    options = SamplingOptions(max_new_tokens=1, **OPTIONS[name])
    logits = rows(1, 6).expand(count, -1).contiguous()
    seen = torch.zeros(logits.shape, dtype=torch.bool, device=DEVICE)
    token = sample_tokens(logits, keys(count), positions(count), options, History(seen)).token
    wanted = sampling_logp(logits[:1], options, History(seen[:1])).exp()[0] * count
    found = torch.bincount(token, minlength=6)
    kept = wanted > 0
    statistic = ((found - wanted).square() / wanted)[kept].sum()
    assert not found[~kept].any()
    assert statistic < 30  # chi-square of at most 5 degrees of freedom: beyond it once in 70,000


def test_a_token_depends_on_its_own_row_alone():
    options, logits = SamplingOptions(max_new_tokens=1, top_p=0.9), rows(12, 1500)
    whole = sample_tokens(logits, keys(12), positions(12), options)
    order = torch.tensor([7, 2, 9], device=DEVICE)
    part = sample_tokens(logits[order], keys(12)[order], positions(12)[order], options)
    assert torch.equal(part.token, whole.token[order])
    assert torch.equal(part.logp, whole.logp[order])


def test_another_position_or_sample_gives_other_noise():
    options, logits = SamplingOptions(max_new_tokens=1), torch.zeros(30, 1500, device=DEVICE)
    same_key = sample_tokens(logits, keys(1).expand(30).contiguous(), positions(30), options).token
    same_place = sample_tokens(logits, keys(30), positions(1).expand(30).contiguous(), options).token
    for tokens in (same_key, same_place):
        assert len(set(tokens.tolist())) > 25
        assert tokens.max() > 1024  # the second tile too


def test_temperature_0_takes_the_lowest_of_the_most_likely_tokens():
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]], device=DEVICE)
    sampled = sample_tokens(logits, keys(2), positions(2), SamplingOptions(max_new_tokens=1, temperature=0.0))
    assert sampled.token.tolist() == [1, 0]
    assert sampled.logp.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_p": 0.5}])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_a_distribution_says_so_and_the_others_are_drawn(options, value):
    logits = rows(3)
    logits[1, 4] = value
    sampled = sample_tokens(logits, keys(3), positions(3), SamplingOptions(max_new_tokens=1, **options))
    assert sampled.finite.tolist() == [True, False, True]
    assert ((sampled.token >= 0) & (sampled.token < 11)).all()


def test_what_is_impossible_is_no_fault_unless_nothing_is_possible():
    logits = rows(2)
    logits[0, :10] = float("-inf")
    logits[1] = float("-inf")
    sampled = sample_tokens(logits, keys(2), positions(2), SamplingOptions(max_new_tokens=1))
    assert sampled.finite.tolist() == [True, False]
    assert sampled.token[0] == 10


@pytest.mark.slow
@pytest.mark.parametrize("capability", ahead.CAPABILITIES)
def test_the_kernels_compile_within_99_kib_and_without_spilling_for(capability):
    found = [ahead.Kernel(*kernel) for kernel in ahead.run("tests.rollout.sample_ahead", str(capability))]
    assert {kernel.name for kernel in found} == {
        *("sample_kernel", "finish_kernel", "filter_kernel", "begin_kernel", "end_kernel", "copy_pages_kernel")
    }
    assert max(kernel.spilled for kernel in found) <= 0
    assert max(kernel.shared_memory for kernel in found) <= 99 * 1024
