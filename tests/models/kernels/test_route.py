"""A router's choice by the kernel: transformers' weights, experts and gradients; ties; numbers that are none."""

import pytest
import torch

from logitless.models.kernels.route import Routing, route, route_backward
from logitless.models.row_invariant.coverage import mlp_of
from logitless.models.row_invariant.experts import mixture_form, router_of
from tests.models.mixtures import mixture

CASES = {
    "qwen3_moe": {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "olmoe": {"norm_topk_prob": False},
    "mixtral": {},
    "glm4_moe": {"n_routed_experts": 12, "num_local_experts": 12, "n_group": 3, "topk_group": 2,
                 "num_experts_per_tok": 3, "routed_scaling_factor": 1.7, "first_k_dense_replace": 0},
    "gpt_oss": {"num_local_experts": 6},
    "llama4_text": {"num_local_experts": 6},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_weights_experts_and_gradients_are_those_of_transformers_router(name):
    model = mixture(name, **CASES[name])
    mlp = mlp_of(model.model.layers[0])
    router, routing = router_of(mlp), mixture_form(mlp, model.config).routing
    x = torch.randn(50, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    if name == "llama4_text":  # the scores of all experts, of which those that are not chosen have 0
        scores, logits = router(x)
        chosen = logits.topk(router.top_k).indices
        theirs = scores.gather(1, chosen)
    else:
        logits, theirs, chosen = router(x)
    order = chosen.sort(-1).indices
    ours, mine = route(logits.detach(), routing, getattr(router, "e_score_correction_bias", None))
    own_order = mine.long().sort(-1).indices
    assert torch.equal(mine.long().gather(1, own_order), chosen.gather(1, order))
    torch.testing.assert_close(ours.gather(1, own_order), theirs.gather(1, order), rtol=2e-6, atol=1e-7)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    in_their_order = torch.empty_like(grad).scatter_(1, order, grad.gather(1, own_order))
    (wanted,) = torch.autograd.grad(theirs, logits, in_their_order, retain_graph=True)
    torch.testing.assert_close(route_backward(logits.detach(), routing, ours, mine, grad), wanted, rtol=1e-5, atol=1e-6)


def test_experts_with_equal_logits_are_chosen_from_the_lowest_number_on():
    _, chosen = route(torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]]), Routing(4))
    assert chosen.tolist() == [[1, 2, 4, 0]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_choose_experts_that_exist(value):
    _, chosen = route(torch.full((3, 5), value), Routing(2))
    assert 0 <= chosen.min() <= chosen.max() < 5


def test_logits_of_which_the_sigmoid_is_1_choose_the_largest():
    weights, chosen = route(torch.tensor([[40.0, 50.0, 45.0]]), Routing(2, "sigmoid of the chosen"))
    assert chosen.tolist() == [[1, 2]]
    assert weights.tolist() == [[1.0, 1.0]]


def test_no_tokens_have_no_choices():
    weights, chosen = route(torch.empty(0, 5), Routing(2))
    assert weights.shape == chosen.shape == (0, 2)
