"""The scoring pass whose halves overlap, against the plain kernel and itself."""

import math
from dataclasses import replace

import pytest
import torch

from logitless.head import fused, passes
from logitless.head.kernels import launch
from logitless.head.sharded import Shard
from logitless.types import LMHead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]


def drawn(rows, width, vocabulary, rank):
    g = torch.Generator("cuda").manual_seed(rows + width + rank)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, device="cuda", generator=g) * scale).bfloat16()

    factors = {"lora_a": normal(rank, width, scale=0.1), "lora_b": normal(vocabulary, rank)} if rank else {}
    head = LMHead(normal(vocabulary, width, scale=4 / math.sqrt(width)), lora_scale=0.3, **factors)
    return normal(rows, width), head, torch.randint(0, vocabulary, (rows,), device="cuda", generator=g)


@pytest.mark.parametrize("rank", [0, 4, 16, 48])
@pytest.mark.parametrize(
    ("rows", "width", "vocabulary", "num_kept"),
    [(1, 64, 256, 1), (300, 896, 5003, 300), (129, 80, 1000, 64), (1000, 2048, 33000, 516)],
)
def test_exponentials_and_their_sums_have_the_bits_of_the_plain_kernel(
    rows, width, vocabulary, num_kept, rank, monkeypatch
):
    hidden, head, target = drawn(rows, width, vocabulary, rank)
    form = passes.form(hidden, head)
    monkeypatch.setattr(launch, "DEEP", 10**6)
    assert form.variant.overlaps
    multiplier = torch.full((rows,), passes.LOG2E / 0.7, device="cuda")
    given = launch.Rows(hidden, passes._low_rows(hidden, head), multiplier, target)
    found = []
    for overlaps in (True, False):
        used = replace(form, variant=replace(form.variant, overlaps=overlaps))
        multiplied = passes.operands(used, head, Shard(0, head.weight, 0))
        anchor, slope = torch.zeros(rows, device="cuda"), torch.ones(rows, device="cuda")
        launch.target_logits(multiplied, given, anchor, slope)
        kept = launch.kept_rows(num_kept, vocabulary, used.variant, hidden.device).fill_(-7)
        sums = launch.TileSums.of(multiplied, given)
        launch.exp_product(multiplied, given, anchor, kept, num_kept, sums, None, maximum=False)
        found.append((kept, *sums))
    assert all(torch.equal(ours, plain) for ours, plain in zip(*found, strict=True))


@pytest.mark.parametrize("rank", [0, 16])
def test_a_rows_scores_depend_neither_on_the_others_nor_on_what_is_kept(rank):
    hidden, head, target = drawn(700, 896, 20000, rank)
    with torch.no_grad():
        together = fused.token_scores(hidden, head, target)
    trained = fused.token_scores(hidden.requires_grad_(), head, target)
    assert torch.equal(together.logp, trained.logp.detach())
    assert torch.equal(together.entropy, trained.entropy.detach())
    for rows in ([3], [699, 5, 64], list(range(500, 100, -1))):
        with torch.no_grad():
            alone = fused.token_scores(hidden[rows], head, target[rows])
        assert torch.equal(together.logp[rows], alone.logp)
        assert torch.equal(together.entropy[rows], alone.entropy)
