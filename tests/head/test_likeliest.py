"""The likeliest tokens of each row, tile by tile, against full float64 logits."""

import pytest
import torch

from logitless.head import likeliest_tokens, token_scores
from logitless.head.reference import logits
from tests.head.cases import DEVICES, TF32X3, TOLERANCE, Case, exact_copy, problem, score_error

CASES = [
    Case(),
    Case(rows=1, vocabulary=1),
    Case(rows=37, vocabulary=1031, width=17, bias=True, softcap=5.0, scale=0.5, temperature=0.7, lora=3),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("memory_budget", [None, 1])  # 1: the smallest tiles
@pytest.mark.parametrize("case", CASES, ids=str)
def test_they_are_those_of_full_logits_in_order_and_the_first_has_the_bits_of_token_scores(
    case, memory_budget, dtype, device
):
    given = problem(case, device).leaf_copy(dtype)
    k, temperature = min(5, case.vocabulary), float(case.temperature)
    ids, logp = likeliest_tokens(given.hidden, given.head, k, temperature=temperature, memory_budget=memory_budget)
    exact = exact_copy(given)
    expected = logits(exact.hidden, exact.head, temperature).log_softmax(1)
    # of one log-prob; here two logits are subtracted from one
    room = 3 * (TF32X3 if device == "cuda" and dtype == torch.float32 else TOLERANCE[dtype])
    assert (logp - expected.gather(1, ids)).abs().max() <= room
    assert (logp - expected.topk(k).values).abs().max() <= room
    assert all(len(set(row)) == k for row in ids.tolist())
    assert torch.equal(logp[:, 0], token_scores(given.hidden, given.head, ids[:, 0], temperature=temperature).logp)
    assert not logp.requires_grad


@pytest.mark.gpu
def test_of_a_whole_vocabulary_in_bfloat16_they_are_those_of_float64():
    given = problem(Case(rows=67, vocabulary=151936, width=128, dtype=torch.bfloat16, spread=4.0), "cuda")
    ids, logp = likeliest_tokens(given.hidden, given.head, 20)
    exact = exact_copy(given)
    expected = logits(exact.hidden, exact.head, 1.0).log_softmax(1)
    room = 3 * score_error(given)
    assert (logp - expected.gather(1, ids)).abs().max() <= room
    assert (logp - expected.topk(20).values).abs().max() <= room
    assert torch.equal(logp[:, 0], token_scores(given.hidden, given.head, ids[:, 0]).logp)
