"""Attention's kernels compile for GPUs that are not here, within their shared memory."""

import pytest

from tests.models.kernels.ahead import SHARED_MEMORY, Kernel, run

PLAIN = 99
"""KiB that a launch without TMA may take on every GPU."""

NAMES = {
    "attention_forward", "query_gradient", "key_gradient", "sum_key_parts", "decode_shared", "decode_own",
    "merge_splits",
}  # fmt: skip


def compiled(capability, *widths):
    rows = run("tests.models.kernels.attention_ahead", str(capability), *map(str, widths))
    found = [Kernel(*row[1:]) for row in rows]
    assert {kernel.name for kernel in found} == NAMES
    return found


@pytest.mark.slow
def test_every_kernel_compiles_without_tma_under_99_kib_at_the_largest_width():
    assert max(kernel.shared_memory for kernel in compiled(86, 256)) <= PLAIN * 1024


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 120])
def test_every_width_compiles_without_tma_under_99_kib(capability):
    assert max(kernel.shared_memory for kernel in compiled(capability, 64, 96, 128, 256)) <= PLAIN * 1024


@pytest.mark.slow
def test_hopper_multiplies_by_warp_groups():
    found = compiled(90, 128)
    assert max(kernel.shared_memory for kernel in found) <= SHARED_MEMORY[90] * 1024
    products = {kernel.name: kernel.warp_group_products for kernel in found}
    assert all(products[name] > 0 for name in ("attention_forward", "query_gradient", "key_gradient"))


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 96, 256])
def test_hopper_compiles_every_width(width):
    assert max(kernel.shared_memory for kernel in compiled(90, width)) <= SHARED_MEMORY[90] * 1024
