"""The kernels of a mixture of experts compile for GPUs that are not there, within their shared memory."""

import pytest

from tests.models.kernels import ahead


@pytest.mark.slow
@pytest.mark.parametrize("capability", ahead.CAPABILITIES)
def test_every_kernel_of_a_mixture_compiles_within_the_shared_memory_of(capability):
    pytest.importorskip("triton")
    found = [ahead.Kernel(*kernel) for kernel in ahead.run("tests.models.kernels.experts_ahead", str(capability))]
    assert {kernel.name for kernel in found} == {
        "grouped_kernel", "gated_kernel", "gated_backward_kernel", "outer_kernel", "combine_kernel", "by_expert_kernel",
        "route_kernel", "route_backward_kernel",
    }  # fmt: skip
    assert max(kernel.shared_memory for kernel in found) <= ahead.SHARED_MEMORY[capability] * 1024
    assert (
        max(kernel.narrow_loads for kernel in found if kernel.name == "gated_kernel") <= 2
    )  # of biases, not of weights
