"""Kernels of gated delta nets on a GPU, of widths that published models do not have too."""

import pytest
import torch

from logitless.models.kernels.delta_launch import Chunks
from logitless.models.row_invariant.delta_net import DeltaRule
from tests.models.kernels.test_delta import ROUNDINGS, draw, recurrent, relative
from tests.rounding import of_roundings

pytestmark = pytest.mark.gpu


WIDTHS = [(16, 32), (16, 64), (32, 64), (64, 128), (128, 128), (128, 64)]


@pytest.mark.parametrize(
    ("dtype", "widths"),  # float32's kernels of wider heads compile for minutes
    [*((torch.bfloat16, widths) for widths in WIDTHS), (torch.float32, (16, 32))],
    ids=str,
)
def test_outputs_and_gradients_of_any_widths_are_those_of_float64_and_the_same_again(dtype, widths):
    lengths = [130] * 64  # of few programs, memory that is not theirs may hold what they need
    inputs, grad = draw(sum(lengths), dtype, widths=widths), draw(sum(lengths), dtype, seed=1, widths=widths)[2]
    exact = [x[:130].double().requires_grad_() for x in inputs]
    wanted = recurrent(exact, lengths[:1])
    wanted.backward(grad[:130].double())
    found = []
    for _ in range(3):
        leaves = [x.cuda().requires_grad_() for x in inputs]
        out = DeltaRule.apply(*leaves, Chunks.of(lengths, device="cuda"))
        out.backward(grad.cuda())
        found.append([out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    assert all(torch.equal(*pair) for again in found[1:] for pair in zip(again, found[0], strict=True))
    # Sums of a chunk's 64 terms are float32's, so that their roundings count beside those of float32 inputs.
    bound = of_roundings(dtype, ROUNDINGS * (8 if dtype == torch.float32 else 1))
    for mine, right in zip(found[0], [wanted.detach(), *(x.grad for x in exact)], strict=True):
        assert relative(mine[:130], right) < 2 * bound
