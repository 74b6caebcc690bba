"""Adapters of several owners over one base: every row, and every gradient, has the bits of its owner alone."""

import pytest
import torch
from torch import nn

from logitless.models.attention import AttentionLayout
from logitless.models.kernels.row_adapters import add_rows_own
from logitless.models.lm_head import backbone, backbone_hidden
from logitless.models.loading import load_model
from logitless.models.row_invariant import linear
from logitless.models.row_invariant.adapters import AdapterStack, Lora, SpanAdapters, groups_of, spans_keep_bits
from logitless.models.row_invariant.layers import install_row_invariant
from logitless.models.row_invariant.linear import Projection, _add_low_ranks, lay_end_to_end, project
from logitless.types import PromptGroup
from tests.models.tiny import CONFIGS, packed

pytest.importorskip("triton")

RANKS = (3, 20, 80)


def factors(rank, length, widths, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(100 * rank + seed)
    return [
        (nn.Parameter(torch.randn(rank, length, generator=g).to(dtype)),
         nn.Parameter(torch.randn(n, rank, generator=g).to(dtype)))
        for n in widths
    ]  # fmt: skip


def bits(x):
    return x.detach().contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [(64, 24), (20, 8)], ids=["whole tiles", "map by map"])
def test_each_row_has_the_bits_of_low_rank_products_with_its_own_adapter(widths, dtype):
    length, most = 72, max(RANKS)
    x, outs = torch.randn(40, length).to(dtype), [torch.randn(40, sum(widths)).to(dtype)]
    outs[0][-1] = -0.0
    outs.append(outs[0].clone())
    index = torch.tensor([0] * 3 + [1] * 5 + [3] * 9 + [2] * 22 + [0], dtype=torch.int32)
    a, b = torch.zeros(5, 2 * most, length, dtype=dtype), torch.zeros(5, sum(widths), most, dtype=dtype)
    a[4] = b[4] = torch.nan  # another's, who is in nobody's tile
    scale = torch.tensor([0.0, 0.5, 2.0, 0.7, 1.0])
    for place, rank in enumerate(RANKS, 1):
        of_maps, own = factors(rank, length, widths, dtype), (index == place).nonzero()[:, 0]
        for number, (lora_a, lora_b) in enumerate(of_maps):
            a[place, number * most :][:rank] = lora_a.detach()
            b[place, widths[0] * number :][: len(lora_b), :rank] = lora_b.detach()
        part = outs[0][own]
        with torch.no_grad():
            _add_low_ranks(
                part.split(widths, 1), x[own], *zip(*of_maps, strict=True), [float(scale[place])] * len(widths)
            )
        outs[0][own] = part
    whole = outs[1]
    add_rows_own(x, a, b, scale, index, [whole] if widths[0] == 64 else whole.split(widths, 1), widths)
    assert torch.equal(bits(outs[0]), bits(whole))
    a[1] = torch.nan  # neighbours of a tenant whose numbers are not finite
    again = whole.clone()
    add_rows_own(x, a, b, scale, index, [again], widths) if widths[0] == 64 else None
    assert torch.equal(bits(whole)[index == 0], bits(again)[index == 0])


@pytest.mark.parametrize("together", [True, False])
def test_spans_have_the_outputs_and_gradients_of_projections_of_their_rows_alone(together):
    widths, lengths = (128, 24), (5, 3, 9)
    weights = [torch.randn(n, 16) for n in widths]
    if together:
        lay_end_to_end(weights)
    adapters = [factors(rank, 16, widths) for rank in RANKS]
    adapters[1][1] = (None, None)
    x, grads = torch.randn(sum(lengths), 16), [torch.randn(sum(lengths), n) for n in widths]
    leaves = [t for of_maps in adapters for pair in of_maps for t in pair if t is not None]

    def of_span(projections, rows, grads):
        given = rows.clone().requires_grad_()
        outs = project(given, projections)
        torch.autograd.backward(outs, grads)
        return [*outs, given.grad, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    modules = [nn.Linear(16, n, bias=False) for n in widths]
    for module, weight in zip(modules, weights, strict=True):
        module.weight = nn.Parameter(weight, requires_grad=False)
    pairs = [dict(zip(modules, of, strict=True)) for of in adapters]
    loras = [Lora({module: pair for module, pair in of.items() if pair[0] is not None}, 0.5) for of in pairs]
    mixed = of_span(SpanAdapters(lengths, tuple(loras)).projections(modules), x, grads)
    start, alone = 0, []
    for leaf in leaves:
        leaf.grad = None
    for length, of_maps in zip(lengths, adapters, strict=True):
        parts = [Projection(w, None, *pair, 0.5) for w, pair in zip(weights, of_maps, strict=True)]
        rows = slice(start, start + length)
        alone.append(of_span(parts, x[rows], [g[rows] for g in grads])[:3])
        start += length
    for number in range(3):
        assert torch.equal(bits(torch.cat([each[number] for each in alone])), bits(mixed[number]))
    for leaf, of_mixed in zip(leaves, mixed[3:], strict=True):
        assert torch.equal(bits(leaf.grad), bits(of_mixed))


def test_rows_of_several_owners_have_the_hidden_states_and_gradients_of_passes_alone():
    model = load_model(
        {**CONFIGS["qwen3"], "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24}, random_weights=True
    ).requires_grad_(False)  # fmt: skip
    installation = install_row_invariant(model)
    loras, leaves = [], []
    for seed, rank in enumerate((2, 5)):
        pairs = {
            module: factors(rank, module.weight.shape[1], (len(module.weight),), seed=seed)[0]
            for number, group in enumerate(groups_of(model)) for module in group if seed or number % 2 == 0
        }  # fmt: skip
        loras.append(Lora(pairs, 0.3))
        leaves += [t for pair in pairs.values() for t in pair]
    lengths = [[4, 3], [6, 1, 2]]
    inputs = [packed(of, 11) for of in (*lengths, [*lengths[0], *lengths[1]])]
    whole = torch.cat([each.input_ids for each in inputs[:2]])
    inputs[2].input_ids.copy_(whole)
    grads = torch.randn(len(whole), 16)

    def passed(read, adapters, sizes, grad):
        with installation.adapted(SpanAdapters(sizes, adapters)):
            hidden = backbone_hidden(model, read)
        hidden.backward(grad)
        return hidden.detach()

    alone, start = [], 0
    for read, lora in zip(inputs[:2], loras, strict=True):
        size = len(read.input_ids)
        alone.append(passed(read, (lora,), (size,), grads[start : start + size]))
        start += size
    of_alone = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    mixed = passed(inputs[2], tuple(loras), tuple(len(each.input_ids) for each in inputs[:2]), grads)
    assert torch.equal(bits(torch.cat(alone)), bits(mixed))
    assert all(torch.equal(bits(a), bits(leaf.grad)) for a, leaf in zip(of_alone, leaves, strict=True))
    assert backbone(model).row_invariant.adapters is None


def test_a_machine_whose_products_do_not_keep_bits_is_noticed(monkeypatch):
    config = {**CONFIGS["qwen3"], "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24}
    model = load_model(config, random_weights=True).requires_grad_(False)
    install_row_invariant(model)
    stack = AdapterStack(model, num_places=2, rank=4)
    assert spans_keep_bits(model)
    assert stack.keeps_bits()
    assert not any(each.any() for maps in stack.maps.values() for each in maps[1:])
    kept = linear.float32_product, linear.add_rows_own

    def by_place(a, b):
        return kept[0](a, b) * (1 + 1e-6 * b.storage_offset())

    def by_rows(x, *rest):
        kept[1](x, *rest)
        rest[-2][0].mul_(1 + 1e-3 * (len(x) > 100))

    monkeypatch.setattr(linear, "float32_product", by_place)
    monkeypatch.setattr(linear, "add_rows_own", by_rows)
    assert not spans_keep_bits(model)
    assert not stack.keeps_bits()


def test_keys_are_cut_into_the_parts_of_each_owners_row_alone():
    groups = [[PromptGroup(9000, (4000, 5000))], [PromptGroup(300, (7, 9)), PromptGroup(20000)]]
    sizes = [sum(group.size for group in of) for of in groups]
    mixed = AttentionLayout([*groups[0], *groups[1]])
    mixed.divide(sizes)
    tiles, _, count = mixed.key_tiles(64, 1, None)
    wanted, counted = [], 0
    for of, start in zip(groups, (0, sizes[0]), strict=True):
        own, _, parts = AttentionLayout(of).key_tiles(64, 1, None)
        wanted += [tuple(line) for line in (own[:, :4] + start).tolist()]
        counted += parts
    assert sorted(tuple(line) for line in tiles[:, :4].tolist()) == sorted(wanted)
    assert count == counted > 0
    undivided, *_ = AttentionLayout([*groups[0], *groups[1]]).key_tiles(64, 1, None)
    assert sorted(tuple(line) for line in undivided[:, :4].tolist()) != sorted(wanted)
