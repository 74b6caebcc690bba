"""Kernels that are compiled side by side: what is done with one when it is compiled."""

import pytest

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from logitless.models.kernels.compiling import ready_to_launch


class Kernel:
    """Asked for its launcher as Triton's is, which makes it then and loads the kernel."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, 0

    @property
    def run(self) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error


def test_a_kernel_is_loaded_as_soon_as_it_is_compiled():
    kernel = Kernel()
    ready_to_launch(kernel)
    assert kernel.asked == 1


def test_a_kernel_that_does_not_fit_is_left_to_its_launch_and_any_other_error_is_raised():
    ready_to_launch(Kernel(OutOfResources(10, 5, "shared memory")))
    with pytest.raises(OSError, match="no compiler"):
        ready_to_launch(Kernel(OSError("no compiler")))
