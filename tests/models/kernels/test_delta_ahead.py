"""The kernels of a gated delta net compile for GPUs that are not there, within their shared memory."""

import pytest

from tests.models.kernels import ahead


@pytest.mark.slow
@pytest.mark.parametrize("capability", ahead.CAPABILITIES)
def test_every_kernel_of_a_gated_delta_net_compiles_within_the_shared_memory_of(capability):
    pytest.importorskip("triton")
    found = [ahead.Kernel(*kernel) for kernel in ahead.run("tests.models.kernels.delta_ahead", str(capability))]
    assert {"scan_kernel", "reverse_kernel", "gradient_kernel", "step_kernel", "advance_kernel"} <= {
        kernel.name for kernel in found
    }
    assert max(kernel.shared_memory for kernel in found) <= ahead.SHARED_MEMORY[capability] * 1024
