"""Autograd functions as one node: the gradients they have as nodes of their own, and nothing else changed."""

from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from logitless.errors import UnavailableError
from logitless.models.one_node import apply, one_node, recomputed
from logitless.models.row_invariant import layers
from logitless.models.row_invariant.layers import install_row_invariant
from tests.head.interpreter import interpreted
from tests.models.row_invariant.test_layers import LENGTHS, hidden_and_gradients, small
from tests.models.tiny import adapted, packed


class Scaled(torch.autograd.Function):
    """x * weight, and x."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return x * weight, x

    @staticmethod
    def backward(ctx, grad, grad_x):
        x, weight = ctx.saved_tensors
        gradient = 0 if grad is None else grad * weight
        return gradient + (0 if grad_x is None else grad_x), None if grad is None else (grad * x).sum()


def scaled_twice(x, weight):
    """(x * weight^2, x, x * weight): a tensor that is used twice, and one that goes through."""
    once, x = apply(Scaled, x, weight)
    twice, once = apply(Scaled, once, weight)
    return twice, x, once


def leaves():
    return torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor(3.0, requires_grad=True)


def assert_same_gradients(found):
    (x, weight), (same_x, same_weight) = found
    assert torch.equal(x, same_x)
    assert (weight is None and same_weight is None) or torch.equal(weight, same_weight)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_gradients_are_those_of_separate_nodes(used):
    found = []
    for whole in (True, False):
        x, weight = leaves()
        outs = one_node(scaled_twice, [x, weight]) if whole else scaled_twice(x, weight)
        sum((i + 2) * outs[i].sum() for i in used).backward()
        found.append((x.grad, weight.grad))
    assert_same_gradients(found)


def test_a_retained_graph_goes_backward_again_with_the_same_bits():
    x, weight = leaves()
    out, *_ = one_node(scaled_twice, [x, weight])
    first = torch.autograd.grad(out.sum(), [x, weight], retain_graph=True)
    second = torch.autograd.grad(out.sum(), [x, weight])
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_what_was_saved_and_changed_since_is_noticed():
    x, weight = leaves()
    out, *_ = one_node(scaled_twice, [x, weight])
    with torch.no_grad():
        weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_gradient_of_a_gradient_is_refused():
    x, weight = leaves()
    out, *_ = one_node(scaled_twice, [x, weight])
    with pytest.raises(UnavailableError, match="differentiated twice"):
        torch.autograd.grad(out.square().sum(), weight, create_graph=True)


class Times(torch.autograd.Function):
    """x * weight, whose gradient is float32."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, grad.float() * x.float()


@pytest.mark.parametrize("hooked", [False, True])
def test_a_parameter_that_sums_in_float32_gets_its_gradient_from_the_node_unless_somebody_hooks_it(hooked):
    weight, seen = torch.nn.Parameter(torch.tensor([1.0, 3.0], dtype=torch.bfloat16)), []
    weight.grad_dtype = torch.float32
    if hooked:
        weight.register_hook(lambda grad: seen.append(grad.clone()))
    x = torch.tensor([2.0, 1 / 3], dtype=torch.bfloat16, requires_grad=True)
    expected = torch.zeros(2)
    for factor in (1.0, 1 / 256, 3.0):
        (out,) = one_node(lambda x, w: (apply(Times, x, w),), [x, weight])
        (factor * out).sum().backward()
        expected += torch.tensor(factor).bfloat16().float() * x.detach().float()
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, expected)
    assert len(seen) == (3 if hooked else 0)


def test_what_needs_no_gradient_gets_none():
    x, weight = torch.ones(2), torch.tensor(3.0, requires_grad=True)
    out, *_ = one_node(scaled_twice, [x, weight])
    out.sum().backward()
    assert x.grad is None
    assert weight.grad == 12.0
    assert not one_node(scaled_twice, [x, weight.detach()])[0].requires_grad


def test_a_tensor_that_was_forgotten_is_noticed():
    x, weight = torch.ones(2, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    with pytest.raises(AssertionError, match="an input of the node"):
        one_node(lambda x: scaled_twice(x, weight), [x])
    assert one_node(scaled_twice, [x, weight])[0].requires_grad  # and the next node is whole again


def test_hooks_see_what_is_saved():
    seen = []
    x, weight = torch.ones(2, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    with saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        one_node(scaled_twice, [x, weight])
    assert len(seen) == 4


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1, 2)])
def test_a_node_whose_functions_run_again_keeps_what_it_was_given_and_has_the_same_gradients(used):
    found, seen = [], []
    for context in (recomputed, nullcontext):
        x, weight = leaves()
        with context(), saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            outs = one_node(lambda x, w=weight: scaled_twice(x, w), [x], [weight])
            sum((i + 2) * outs[i].sum() for i in used).backward()
        if context is recomputed:
            assert [each.tolist() for each in seen if each.ndim] == [[1.0, 2.0]]
        found.append((x.grad, weight.grad))
    assert_same_gradients(found)


def test_without_gradients_a_function_is_its_forward_alone(monkeypatch):
    monkeypatch.setattr(Scaled, "apply", None)
    with torch.no_grad():
        out, *_ = one_node(lambda: scaled_twice(torch.ones(2), torch.tensor(3.0)), [])
    assert out.tolist() == [9.0, 9.0]


@pytest.mark.skipif(not interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    ("name", "lora"), [("qwen2", False), ("qwen3", True), ("gemma2", False), ("phi3", True)], ids=str
)
def test_a_layer_as_one_node_has_the_bits_of_its_functions_as_nodes(name, lora, monkeypatch):
    model, inputs = small(name), packed(LENGTHS)
    model = adapted(model) if lora else model
    install_row_invariant(model)
    grad = torch.randn(sum(LENGTHS), 16, dtype=torch.float64)
    hidden, gradients = hidden_and_gradients(model, inputs, grad)
    monkeypatch.setattr(layers, "one_node", lambda run, given, _: run(*given))
    same_hidden, same = hidden_and_gradients(model, inputs, grad)
    assert torch.equal(hidden, same_hidden)
    assert gradients.keys() == same.keys()
    for each, gradient in gradients.items():
        assert torch.equal(gradient, same[each]), each
