"""Rows that are taken several times, and the one deterministic sum that is their gradient."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from logitless.models.repeated_rows import RepeatedRows


@given(index=st.lists(st.integers(0, 6), max_size=24))
def test_rows_and_gradients_are_those_of_plain_indexing(index):
    index = torch.tensor(index, dtype=torch.long)
    x = torch.randn(7, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(len(index), 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, expected = RepeatedRows.of(index).take(x), x[index]
    assert torch.equal(found, expected)
    mine, plain = (torch.autograd.grad((out * weight).sum(), x)[0] for out in (found, expected))
    torch.testing.assert_close(mine, plain, rtol=1e-14, atol=1e-14)


def test_a_rows_gradient_is_summed_in_float32_and_rounded_once():
    x = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    rows = RepeatedRows.of(torch.zeros(257, dtype=torch.long))
    parts = torch.full((257, 1), 1.0 / 256, dtype=torch.bfloat16)
    parts[0] = 1.0
    rows.take(x).backward(parts)
    assert x.grad.flatten().tolist() == [2.0, 0.0]  # in bfloat16, 1 + 1/256 is 1 again


def test_a_second_derivative_is_whole():
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    rows = RepeatedRows.of(torch.tensor([0, 2, 0, 0]))
    assert torch.autograd.gradgradcheck(lambda x: rows.take(x).pow(3), x)
