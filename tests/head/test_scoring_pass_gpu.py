"""The scoring pass on Hopper, compiled: against float64 and itself."""

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from logitless.head import fused, passes
from logitless.head.kernels import launch, variants
from logitless.head.sharded import Shard
from logitless.types import LMHead
from tests.head import scoring_pass
from tests.head.cases import stored_error
from tests.head.scoring_pass import EDGES, Given, Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("ordinary_memory"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]


def normal(*size, seed=0, scale=1.0):
    """bfloat16, drawn in place: float32 of the largest would not be small."""
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.empty(*size, dtype=torch.bfloat16, device="cuda").normal_(0, scale, generator=g)


def given(rows, width, vocabulary, rank=0):
    """Larger than ``scoring_pass.drawn`` gives, and drawn on the GPU."""
    g = torch.Generator("cuda").manual_seed(1)
    factors = {}
    if rank:
        factors = {"lora_a": normal(rank, width, seed=2, scale=0.1), "lora_b": normal(vocabulary, rank, seed=3)}
    hidden = normal(rows, width)
    head = LMHead(normal(vocabulary, width, seed=1, scale=4 / math.sqrt(width)), lora_scale=0.1, **factors)
    target = torch.randint(0, vocabulary, (rows,), device="cuda", generator=g)
    how = passes.form(hidden, head)
    multiplier = torch.full((rows,), passes.LOG2E, device="cuda")
    operands = passes.operands(how, head, Shard(0, head.weight, 0))
    rows_given = launch.Rows(hidden, passes.low_rows(hidden, head, how.variant), multiplier, target)
    return Given(operands, rows_given, 20 * torch.rand(rows, device="cuda", generator=g))


def some(case, chosen, hidden=None):
    """The same call for some of the rows."""
    rows = case.rows if hidden is None else case.rows._replace(hidden=hidden)
    chosen_rows = launch.Rows(*(None if x is None else x[chosen] for x in rows))
    return Given(case.operands, chosen_rows, case.anchor[chosen])


@pytest.mark.parametrize("shape", EDGES, ids=str)
def test_every_edge_is_right(shape):
    gpu = variants.variant(torch.empty(1, shape.width, dtype=torch.bfloat16, device="cuda"))
    case = scoring_pass.drawn(shape, gpu, "cuda")
    found = scoring_pass.scored(case, shape.num_kept)
    assert scoring_pass.wrong(found, case, shape.num_kept) == []


def test_kept_exponentials_beyond_31_bits_are_in_their_places():
    shape = Shape(14200 + 61, 64, 151936, 0, 14200 + 60)  # 2.2e9
    case = given(shape.rows, shape.width, shape.vocabulary)
    found = scoring_pass.scored(case, shape.num_kept)
    tail = slice(shape.num_kept - 100, shape.num_kept)
    part = scoring_pass.Found(found.kept[tail], found.s[:, tail], found.t[:, tail])
    assert scoring_pass.wrong(part, some(case, tail), 100) == []


@pytest.mark.parametrize(
    ("rows", "width", "vocabulary"),
    [(128, 8192, 270000), (270000, 8192, 300)],  # 2.2e9 weights, or hidden states
)
def test_operands_beyond_31_bits_are_read_where_they_are(rows, width, vocabulary):
    case = given(rows, width, vocabulary)
    found = scoring_pass.scored(case, 0)
    tail = slice(max(0, rows - 128), rows)
    part = some(case, tail)
    columns = slice(max(0, vocabulary // 256 * 256 - 512), vocabulary)
    d = part.rows.hidden.double() @ case.operands.weight[columns].double().T * passes.LOG2E * case.operands.gain
    d -= part.anchor.double()[:, None]
    d[torch.arange(columns.start, columns.stop, device="cuda") == part.rows.target[:, None]] = -torch.inf
    wanted = torch.stack([tile.exp2().sum(1) for tile in d.split(256, dim=1)])
    torch.testing.assert_close(found.s[-len(wanted) :, tail].double(), wanted, rtol=1e-2, atol=0)


@pytest.mark.parametrize("rank", [0, 16])
def test_a_rows_scores_depend_neither_on_the_others_nor_on_what_is_kept(rank):
    hidden, head = normal(700, 896), LMHead(normal(20000, 896, seed=1, scale=0.1), lora_scale=0.3)
    if rank:
        head = replace(head, lora_a=normal(rank, 896, seed=2, scale=0.1), lora_b=normal(20000, rank, seed=3))
    target = torch.randint(0, 20000, (700,), device="cuda", generator=torch.Generator("cuda").manual_seed(4))
    with torch.no_grad():
        together = fused.token_scores(hidden, head, target)
    trained = fused.token_scores(hidden.clone().requires_grad_(), head, target)
    assert torch.equal(together.logp, trained.logp.detach())
    assert torch.equal(together.entropy, trained.entropy.detach())
    for rows in ([3], [699, 5, 64], list(range(500, 100, -1))):
        with torch.no_grad():
            alone = fused.token_scores(hidden[rows], head, target[rows])
        assert torch.equal(together.logp[rows], alone.logp)
        assert torch.equal(together.entropy[rows], alone.entropy)


@pytest.mark.parametrize(("width", "vocabulary"), [(896, 151936), (4096, 128256)])
def test_scores_and_gradients_with_lora_are_as_near_to_float64_as_without(width, vocabulary):
    rows, rank = 256, 16
    x = normal(rows, width).requires_grad_()
    w = normal(vocabulary, width, seed=1, scale=4 / math.sqrt(width))
    a = normal(rank, width, seed=2, scale=1 / math.sqrt(width)).requires_grad_()
    b = normal(vocabulary, rank, seed=3, scale=0.5).requires_grad_()
    g = torch.Generator("cuda").manual_seed(4)
    y = torch.randint(0, vocabulary, (rows,), device="cuda", generator=g)
    upstream = torch.randn(rows, device="cuda", generator=g)
    scores = fused.token_scores(x, LMHead(w, lora_a=a, lora_b=b, lora_scale=0.5), y)
    found = torch.autograd.grad(scores.logp, [x, a, b], upstream)
    xd, ad, bd = (v.detach().double() for v in (x, a, b))
    z = xd @ w.double().T + 0.5 * (xd @ ad.T) @ bd.T
    p = z.log_softmax(1)
    assert float((scores.logp.detach().double() - p.gather(1, y[:, None])[:, 0]).abs().max()) <= 1e-4
    dz = -p.exp() * upstream[:, None].double()
    dz[torch.arange(rows, device="cuda"), y] += upstream.double()
    low = dz @ bd
    wanted = (dz @ w.double() + 0.5 * low @ ad, 0.5 * low.T @ xd, 0.5 * dz.T @ (xd @ ad.T))
    for ours, exact in zip(found, wanted, strict=True):
        assert float((ours.double() - exact).norm() / exact.norm()) <= stored_error(torch.bfloat16)


@pytest.mark.parametrize("logp", [-40.0, -90.0, -200.0])
def test_rows_whose_anchor_did_not_fit_come_out_like_the_others(logp):
    hidden, weight = normal(300, 896), normal(5003, 896, seed=1, scale=0.02)
    target = torch.randint(0, 5003, (300,), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    far = torch.arange(0, 300, 7, device="cuda")
    anchor = torch.full((300,), 8.0, device="cuda")
    anchor[far] = 8.0 + logp  # as an estimate that is far off
    with torch.no_grad():
        near = fused.token_scores(hidden, LMHead(weight), target, anchor=torch.full_like(anchor, 8.0))
        found = fused.token_scores(hidden, LMHead(weight), target, anchor=anchor)
    others = torch.ones(300, dtype=torch.bool, device="cuda")
    others[far] = False
    assert torch.equal(near.logp[others], found.logp[others])
    torch.testing.assert_close(near.logp, found.logp, atol=3e-5, rtol=0)
    torch.testing.assert_close(near.entropy, found.entropy, atol=1e-3, rtol=0)


def test_a_gradient_that_lends_room_has_the_bits_of_one_that_does_not(monkeypatch):
    x = normal(2048, 4096).requires_grad_()
    w = normal(128256, 4096, seed=1, scale=1 / 16).requires_grad_()
    g = torch.Generator("cuda").manual_seed(2)
    y = torch.randint(0, 128256, (2048,), device="cuda", generator=g)
    upstream = torch.randn(2048, device="cuda", generator=g)
    upstream[::3] = 0
    found, lent = [], []
    real = passes.last_block_width
    monkeypatch.setattr(passes, "last_block_width", lambda *given: lent.append(real(*given)) or lent[-1])
    for share in (4, 10**9):
        monkeypatch.setattr(passes, "SCRATCH_RATIO", share)
        scores = fused.token_scores(x, LMHead(w), y, memory_budget=0)
        found.append(torch.autograd.grad(scores.logp, [x, w], upstream))
    assert len(lent) == 1
    assert torch.equal(found[0][1], found[1][1])
    assert float((found[0][0].double() - found[1][0].double()).norm() / found[1][0].double().norm()) < 2**-9
