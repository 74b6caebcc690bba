"""The self-check on a GPU: kernels it selects are bitwise identical to the fixed-order kernel, on other inputs too."""

import pytest
import torch

from logitless.models.kernels.linear import REFERENCE, fixed_order_product
from logitless.models.row_invariant import linear
from logitless.models.row_invariant import self_check as check
from logitless.models.row_invariant.linear import Shape, product

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(
    ("columns", "length", "bias"),
    [(80, 512, False), (164, 512, False), (512, 64, False), (512, 512, True), (1280, 512, False), (896, 4864, False)],
)
def test_the_kernel_selected_for_few_rows_is_bitwise_identical_to_the_fixed_order_kernel(
    columns, length, bias, rows, monkeypatch
):
    """A million numbers: with another order of sums some hundred would differ."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    weight, added = (
        torch.randn(*size, device=device, dtype=torch.bfloat16, generator=generator)
        for size in ((columns, length), (columns,))
    )
    added = added if bias else None
    shape = Shape.of(weight, added)
    plan, finding = check.check_linear(shape)
    monkeypatch.setitem(linear._plans, shape, plan)
    for _ in range(1_000_000 // (rows * columns)):
        x = torch.randn(rows, length, device=device, dtype=torch.bfloat16, generator=generator)
        assert torch.equal(product(x, weight, added), fixed_order_product(x, weight, REFERENCE, bias=added)), finding
