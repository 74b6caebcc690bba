"""``step_bytes`` against every allocation of a step, on tensors without data and without running a kernel."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")

from head_bytes import step_bytes
from logitless.head import fused, passes
from logitless.head.kernels import backward, forward, variants
from logitless.types import LMHead

SMALLEST = 512
"""CUDA's allocator gives multiples of this."""


class Allocations(TorchDispatchMode):
    """Bytes of all storages that an operation made and something still holds."""

    def __init__(self, given):
        super().__init__()
        self._known = {id(tensor.untyped_storage()) for tensor in given}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and id(storage := tensor.untyped_storage()) not in self._known:
                size = -(-storage.nbytes() // SMALLEST) * SMALLEST
                self._known.add(id(storage))
                weakref.finalize(storage, self._freed, id(storage), size)
                self.now += size
        self.peak = max(self.peak, self.now)
        return made

    def _freed(self, storage, size):
        self._known.discard(storage)
        self.now -= size


class NotRun:
    def __getitem__(self, grid):
        return lambda *positional, **named: None


@pytest.fixture
def on_hopper(monkeypatch):
    """Every launch does nothing, and the plan is that of an H100."""
    for module in (forward, backward):
        for name, value in list(vars(module).items()):
            if hasattr(value, "fn") and hasattr(value, "__getitem__"):
                monkeypatch.setattr(module, name, NotRun())
    monkeypatch.setattr(passes, "variant", lambda hidden: variants.hopper(hidden.shape[1], 132))


def peak(rows, width, vocabulary, budget, dtype=torch.bfloat16):
    hidden = torch.empty(rows, width, dtype=torch.bfloat16, device="meta").requires_grad_()
    weight = torch.empty(vocabulary, width, dtype=dtype, device="meta").requires_grad_()
    target = torch.empty(rows, dtype=torch.int64, device="meta")
    upstream = torch.empty(rows, device="meta")
    with Allocations([hidden, weight, target, upstream]) as allocations:
        logp = fused.token_scores(hidden, LMHead(weight), target, memory_budget=budget).logp
        grads = torch.autograd.grad(logp, [hidden, weight], upstream)
    return allocations.peak - sum(g.nbytes for g in grads)


@pytest.mark.parametrize("kept", [1.0, 0.5, 0.0])
@pytest.mark.parametrize(
    ("rows", "width", "vocabulary"),
    [(512, 2048, 128256), (16384, 896, 151936), (16384, 4096, 128256), (2048, 8192, 128256), (300, 4096, 5003)],
)
def test_a_step_takes_what_the_formula_says(rows, width, vocabulary, kept, on_hopper):
    budget = int(2 * (-(-vocabulary // 8) * 8) * rows * kept)
    formula = step_bytes(rows, width, vocabulary, memory_budget=budget)
    assert 0.75 * formula <= peak(rows, width, vocabulary, budget) <= 1.02 * formula


def test_a_budget_of_0_stays_below_0_6_gib_at_a_hidden_size_of_8192(on_hopper):
    assert peak(16384, 8192, 128256, 0) < 0.6 * 2**30
