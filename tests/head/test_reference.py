"""The oracle against numbers worked out by hand."""

import math

import pytest
import torch

from logitless.errors import UnavailableError
from logitless.head.api import token_scores
from logitless.head.reference import logits
from logitless.types import LMHead


def test_three_tokens_by_hand():
    # logits log(1), log(2), log(5) over 8: p = 1/8, 2/8, 5/8.
    hidden = torch.tensor([[0.0, math.log(2), math.log(5)]], dtype=torch.float64, requires_grad=True)
    scores = token_scores(hidden, torch.eye(3, dtype=torch.float64), torch.tensor([1]), backend="reference")
    assert float(scores.logp.detach()) == pytest.approx(-math.log(4), abs=1e-15)
    entropy = (math.log(8) + 2 * math.log(4) + 5 * math.log(8 / 5)) / 8
    assert float(scores.entropy.detach()) == pytest.approx(entropy, abs=1e-15)
    (of_logp,) = torch.autograd.grad(scores.logp.sum(), hidden, retain_graph=True)
    assert of_logp[0].tolist() == pytest.approx([-1 / 8, 1 - 2 / 8, -5 / 8], abs=1e-15)
    # d entropy / d z_v = -p_v (log p_v + entropy)
    (of_entropy,) = torch.autograd.grad(scores.entropy.sum(), hidden)
    expected = [-p * (math.log(p) + entropy) for p in (1 / 8, 2 / 8, 5 / 8)]
    assert of_entropy[0].tolist() == pytest.approx(expected, abs=1e-15)


def test_every_term_of_the_head_by_hand():
    # hidden @ weight.T = (1, 2); LoRA adds 0.5 * (1 + 2) * (2, -2) = (3, -3); bias (1, 1): (5, 0); scale 2: (10, 0);
    # softcap 5: 5 tanh(2), 0; temperature 0.5: 10 tanh(2), 0.
    head = LMHead(
        weight=torch.eye(2),
        bias=torch.ones(2),
        scale=2.0,
        softcap=5.0,
        lora_a=torch.ones(1, 2),
        lora_b=torch.tensor([[2.0], [-2.0]]),
        lora_scale=0.5,
    )
    z = logits(torch.tensor([[1.0, 2.0]]), head, 0.5)
    assert z[0].tolist() == pytest.approx([10 * math.tanh(2), 0.0], rel=1e-6)


def test_one_token_is_certain():
    scores = token_scores(torch.ones(2, 3), torch.ones(1, 3), torch.tensor([0, 0]), backend="reference")
    assert scores.logp.tolist() == [0, 0]
    assert scores.entropy.tolist() == [0, 0]


def test_a_memory_budget_is_refused():
    with pytest.raises(UnavailableError, match="chunked"):
        token_scores(torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 0]), backend="reference", memory_budget=1)
