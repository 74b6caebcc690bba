"""Which device the fused head makes current, seen without one."""

import contextlib

import pytest
import torch

pytest.importorskip("triton")

from logitless.head import fused, passes
from logitless.head.contract import on_device
from logitless.types import LMHead
from tests.head.interpreter import complete_interpreter


def test_the_region_is_that_of_the_tensors_cuda_device_and_none_on_the_cpu(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or contextlib.nullcontext())
    with on_device(torch.device("cuda:1")), on_device(torch.device("cpu")):
        assert entered == [torch.device("cuda:1")]


def test_kernels_are_launched_inside_of_it_forward_and_backward(monkeypatch):
    complete_interpreter()
    inside, seen = [], []

    @contextlib.contextmanager
    def region(device):
        inside.append(device)
        yield
        inside.pop()

    for name in ("scored", "gradients"):
        plain = getattr(passes, name)
        monkeypatch.setattr(passes, name, lambda *a, plain=plain, **k: seen.append(list(inside)) or plain(*a, **k))
    monkeypatch.setattr(fused, "on_device", region)
    hidden, weight = torch.randn(3, 16, requires_grad=True), torch.randn(7, 16)
    scores = fused.token_scores(hidden, LMHead(weight), torch.tensor([0, 1, 6]))
    scores.logp.sum().backward()
    assert seen == [[torch.device("cpu")]] * 2
