"""What only several GPUs can show of the fused head over ranks: real shapes, repeatability, no waiting, memory."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from head_bytes import step_bytes
from logitless.head import token_scores
from logitless.head.api import why_not
from logitless.types import LMHead
from tests.head.cases import stored_error
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.multi_gpu

WIDTH, VOCABULARY = 1024, 50257
ROWS = {"group": (1000, 1000), "shards": (1000, 700)}


def _rows(rank, rows, seed):
    torch.utils.deterministic.fill_uninitialized_memory = False  # gigabytes of NaN are for the small shapes
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, WIDTH, device="cuda", generator=g).bfloat16().requires_grad_()
    y = torch.randint(0, VOCABULARY, (rows,), device="cuda", generator=g)
    upstream = torch.randn(2, rows, device="cuda", generator=g)
    upstream[:, 100:500:3] = 0
    return x, y, upstream


def _weight():
    g = torch.Generator("cuda").manual_seed(100)
    return (torch.randn(VOCABULARY, WIDTH, device="cuda", generator=g) * (4 / math.sqrt(WIDTH))).bfloat16()


def _inputs(rank, how):
    """This rank's tokens, its weight and the options of the call."""
    rows = _rows(rank, ROWS[how][rank], seed=rank if how == "shards" else 0)
    if how == "group":
        cut = VOCABULARY // 2 + 13
        shard = _weight()[:cut] if rank == 0 else _weight()[cut:]
        return *rows, shard.clone().requires_grad_(), {"group": dist.group.WORLD}
    mesh = init_device_mesh("cuda", (2,))
    return *rows, distribute_tensor(_weight(), mesh, [Shard(0)]).requires_grad_(), {}


def _step(x, y, upstream, weight, options):
    scores = token_scores(x, LMHead(weight), y, backend="fused", **options)
    grads = torch.autograd.grad([scores.logp, scores.entropy], [x, weight], list(upstream))
    return [scores.logp.detach(), scores.entropy.detach(), grads[0], getattr(grads[1], "to_local", lambda: grads[1])()]


def _many_steps(rank, how, budget):
    *inputs, options = _inputs(rank, how)
    assert why_not("fused", inputs[0], LMHead(inputs[3]), options.get("group")) is None
    options = options | {"memory_budget": budget}
    first = _step(*inputs, options)
    assert all(all(torch.equal(a, b) for a, b in zip(first, _step(*inputs, options), strict=True)) for _ in range(9)), (
        "not the same bits"
    )
    return first


def _whole(how):
    """Float64 of all tokens and columns."""
    weight = _weight().double()
    answers = []
    gradient = torch.zeros_like(weight)
    for rank in range(2):
        x, y, upstream = _rows(rank, ROWS[how][rank], seed=rank if how == "shards" else 0)
        z = x.detach().double() @ weight.T
        p = z.log_softmax(1)
        logp, entropy = p.gather(1, y[:, None]).squeeze(1), -(p.exp() * p).sum(1)
        g, h = upstream.double()[:, :, None]
        dz = -p.exp() * (g + h * (p + entropy[:, None]))
        dz[torch.arange(len(y)), y] += g[:, 0]
        if how == "shards" or rank == 0:
            gradient += dz.T @ x.detach().double()
        answers.append([logp, entropy, dz @ weight])
    cut = VOCABULARY // 2 + (13 if how == "group" else 1)
    return [[v.cpu() for v in (*answers[r], (gradient[:cut], gradient[cut:])[r])] for r in range(2)]


@pytest.mark.parametrize("budget", [None, 2 * 25200 * 400, 0])
@pytest.mark.parametrize("how", ["group", "shards"])
def test_two_gpus_obey_the_accuracy_law_and_repeat_bit_by_bit(how, budget):
    whole = _whole(how)
    given = run_on_ranks(2, _many_steps, how, budget, device="cuda")
    for (logp, entropy, dx, dw), (true_logp, true_entropy, true_dx, true_dw) in zip(given, whole, strict=True):
        assert float((logp.double() - true_logp).abs().max()) <= 1e-4
        assert float((entropy.double() - true_entropy).abs().max()) <= 1e-3
        assert float((dx.double() - true_dx).norm() / true_dx.norm()) <= stored_error(torch.bfloat16)
        assert float((dw.double() - true_dw).norm() / true_dw.norm()) <= stored_error(torch.bfloat16)
    if how == "group":
        assert all(torch.equal(a, b) for a, b in zip(given[0][:3], given[1][:3], strict=True))


def _without_waiting(rank, how):
    *inputs, options = _inputs(rank, how)
    for budget in (None, 0):
        _step(*inputs, options | {"memory_budget": budget})
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for budget in (None, 0):
            _step(*inputs, options | {"memory_budget": budget})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


@pytest.mark.parametrize("how", ["group", "shards"])
def test_ranks_wait_for_nothing_on_the_host(how):
    assert all(run_on_ranks(2, _without_waiting, how, device="cuda"))


def _peak(rank, how, budget):
    *inputs, options = _inputs(rank, how)
    options = options | {"memory_budget": budget}
    _step(*inputs, options)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = _step(*inputs, options)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(x.numel() * x.element_size() for x in result[2:])


@pytest.mark.parametrize("budget", [2**33, 0])
@pytest.mark.parametrize("how", ["group", "shards"])
def test_peak_memory_over_ranks_is_what_the_documentation_says(how, budget):
    for rank, peak in enumerate(run_on_ranks(2, _peak, how, budget, device="cuda")):
        rows = ROWS[how][rank]
        vocabulary = VOCABULARY // 2 + 13 if how == "group" else VOCABULARY
        shards = 1 if how == "group" else 2
        formula = step_bytes(rows, WIDTH, vocabulary, memory_budget=budget, shared=how == "group", shards=shards)
        assert peak <= 1.05 * formula
