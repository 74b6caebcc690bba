"""Float32 masters of bfloat16 weights: what the optimizer holds, what the model reads, what autograd adds up."""

import pytest
import torch
from torch import nn

from logitless.train.masters import MasterAdamW, fused_update, lower_to
from tests.head.interpreter import complete_interpreter, interpreted

BETAS, EPS, RATE, DECAY = (0.9, 0.999), 1e-8, 1e-3, 0.1


def a_layer(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(7, 5)


def trained(layer: nn.Linear, steps: int, *, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Masters (or weights) after some steps on gradients that do not depend on the weights' dtype."""
    named = dict(layer.named_parameters())
    masters = {} if dtype is None else lower_to(dtype, named)
    held = [masters.get(name, parameter) for name, parameter in named.items()]
    copies = {masters[name]: named[name] for name in masters}
    optimizer = MasterAdamW([{"params": held}], copies, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.take_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return [h.detach() for h in held]


def test_masters_follow_float32_training_bit_for_bit():
    for master, plain in zip(
        trained(a_layer(), 5, dtype=torch.bfloat16), trained(a_layer(), 5, dtype=None), strict=True
    ):
        assert torch.equal(master, plain)


def test_the_model_holds_its_masters_rounded_after_every_step():
    layer = a_layer()
    masters = trained(layer, 3, dtype=torch.bfloat16)
    for parameter, master in zip(layer.parameters(), masters, strict=True):
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.detach(), master.bfloat16())


def test_steps_too_small_for_bfloat16_add_up():
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    master = lower_to(torch.bfloat16, dict(layer.named_parameters()))["weight"]
    optimizer = MasterAdamW([{"params": [master]}], {master: layer.weight}, lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        layer.weight.grad = torch.ones(1, 1)
        optimizer.take_gradients()
        optimizer.step()
    assert layer.weight.item() == pytest.approx(0.99, abs=2**-8)
    assert layer.weight.item() < 1


def test_gradients_of_micro_batches_add_up_in_float32():
    layer = nn.Linear(1, 1, bias=False)
    lower_to(torch.bfloat16, dict(layer.named_parameters()))
    for _ in range(1000):  # in bfloat16 the sum would stop at 256
        layer(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == 1000.0


def test_frozen_and_float64_weights_are_left_alone():
    layer = a_layer().double()
    layer.bias.requires_grad_(False)
    assert lower_to(torch.bfloat16, dict(layer.named_parameters())) == {}
    assert layer.weight.dtype == torch.float64


@pytest.mark.parametrize("sizes", [(1, 3), (1025, 70000, 64)])
def test_the_fused_update_equals_torch(sizes: tuple[int, ...]):
    if interpreted():
        complete_interpreter()
    elif not torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter or a GPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours = [nn.Parameter(torch.randn(n, device=device)) for n in sizes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    moments = [[torch.zeros_like(p) for p in ours] for _ in range(2)]
    copies = [torch.zeros_like(p, dtype=torch.bfloat16).detach() for p in ours]
    reference = torch.optim.AdamW(theirs, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=False)
    for step in range(1, 4):
        gradients = [torch.randn_like(p) for p in ours]
        fused_update(ours, gradients, *moments, copies, rate=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, step=step)
        for p, g in zip(theirs, gradients, strict=True):
            p.grad = g
        reference.step()
    for our, their, copy in zip(ours, theirs, copies, strict=True):
        # Each step moves a weight by at most about 2 RATE, computed in a dozen float32 operations.
        bound = 3 * 12 * torch.finfo(torch.float32).eps * (2 * RATE + their.detach().abs())
        assert bool(((our - their).abs() <= bound).all())
        assert torch.equal(copy, our.detach().bfloat16())
