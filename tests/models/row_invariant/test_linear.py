"""Linear maps: one product where weights lie end to end, LoRA unmerged, gradients, and which kernel serves."""

import os

import pytest
import torch
from torch import nn

from bits_measured import plain_cublas
from logitless.errors import UnavailableError
from logitless.float32_sums import end_to_end
from logitless.models.kernels.gate import gated
from logitless.models.kernels.linear import Tile
from logitless.models.kernels.rows import with_room
from logitless.models.one_node import one_node
from logitless.models.row_invariant import linear
from logitless.models.row_invariant.linear import (
    Plan,
    Projection,
    Shape,
    lay_end_to_end,
    product,
    project,
    project_gated,
)

SIZES = (6, 4, 4)


def projections(dtype=torch.float32, *, bias=False, rank=0, end_to_end=True, sizes=SIZES):
    g = torch.Generator().manual_seed(1)

    def parameter(*shape):
        return nn.Parameter(torch.randn(*shape, generator=g).to(dtype))

    weights, biases = [parameter(n, 8) for n in sizes], [parameter(n) for n in sizes]
    if end_to_end:
        lay_end_to_end(weights)
        lay_end_to_end(biases)
    return [
        Projection(
            w, b if bias else None, parameter(rank, 8) if rank else None, parameter(len(w), rank) if rank else None, 0.5
        )
        for w, b in zip(weights, biases, strict=True)
    ]


def plain(x, parts):
    out = []
    for p in parts:
        y = x @ p.weight.double().T
        if p.bias is not None:
            y = y + p.bias.double()
        if p.lora_a is not None:
            y = y + p.lora_scale * (x @ p.lora_a.double().T) @ p.lora_b.double().T
        out.append(y)
    return out


def tensors(parts):
    return [t for p in parts for t in (p.weight, p.bias, p.lora_a, p.lora_b) if t is not None]


@pytest.mark.parametrize(("bias", "rank", "together"), [(False, 0, True), (True, 0, False), (True, 3, True)])
def test_projections_and_their_gradients_are_those_of_float64(bias, rank, together):
    parts = projections(bias=bias, rank=rank, end_to_end=together)
    x = torch.randn(5, 8, requires_grad=True)
    grads = [torch.randn(5, n) for n in SIZES]
    exact = x.detach().double().requires_grad_()
    wanted = plain(exact, parts)
    want = torch.autograd.grad(wanted, [exact, *tensors(parts)], [g.double() for g in grads])
    found = project(x, parts)
    got = torch.autograd.grad(found, [x, *tensors(parts)], grads)
    for a, b in zip((*found, *got), (*wanted, *want), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rank", "sizes"), [(3, (128, 256, 24)), (20, (128, 8))])
def test_lora_factors_that_lie_end_to_end_are_two_products_with_the_bits_of_two_for_each(rank, sizes, monkeypatch):
    parts = projections(torch.bfloat16, rank=rank, sizes=sizes)
    x = torch.randn(37, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    calls = []
    monkeypatch.setattr(linear, "product", lambda *given: calls.append(given[1].shape) or product(*given))
    grads = [torch.randn(37, n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in sizes]
    results = []
    for together in (False, True):
        if together:
            lay_end_to_end([p.lora_a for p in parts])
            lay_end_to_end([p.lora_b for p in parts])
        calls.clear()
        found = project(x, parts)
        results.append([*found, *torch.autograd.grad(found, tensors(parts), grads)])
        assert calls[1:] == ([(rank * len(sizes), 8)] if together else [(rank, 8)] * len(sizes))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    without = project(x, [p._replace(lora_a=None, lora_b=None) for p in parts])
    assert not any(torch.equal(a, b) for a, b in zip(without, results[0], strict=False))


def test_lora_of_other_scales_or_many_ranks_is_added_map_by_map():
    sizes = (128, 128)
    for parts in (projections(rank=3, sizes=sizes), projections(rank=80, sizes=sizes)):
        parts[1] = parts[1]._replace(lora_scale=2.0 if parts[1].lora_a.shape[0] == 3 else 0.5)
        lay_end_to_end([p.lora_a for p in parts])
        lay_end_to_end([p.lora_b for p in parts])
        x = torch.randn(5, 8)
        for got, want in zip(project(x, parts), plain(x.double(), parts), strict=True):
            torch.testing.assert_close(got.double(), want.detach(), rtol=1e-5, atol=1e-4)


def test_a_second_derivative_is_refused():
    parts = projections(end_to_end=False)
    (found,) = project(torch.randn(5, parts[0].weight.shape[1]), parts[:1])
    with pytest.raises(UnavailableError, match="differentiated twice"):
        torch.autograd.grad(found.square().sum(), parts[0].weight, create_graph=True)


def test_parameters_laid_end_to_end_stay_the_parameters_they_were():
    layer = nn.ModuleList([nn.Linear(8, n) for n in SIZES])
    before = [(p, p.detach().clone()) for p in layer.parameters()]
    weights = [module.weight for module in layer]
    assert end_to_end(weights) is None
    lay_end_to_end(weights)
    assert torch.equal(end_to_end(weights), torch.cat([w.detach() for w in weights]))
    for parameter, (old, value) in zip(layer.parameters(), before, strict=True):
        assert parameter is old
        assert torch.equal(parameter, value)


def test_a_step_of_the_optimizer_reaches_the_product_of_all():
    parts = projections()
    x = torch.randn(3, 8)
    before = project(x, parts)
    with torch.no_grad():
        parts[1].weight.mul_(2)
    after = project(x, parts)
    assert torch.equal(after[0], before[0])
    torch.testing.assert_close(after[1], 2 * before[1])


def test_columns_of_one_projection_are_handed_out_and_their_gradients_taken_together():
    g = torch.Generator().manual_seed(2)
    weight = nn.Parameter(torch.randn(14, 8, generator=g))
    x = torch.randn(5, 8)
    parts = project(x, [Projection(weight)], SIZES)
    assert [p.shape[1] for p in parts] == list(SIZES)
    grads = [torch.randn(5, n) for n in SIZES]
    (found,) = torch.autograd.grad(parts, [weight], grads)
    torch.testing.assert_close(found, torch.cat(grads, 1).T @ x)


@pytest.mark.parametrize("gelu", [False, True])
def test_product_and_gate_are_one_kernel_where_a_check_planned_it_and_nobody_wants_gradients(gelu, monkeypatch):
    g = torch.Generator().manual_seed(4)
    parts = [Projection(nn.Parameter(torch.randn(24, 32, generator=g).bfloat16())) for _ in range(2)]
    lay_end_to_end([p.weight for p in parts])
    x = torch.randn(9, 32, generator=g).bfloat16()
    shape = Shape.of(end_to_end([p.weight for p in parts]), None)._replace(gate="gelu" if gelu else "silu")
    with torch.no_grad():
        assert project_gated(x, parts, gelu=gelu) is None  # nobody planned it
        monkeypatch.setitem(linear._plans, shape, Plan({}, {16: Tile(16, 16, 32, 1, 1, tma=True)}))
        assert torch.equal(project_gated(x, parts, gelu=gelu), gated(*project(x, parts), gelu=gelu))
        with plain_cublas():
            assert project_gated(x, parts, gelu=gelu) is None
        assert project_gated(x, parts, gelu=not gelu) is None
        assert project_gated(x[:1], parts, gelu=gelu) is None  # another count
        assert project_gated(x.repeat(2, 1), parts, gelu=gelu) is None
        with_lora = parts[0]._replace(lora_a=parts[0].weight, lora_b=parts[0].weight)
        assert project_gated(x, [with_lora, parts[1]], gelu=gelu) is None
    assert project_gated(x, parts, gelu=gelu) is None


def test_a_node_that_is_trained_has_the_gradients_of_product_and_gate_whatever_a_check_planned(monkeypatch):
    g = torch.Generator().manual_seed(4)
    parts = [Projection(nn.Parameter(torch.randn(24, 32, generator=g).bfloat16())) for _ in range(2)]
    weights = [p.weight for p in parts]
    lay_end_to_end(weights)
    shape = Shape.of(end_to_end(weights), None)._replace(gate="silu")
    monkeypatch.setitem(linear._plans, shape, Plan({}, {16: Tile(16, 16, 32, 1, 1, tma=True)}))
    x = torch.randn(9, 32, generator=g).bfloat16().requires_grad_()

    def rows(x):
        whole = project_gated(x, parts, gelu=False)
        return project(x, parts) if whole is None else (whole,)

    sum(out.float().sum() for out in one_node(rows, [x], weights)).backward()
    assert all(each.grad is not None for each in (x, *weights))


def test_a_library_serves_at_checked_counts_alone_and_a_tile_everywhere_else(monkeypatch):
    used = []

    def library(way, rows, weight, bias, out):
        used.append((way, len(rows)))
        out.copy_(rows @ weight.t())

    def tile(rows, weight, tile, *, bias=None, out=None):
        used.append(("tile", len(rows)))
        return out.copy_(rows @ weight.t())

    monkeypatch.setattr(linear, "library_product", library)
    monkeypatch.setattr(linear, "fixed_order_product", tile)
    monkeypatch.setattr(linear, "empty_rows", lambda n, *s, like, dtype: torch.zeros(with_room(n), *s)[:n])
    weight = torch.randn(3, 4)
    plan = Plan(linear.default_tiles(Shape.of(weight, None)), {1024: "cublas", 768: "cublas", 16384: "cublaslt"})
    monkeypatch.setitem(linear._plans, Shape.of(weight, None), plan)
    for count, room, expected in (
        (1000, 1024, [("cublas", 1024)]),
        (1000, 1000, [("cublas", 768), ("tile", 232)]),
        (600, 600, [("tile", 600)]),
        (20, 1024, [("tile", 20)]),
        (17000, 17152, [("cublaslt", 16384), ("cublas", 768)]),
    ):
        used.clear()
        x = torch.randn(room, 4)[:count]
        torch.testing.assert_close(product(x, weight), x @ weight.t())
        assert used == expected


def test_a_library_that_warns_past_python_is_not_heard_and_stderr_is_there_afterwards(capfd):
    with linear._without_stderr():
        os.write(2, b"experimental\n")
    os.write(2, b"heard\n")
    assert capfd.readouterr().err == "heard\n"


def test_what_benchmarks_compare_with_is_the_librarys_product_whatever_the_plan_says(monkeypatch):
    used = []
    monkeypatch.setattr(linear, "library_product", lambda way, rows, weight, bias, out: used.append(way))
    x, weight = torch.zeros(1024, 4), torch.zeros(3, 4)
    with plain_cublas():
        product(x, weight)
    assert used == ["cublas"]
    assert Plan({}).library(1024) is None
