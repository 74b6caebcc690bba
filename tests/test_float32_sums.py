"""Gradients of bfloat16 weights, summed in float32 by the products that make them."""

import copy

import pytest
import torch
from torch import nn

from logitless.float32_sums import add_rows, sums_in_float32
from logitless.head import fused
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.models.row_invariant.linear import Projection, lay_end_to_end, project
from logitless.train.optim.master_weights import lower_to
from logitless.types import LMHead
from tests.head.interpreter import complete_interpreter, interpreted
from tests.models.row_invariant.test_layers import LENGTHS, hidden_and_gradients, relative, small
from tests.models.tiny import adapted, packed

SIZES = (6, 4, 4)


@pytest.fixture(autouse=True)
def on_the_interpreter() -> None:
    if not interpreted():
        pytest.skip("needs Triton's interpreter")
    complete_interpreter()


def weights(*, together: bool) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = [nn.Parameter(torch.randn(n, 8, generator=generator)) for n in SIZES]
    lower_to(torch.bfloat16, found)
    if together:
        lay_end_to_end(found)
    return found


def left_to_autograd(parameters) -> None:
    """A hook keeps products from adding to the gradient."""
    for parameter in parameters:
        parameter.register_hook(lambda grad: grad)


@pytest.mark.parametrize("together", [True, False])
def test_products_of_micro_batches_add_up_without_a_rounding(together):
    found = weights(together=together)
    exact = [torch.zeros(n, 8, dtype=torch.float64) for n in SIZES]
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(50, 8, generator=generator).bfloat16()
        grads = [torch.randn(50, n, generator=generator).bfloat16() for n in SIZES]
        if number == 1 and together:  # columns of one tensor, as the gate's backward hands them out
            grads = list(torch.cat(grads, 1).split(SIZES, 1))
        torch.autograd.backward(project(x, [Projection(w) for w in found]), grads)
        exact = [e + g.double().T @ x.double() for e, g in zip(exact, grads, strict=True)]
    for weight, wanted in zip(found, exact, strict=True):
        assert weight.grad is not None
        assert weight.grad.dtype == torch.float32
        # Three sums of 50 exact products each, in float32: bfloat16 is 2^16 times coarser.
        assert (weight.grad.double() - wanted).abs().max() < 150 * 2**-24 * 50


def test_gradients_of_lora_factors_and_of_norms_of_heads_are_not_rounded():
    model, inputs = adapted(small("qwen3")), packed(LENGTHS)
    for name, parameter in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            parameter.requires_grad_()
    lower_to(torch.bfloat16, model.parameters())
    model.bfloat16()  # what is frozen
    install_row_invariant(model)
    _, gradients = hidden_and_gradients(model, inputs, torch.randn(sum(LENGTHS), 16, dtype=torch.float64))
    assert len(gradients) > 2
    for name, gradient in gradients.items():
        assert not torch.equal(gradient, gradient.bfloat16().to(gradient.dtype)), name


def test_a_weight_with_a_hook_is_left_to_autograd():
    found = weights(together=True)
    left_to_autograd(found[:1])
    assert [sums_in_float32(w) for w in found] == [False, True, True]
    x = torch.randn(5, 8).bfloat16()
    torch.autograd.backward(project(x, [Projection(w) for w in found]), [torch.ones(5, n).bfloat16() for n in SIZES])
    assert all(w.grad is not None for w in found)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_model_gets_the_gradients_that_autograd_would_sum_up_to_bfloat16(name):
    inputs, grad = packed(LENGTHS), torch.randn(sum(LENGTHS), 16, dtype=torch.float64)
    ours, theirs = small(name), small(name)
    for model in (ours, theirs):
        lower_to(torch.bfloat16, model.parameters())
        install_row_invariant(model)
    left_to_autograd(theirs.parameters())
    _, found = hidden_and_gradients(ours, inputs, grad)
    _, wanted = hidden_and_gradients(theirs, inputs, grad)
    assert found.keys() == wanted.keys()
    for each, gradient in wanted.items():
        assert relative(found[each], gradient) < 2**-8, each


def test_rows_that_were_looked_up_often_get_the_sum():
    weight = nn.Parameter(torch.zeros(7, 3))
    lower_to(torch.bfloat16, [weight])
    row = torch.tensor([5, 0, 5, 5, 2])
    grad = torch.randn(5, 3).bfloat16()
    for _ in range(2):
        add_rows(weight, grad, row)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, 2 * torch.zeros(7, 3).index_add_(0, row, grad.float()))
    assert not weight.grad[[1, 3, 4, 6]].any()


@pytest.mark.parametrize("memory_budget", [None, 0, 10 * 2 * 40])
def test_the_head_adds_to_the_weights_gradient(memory_budget):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(21, 24, generator=generator).bfloat16()
    target = torch.randint(37, (21,), generator=generator)
    weight = nn.Parameter(torch.randn(37, 24, generator=generator))
    lower_to(torch.bfloat16, [weight])
    other = copy.deepcopy(weight)
    other.grad_dtype = torch.float32
    left_to_autograd([other])
    for each in (weight, other):
        for part in (slice(12), slice(12, 21)):
            rows = hidden[part].clone().requires_grad_()
            scores = fused.token_scores(rows, LMHead(each), target[part], memory_budget=memory_budget)
            (scores.logp.sum() + scores.entropy.square().sum()).backward()
    assert weight.grad is not None
    assert other.grad is not None
    assert weight.grad.dtype == other.grad.dtype == torch.float32
    assert relative(weight.grad.double(), other.grad.double()) < 2**-8
    assert not torch.equal(weight.grad, other.grad)  # which was rounded twice
