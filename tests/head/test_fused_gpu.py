"""What only a GPU can show of the fused head: real shapes, 64-bit offsets, races, memory, graphs."""

import math

import pytest
import torch

from head_bytes import step_bytes
from logitless.head import fused, token_scores
from logitless.types import LMHead
from tests.head.cases import stored_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ordinary_memory")]


def inputs(rows, width, vocabulary, spread=4.0, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, width, device="cuda", generator=g).bfloat16().requires_grad_()
    w = (torch.randn(vocabulary, width, device="cuda", generator=g) * (spread / math.sqrt(width))).bfloat16()
    y = torch.randint(0, vocabulary, (rows,), device="cuda", generator=g)
    return x, w.requires_grad_(), y, torch.randn(2, rows, device="cuda", generator=g)


def exact(x, w, y, upstream, rows=slice(None)):
    """In float64: log-probs, logits' log-softmax, and the gradient of the logits of logp."""
    p = (x.detach()[rows].double() @ w.detach().double().T).log_softmax(1)
    dz = -p.exp() * upstream[0, rows, None].double()
    dz[torch.arange(len(p)), y[rows]] += upstream[0, rows].double()
    return p.gather(1, y[rows, None]).squeeze(1), p, dz


def relative(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


SHAPES = [(896, 151936), (2048, 151936), (4096, 128256), (8192, 128256)]


@pytest.mark.parametrize(("width", "vocabulary"), SHAPES)
@pytest.mark.parametrize("spread", [4.0, 8.0])
@pytest.mark.parametrize("peaked", [False, True])
def test_errors_against_float64_obey_the_accuracy_law(width, vocabulary, spread, peaked):
    x, w, y, upstream = inputs(256, width, vocabulary, spread)
    if peaked:
        y = (x.detach().double() @ w.detach().double().T).argmax(1)
    logp, p, dz = exact(x, w, y, upstream)
    entropy = -(p.exp() * p).sum(1)
    scores = fused.token_scores(x, LMHead(w), y)
    bound = (1e-4 if width <= 4096 else 2.5e-4) * (1 if spread == 4 else 2)
    assert float((scores.logp.detach().double() - logp).abs().max()) <= bound
    assert float((scores.entropy.detach().double() - entropy).abs().max()) <= 1e-3
    gx, gw = torch.autograd.grad(scores.logp, [x, w], upstream[0])
    assert relative(gx, dz @ w.detach().double()) <= stored_error(torch.bfloat16)
    assert relative(gw, dz.T @ x.detach().double()) <= stored_error(torch.bfloat16)


@pytest.mark.parametrize("budget", [None, 2 * 50304 * 256, 0])
def test_fifty_runs_have_the_same_bits(budget):
    x, w, y, upstream = inputs(1000, 768, 50304)
    upstream[:, 100:500:3] = 0

    def run():
        scores = fused.token_scores(x, LMHead(w), y, memory_budget=budget)
        grads = torch.autograd.grad([scores.logp, scores.entropy], [x, w], list(upstream))
        return [scores.logp.detach(), scores.entropy.detach(), *grads]

    first = run()
    for _ in range(49):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_offsets_beyond_31_bits_are_right():
    rows, vocabulary = 16384 + 40, 151936  # 2.5e9 exponentials
    x, w, y, upstream = inputs(rows, 64, vocabulary)
    scores = fused.token_scores(x, LMHead(w), y, memory_budget=2**36)
    gx, gw = torch.autograd.grad(scores.logp, [x, w], upstream[0])
    tail = slice(rows - 256, rows)
    logp, _, dz = exact(x, w, y, upstream, tail)
    torch.testing.assert_close(scores.logp.detach()[tail].double(), logp, atol=1e-4, rtol=0)
    assert relative(gx[tail], dz @ w.detach().double()) < stored_error(torch.bfloat16)
    again = torch.autograd.grad(fused.token_scores(x, LMHead(w), y, memory_budget=0).logp, w, upstream[0])[0]
    assert relative(gw, again.double()) < stored_error(torch.bfloat16)


@pytest.mark.parametrize("kept", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("rows", [8192, 512])
def test_peak_memory_is_what_the_documentation_says(rows, kept):
    width, vocabulary = 2048, 128256
    x, w, y, upstream = inputs(rows, width, vocabulary)
    budget = int(2 * vocabulary * rows * kept)

    def step():
        return torch.autograd.grad(fused.token_scores(x, LMHead(w), y, memory_budget=budget).logp, [x, w], upstream[0])

    step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - sum(g.numel() * g.element_size() for g in grads)
    formula = step_bytes(rows, width, vocabulary, memory_budget=budget)
    assert peak <= 1.05 * formula


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_scoring_and_training_wait_for_nothing_on_the_host():
    x, w, y, upstream = inputs(512, 512, 32000)
    step = lambda budget: torch.autograd.grad(  # noqa: E731
        token_scores(x, w, y, backend="fused", memory_budget=budget).logp, [x, w], upstream[0]
    )
    for budget in (None, 0):
        step(budget)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for budget in (None, 0):
            step(budget)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node")
def test_a_step_can_be_captured_in_a_graph():
    x, w, y, upstream = inputs(256, 512, 32000)

    def step():
        scores = fused.token_scores(x, LMHead(w), y)
        return (scores.logp, *torch.autograd.grad(scores.logp, [x, w], upstream[0]))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    other = inputs(256, 512, 32000, seed=1)
    with torch.no_grad():
        x.copy_(other[0])
        y.copy_(other[2])
        upstream[:, ::3] = 0
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_compiling_around_the_head_changes_nothing():
    x, w, y, _ = inputs(256, 512, 32000)
    head = LMHead(w)  # outside of what is compiled: under pytest its shapes are checked, which dynamo cannot trace

    def loss(x):
        return fused.token_scores(torch.tanh(x), head, y).logp.mean()

    torch.testing.assert_close(torch.compile(loss)(x), loss(x), atol=1e-4, rtol=1e-4)
