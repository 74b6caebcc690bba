"""Kernels that are compiled side by side."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@triton.jit
def add_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + y)


def test_what_is_not_compiled_is_compiled_and_not_launched_and_afterwards_nothing_is_left_to_compile():
    from logitless.models.kernels.compiling import compiled_together

    x, threads = torch.zeros(256, device="cuda"), []
    triton.knobs.compilation.listener = lambda **_: threads.append(1)
    try:
        with compiled_together():
            for block in (64, 128, 64):
                add_kernel[1,](x, 1.0, BLOCK=block)
            assert not x.any()
        assert len(threads) == 2
        with compiled_together():
            add_kernel[1,](x, 1.0, BLOCK=64)
        add_kernel[1,](x, 1.0, BLOCK=128)
        assert x.tolist() == [2.0] * 64 + [1.0] * 64 + [0.0] * 128
        assert len(threads) == 2
    finally:
        triton.knobs.compilation.listener = None
