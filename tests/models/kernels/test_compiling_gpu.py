"""Kernels that are compiled side by side."""

import threading

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

pytestmark = pytest.mark.gpu


@triton.jit
def add_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + y)


@triton.jit
def add_to_another_kernel(x, other, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(other + at) + y)


@pytest.fixture
def compilations():
    """What was compiled since: the threads that did it."""
    threads = []
    triton.knobs.compilation.listener = lambda **_: threads.append(threading.current_thread())
    yield threads
    triton.knobs.compilation.listener = None


def test_what_is_not_compiled_is_compiled_and_not_launched_and_afterwards_nothing_is_left_to_compile(compilations):
    from logitless.models.kernels.compiling import compiled_together

    x = torch.zeros(256, device="cuda")
    with compiled_together(x.device):
        for block in (64, 128, 64):
            add_kernel[1,](x, 1.0, BLOCK=block)
    assert not x.any()
    assert len(compilations) == 2
    with compiled_together(x.device):
        add_kernel[1,](x, 1.0, BLOCK=64)
        x.add_(5.0)
    assert not x.any()  # neither a kernel that is there nor an operation of torch's was executed
    add_kernel[1,](x, 1.0, BLOCK=128)
    add_kernel[1,](x, 1.0, BLOCK=64)
    assert x.tolist() == [2.0] * 64 + [1.0] * 64 + [0.0] * 128
    assert len(compilations) == 2


def test_launchers_are_made_and_kernels_loaded_by_the_threads_that_compile(tmp_path, monkeypatch):
    from triton.runtime import build

    from logitless.models.kernels.compiling import compiled_together

    triton.runtime.driver.active.get_current_target()  # Triton's own helper is built when its driver is first asked
    makers, built = [], build._build

    def build_and_note(*args, **kwargs):
        makers.append(threading.current_thread())
        return built(*args, **kwargs)

    monkeypatch.setattr(build, "_build", build_and_note)
    x = torch.zeros(64, device="cuda")
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        with compiled_together(x.device):
            add_to_another_kernel[1,](x, x, 1.0, BLOCK=64)
        assert makers
        assert threading.main_thread() not in makers
        made = len(makers)
        add_to_another_kernel[1,](x, x, 1.0, BLOCK=64)
        assert len(makers) == made
    assert x.tolist() == [1.0] * 64
