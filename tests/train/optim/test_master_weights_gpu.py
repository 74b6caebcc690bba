"""Master weights and state on the host, updated by the GPU: bitwise as on the device, in exact memory."""

import copy
import gc
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from logitless.graph_capture import captured
from logitless.train.optim.locked_memory import locked_bytes, pinned
from logitless.train.optim.master_weights import lower_to, master_weight
from logitless.train.optim.optimizer import adamw, implementation, take_step
from logitless.train.recipe.training import OptimizerSection
from logitless.train.store.training_state import optimizer_tensors, restore_optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ordinary_memory")]


class Trained:
    """Two layers of odd sizes and their optimizer."""

    def __init__(self, moments: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(1031, 257), nn.Linear(257, 70001, bias=False)).cuda()
        lower_to(torch.bfloat16, self.model.parameters())
        options = OptimizerSection(moments=moments, weight_decay=0.1)
        self.optimizer = adamw(self.model.parameters(), options, torch.device("cuda"))

    def step(self, number: int, factor: float = 1.0) -> tuple[torch.Tensor, bool]:
        generator = torch.Generator("cuda").manual_seed(number)
        for p in self.model.parameters():
            p.grad = factor * torch.randn(p.shape, device="cuda", generator=generator)
        norm, taken = take_step(self.optimizer, rate=1e-3, max_grad_norm=1.0)
        assert all(p.grad is None for p in self.model.parameters())
        return norm, taken

    def masters(self) -> dict[str, nn.Parameter]:
        return {name: master_weight(p) for name, p in self.model.named_parameters()}

    def held(self) -> list[torch.Tensor]:
        """Master weights and state."""
        moments = [state[key] for state in self.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        return [*self.masters().values(), *moments]


def same(one: Trained, other: Trained) -> None:
    for (name, a), b in zip(one.masters().items(), other.masters().values(), strict=True):
        assert torch.equal(a.cpu(), b.cpu()), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(one.optimizer.state[a][key].cpu(), other.optimizer.state[b][key].cpu()), (name, key)
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_master_weights_and_state_on_the_host_are_bitwise_those_on_the_device():
    host, device = Trained("host"), Trained("float32")
    assert implementation(host.optimizer) == "fused, master weights and state on the host"
    for number in range(3):
        (norm, taken), (other, _) = host.step(number), device.step(number)
        assert taken
        assert torch.equal(norm, other)
    same(host, device)
    assert all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in host.held())


def test_a_gradient_that_is_not_finite_moves_nothing_on_the_host():
    host, device = Trained("host"), Trained("float32")
    for trained in (host, device):
        trained.step(0)
    assert not host.step(1, factor=float("nan"))[1]
    same(host, device)


def test_restored_state_is_where_the_kernel_reaches_them():
    begun, whole, resumed = (Trained("host") for _ in range(3))
    begun.step(0)
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(begun.masters(), begun.optimizer).items()}
    for p, q in zip(resumed.masters().values(), begun.masters().values(), strict=True):
        p.data.copy_(q)
    restore_optimizer(resumed.masters(), resumed.optimizer, saved)
    for number in (0, 1):
        whole.step(number)
    resumed.step(1)
    same(whole, resumed)
    resumed.optimizer.load_state_dict(copy.deepcopy(resumed.optimizer.state_dict()))  # to memory that is not locked
    assert not all(tensor.is_pinned() for tensor in resumed.held())
    for trained in (whole, resumed):
        trained.step(2)
    same(whole, resumed)
    assert all(tensor.is_pinned() for tensor in resumed.held())


def test_the_device_holds_weights_and_gradients_alone():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    host = Trained("host")
    host.step(0)
    num_weights = sum(p.numel() for p in host.model.parameters())
    assert torch.cuda.memory_allocated() - before < 2.1 * num_weights


def shared_bytes() -> int:
    """Of this process, in memory that it maps and shares: page-locked memory is among them, libraries are not."""
    found = re.search(r"^RssShmem:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        pytest.skip("the kernel does not say it")
    return 1024 * int(found[1])


def test_master_weights_and_state_take_their_own_size_of_the_host_and_give_it_back():
    Trained("host").step(0)  # kernels and tables
    gc.collect()
    before = shared_bytes()
    host = Trained("host")
    host.step(0)
    exact = sum(locked_bytes(tensor.nbytes) for tensor in host.held())
    assert exact < 12 * sum(p.numel() for p in host.model.parameters()) + 9 * locked_bytes(1)
    least = 2**20  # what the driver takes for itself; the next powers of two are 190 MB more
    assert exact - least < shared_bytes() - before < exact + 16 * least
    del host
    gc.collect()
    assert shared_bytes() - before < 16 * least


def test_page_locked_memory_is_copied_without_waiting_and_outlives_its_last_copy():
    numbers = torch.arange(2**22, dtype=torch.float32)
    there = torch.zeros(2**22, device="cuda")
    kept = pinned(numbers, there.device)
    torch.cuda.synchronize()
    torch.cuda._sleep(2**30)  # cycles: about half a second
    there.copy_(kept, non_blocking=True)
    copied = torch.cuda.current_stream().record_event()
    assert not copied.query()
    del kept
    assert copied.query()
    assert torch.equal(there.cpu(), numbers)


def test_a_capture_outlives_page_locked_memory_that_goes_in_its_middle():
    kept = pinned(torch.zeros(4), torch.device("cuda", 0))
    numbers, graph, stream = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    numbers += 0  # what is launched for the first time may be loaded first
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), captured(graph):
        numbers += 1
        del kept
        numbers += 1
    graph.replay()
    assert numbers.tolist() == [2.0] * 4
