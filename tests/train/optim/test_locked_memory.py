"""Page-locked memory of exact size: whose it is, how long, and what is said where there is none."""

import errno
import gc
import mmap
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from logitless.errors import UnavailableError
from logitless.graph_capture import captured
from logitless.train.optim import locked_memory
from logitless.train.optim.locked_memory import locked_bytes, pinned
from tests import warm
from tests.test_graph_capture import Graph
from tests.train.fake_driver import FakeDriver

GPU = torch.device("cuda", 0)
MAPS = Path("/proc/self/maps")


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    return FakeDriver().install(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (mmap.PAGESIZE,), (7, 1031)], ids=str)
def test_a_copy_has_the_numbers_and_locked_pages_of_its_own(shape, dtype, driver):
    tensor = torch.randn(shape).to(dtype)
    copies = [pinned(tensor, GPU) for _ in range(3)]
    for copy in copies:
        assert copy.dtype == dtype
        assert torch.equal(copy, tensor)
        assert copy.is_pinned()
    pages = max(1, -(-tensor.nbytes // mmap.PAGESIZE))
    assert list(driver.locked.values()) == [pages * mmap.PAGESIZE] * 3
    assert set(driver.locked) == {copy.untyped_storage().data_ptr() for copy in copies}


@pytest.mark.usefixtures("driver")
def test_a_copy_is_contiguous_and_outside_of_autograd():
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    copy = pinned(parameter.T, GPU)
    assert copy.is_contiguous()
    assert not copy.requires_grad
    assert torch.equal(copy, parameter.detach().T)


def test_memory_is_unlocked_when_the_last_view_of_it_is_gone(driver):
    whole = pinned(torch.arange(10.0), GPU)
    part = whole[3:5].detach()
    held = torch.nn.Parameter(torch.empty(0))
    held.data = part
    del whole, part
    gc.collect()
    assert len(driver.locked) == 1
    assert held.tolist() == [3.0, 4.0]
    del held
    assert not driver.locked


@pytest.mark.skipif(not MAPS.is_file(), reason="asks Linux")
def test_forked_processes_share_the_memory_and_it_is_given_back_after_it_was_unlocked(driver, monkeypatch):
    def mapped(address: int) -> list[str]:
        return [line.split()[1] for line in MAPS.read_text().splitlines() if line.startswith(f"{address:x}-")]

    found = list[str]()

    def unregister(address: int, *args: object) -> None:
        found.extend(mapped(address))
        FakeDriver.unregister(driver, address, *args)

    monkeypatch.setattr(locked_memory, "_unregister", unregister)
    copy = pinned(torch.ones(2**20), GPU)
    address = copy.data_ptr()
    assert mapped(address) == ["rw-s"]
    del copy
    assert found == ["rw-s"]
    assert not mapped(address)


def test_what_the_driver_does_not_lock_is_refused_with_its_words(driver):
    driver.why_not = "out of memory"
    with pytest.raises(UnavailableError, match=rf"needed {locked_bytes(1):,} bytes more.*'out of memory'.*limit"):
        pinned(torch.ones(1), GPU)


def test_memory_that_the_host_does_not_have_is_refused_with_its_words(driver, monkeypatch):
    refuse = mock.Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory"))
    monkeypatch.setattr(locked_memory.mmap, "mmap", refuse)
    with pytest.raises(UnavailableError, match=r"page-locked; given the error .*Cannot allocate memory"):
        pinned(torch.ones(1), GPU)
    assert not driver.locked


class Cuda:
    """What is asked of ``torch.cuda``, in order."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, monkeypatch, code: int = 0, failure: Exception | None = None):
        self.code, self.failure, self.asked = code, failure, list[object]()
        self.code_at_the_end, self.is_captured = 0, False
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", lambda device: self.asked.append(device) or nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_captured)
        monkeypatch.setattr(locked_memory, "_left", [])
        monkeypatch.setattr(locked_memory, "_lost", [])

    def synchronize(self) -> None:
        self.asked.append("wait")
        if self.failure is not None:
            raise self.failure

    def cudaHostRegister(self, *what: int) -> int:
        self.asked.append(("lock", *what))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.asked.append(("unlock", address))
        return self.code_at_the_end

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"


def test_the_gpu_that_copies_locks_the_memory_and_is_waited_for_before_it_is_unlocked(monkeypatch):
    cuda = Cuda(monkeypatch)
    copy = pinned(torch.ones(3), GPU)
    address = copy.data_ptr()
    assert cuda.asked == [GPU, ("lock", address, mmap.PAGESIZE, 0)]
    cuda.asked.clear()
    del copy
    assert cuda.asked == [GPU, "wait", ("unlock", address)]


def test_a_code_of_the_driver_is_an_error_and_nothing_is_unlocked(monkeypatch):
    cuda = Cuda(monkeypatch, code=2)
    with pytest.raises(UnavailableError, match="'error 2'"):
        pinned(torch.ones(3), GPU)
    gc.collect()
    assert [what[0] for what in cuda.asked if isinstance(what, tuple)] == ["lock"]


def waits_in(cuda: Cuda) -> int:
    return cuda.asked.count("wait")


@pytest.mark.parametrize("thread", ["this", "another"])
def test_nothing_waits_amid_a_capture_and_the_memory_is_unlocked_with_the_next(thread, monkeypatch):
    cuda, graph, held = Cuda(monkeypatch), Graph(), [pinned(torch.ones(n), GPU) for n in (1, 2, 3)]
    addresses = [copy.data_ptr() for copy in held]
    with captured(graph):
        if thread == "this":
            held.pop(0)
        else:
            other = threading.Thread(target=held.pop, args=(0,))
            other.start()
            other.join()
        assert not waits_in(cuda)
    assert len(locked_memory._left) == 1  # with its pages
    cuda.asked.clear()
    held.pop(0)
    unlocked = [what[1] for what in cuda.asked if isinstance(what, tuple)]
    assert sorted(unlocked) == sorted(addresses[:2])
    assert not locked_memory._left


def test_nothing_waits_amid_somebody_elses_capture_in_the_same_thread(monkeypatch):
    cuda = Cuda(monkeypatch)
    copy = pinned(torch.ones(3), GPU)
    address = copy.data_ptr()
    cuda.is_captured = True
    del copy
    assert not waits_in(cuda)
    cuda.is_captured = False
    pinned(torch.ones(1), GPU)
    assert ("unlock", address) in cuda.asked


ENDING = """
import torch
from logitless.train.optim import locked_memory
locked_memory._register = lambda *_: ""
locked_memory._unregister = lambda *_: print("unlocked")
kept = locked_memory.pinned(torch.ones(5), torch.device("cuda", 0))
kept.itself = kept
locked_memory.kept = kept[1:]
"""


@pytest.mark.slow
def test_a_process_ends_in_silence_with_memory_that_is_still_locked():
    ended = warm.run("-c", ENDING, environment=os.environ)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("is_broken", [True, False], ids=["device", "driver"])
def test_memory_that_cannot_be_unlocked_goes_without_an_error_and_its_addresses_stay_taken(is_broken, monkeypatch):
    cuda = Cuda(monkeypatch, failure=RuntimeError("an illegal memory access") if is_broken else None)
    copy = pinned(torch.ones(3), GPU)
    cuda.code_at_the_end = 1
    del copy  # an error here would be one that nobody can catch, which pytest reports
    assert (cuda.asked[-1] == "wait") == is_broken
    [pages] = locked_memory._lost
    assert len(pages) == locked_bytes(12)
