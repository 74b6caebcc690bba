"""The layers' kernels compile for GPUs that are not there, within their shared memory."""

import pytest

from tests.models.kernels import ahead


@pytest.mark.slow
@pytest.mark.parametrize("capability", ahead.CAPABILITIES)
def test_every_kernel_of_a_layer_compiles_within_99_kib_and_on_hopper_within_its_shared_memory_for(capability):
    pytest.importorskip("triton")
    found = [ahead.Kernel(*kernel) for kernel in ahead.run("tests.models.kernels.layers_ahead", str(capability))]
    on_hopper = {"gated_product_kernel"} if capability == 90 else set()
    assert {kernel.name for kernel in found} == on_hopper | {
        "product_kernel", "norm_kernel", "norm_backward_kernel", "sum_parts_kernel", "gate_kernel",
        "gate_backward_kernel", "low_rank_kernel", "low_rank_kernel_of_rows", "add_low_rank_kernel_of_rows",
        "rotary_kernel", "rotary_backward_kernel", "sinks_kernel", "sinks_backward_kernel",
    }  # fmt: skip
    limit = ahead.SHARED_MEMORY[90] if capability == 90 else 99
    assert max(kernel.shared_memory for kernel in found) <= limit * 1024
