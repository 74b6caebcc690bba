"""Products, norms, gate and rotary positions: transformers' numbers and roundings, bits of a row, gradients."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from logitless.models.kernels import rotary
from logitless.models.kernels.gate import gated, gated_backward
from logitless.models.kernels.linear import INTERPRETED, Tile, add_low_rank, fixed_order_product, gated_product
from logitless.models.kernels.norm import norm, norm_backward
from logitless.models.kernels.rotary import HeadNorms, Heads, rotate, rotate_backward
from logitless.models.kernels.rows import CHECKED_ROWS, checked_count, with_room
from logitless.models.kernels.sinks import with_sinks, with_sinks_backward
from tests.rounding import of_roundings


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("tile", [INTERPRETED, Tile(16, 16, 32, 1, 1), Tile(16, 32, 16, 1, 1, swapped=True)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_within_one_rounding_of_float64_for_every_tile(tile, bias):
    x, weight = draw(17, 40, dtype=torch.bfloat16), draw(23, 40, dtype=torch.bfloat16, seed=1)
    b = draw(23, dtype=torch.bfloat16, seed=2) if bias else None
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    got = fixed_order_product(x, weight, tile, bias=b)
    assert ((got.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()


def test_a_product_is_added_to_what_is_there_with_one_rounding():
    x, weight, before = draw(5, 8, dtype=torch.bfloat16), draw(7, 8, dtype=torch.bfloat16, seed=1), draw(5, 7)
    out = before.bfloat16()
    exact = out.double() + 0.5 * (x.double() @ weight.double().T)
    fixed_order_product(x, weight, INTERPRETED, out=out, add_to_out=0.5)
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()


@pytest.mark.parametrize(("widths", "rank"), [((5,), 3), ((64, 192, 7), 16), ((256, 9), 20)])
def test_low_rank_products_are_added_each_to_its_columns_with_one_rounding(widths, rank):
    low = draw(37, rank * len(widths), dtype=torch.bfloat16)
    weight = draw(sum(widths), rank, dtype=torch.bfloat16, seed=1)
    out = draw(37, sum(widths), seed=2).bfloat16()
    parts = zip(out.double().split(widths, 1), low.double().split(rank, 1), weight.double().split(widths), strict=True)
    exact = torch.cat([before + 0.5 * (x @ w.T) for before, x, w in parts], 1)
    alone = out[5:6].clone()
    add_low_rank(low, weight, out, widths, 0.5)
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()
    add_low_rank(low[5:6], weight, alone, widths, 0.5)
    assert torch.equal(alone, out[5:6])


@pytest.mark.parametrize("tile", [Tile(16, 16, 32, 1, 1, swapped=True, tma=True), Tile(32, 16, 32, 1, 1, tma=True)])
@pytest.mark.parametrize("gelu", [False, True])
def test_a_product_with_its_gate_has_the_bits_of_the_two_apart(tile, gelu):
    x, weight = draw(37, 64, dtype=torch.bfloat16), draw(80, 64, dtype=torch.bfloat16, seed=1)
    both = fixed_order_product(x, weight, INTERPRETED)
    assert torch.equal(gated_product(x, weight, tile, gelu=gelu), gated(both[:, :40], both[:, 40:], gelu=gelu))


def test_room_reaches_the_next_checked_count():
    assert all(checked_count(count) == count for count in CHECKED_ROWS)
    assert [with_room(n) for n in (1, 2, 513, 16384, 16385, 40000)] == [1, 16, 768, 16384, 16385, 2 * 16384 + 7424]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "rounding"), [(LlamaRMSNorm, {}), (Gemma3RMSNorm, {"gemma": True}), (GptOssRMSNorm, {"once": True})]
)
def test_norms_have_the_numbers_and_roundings_of_transformers(kind, rounding, dtype):
    theirs = kind(24, eps=1e-5).to(dtype)
    theirs.weight.data = draw(24, dtype=dtype, seed=3)
    x, delta = draw(6, 24, dtype=dtype), draw(6, 24, dtype=dtype, seed=1)
    total, out = norm(x, theirs.weight, 1e-5, delta=delta, **rounding)
    after, _ = norm(x, theirs.weight, 1e-5, delta=delta, **rounding, after=True)
    assert torch.equal(total, x + delta)
    # On either side a root of a sum of 24 squares and five roundings, in float32; then two roundings to the dtype.
    tolerance = of_roundings(torch.float32, 2 * (24 // 2 + 5)) + 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, theirs(x + delta).detach(), rtol=tolerance, atol=0)
    normed = theirs(delta).detach()
    torch.testing.assert_close(after, x + normed, rtol=tolerance, atol=tolerance * float(normed.abs().max()))


def test_a_norm_that_rounds_once_is_rounded_after_the_weight_only():
    kind = GptOssRMSNorm(24, eps=1e-5).bfloat16()
    kind.weight.data = draw(24, dtype=torch.bfloat16, seed=3)
    x = draw(40, 24, dtype=torch.bfloat16)
    once, twice = (norm(x, kind.weight, 1e-5, once=once)[1] for once in (True, False))
    exact = kind.double()(x.double())
    assert ((once.double() - exact).abs() <= 2**-8 * exact.abs() * (1 + 1e-4)).all()  # half a step of bfloat16
    assert relative(once, exact) < relative(twice, exact)


@pytest.mark.parametrize("gemma", [False, True])
def test_gradients_of_a_norm_are_those_of_float64(gemma):
    x, weight, grad, beside = draw(7, 20), draw(20, seed=1), draw(7, 20, seed=2), draw(7, 20, seed=3)
    v, w = x.double().requires_grad_(), weight.double().requires_grad_()
    out = v * (v.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (1 + w if gemma else w)
    (out * grad + v * beside).sum().backward()
    grad_x, grad_weight = norm_backward(x, weight, 1e-5, grad, beside, gemma=gemma, weight_dtype=weight.dtype)
    assert relative(grad_x, v.grad) < 1e-6
    assert relative(grad_weight, w.grad) < 1e-6


@pytest.mark.parametrize("gelu", [False, True])
def test_the_gate_and_its_gradients_are_those_of_float64(gelu):
    both, grad = draw(5, 26), draw(5, 13, seed=1)
    gate, up = both[:, :13], both[:, 13:]
    g, u = gate.double().requires_grad_(), up.double().requires_grad_()
    exact = (F.gelu(g, approximate="tanh") if gelu else F.silu(g)) * u
    exact.backward(grad.double())
    assert relative(gated(gate, up, gelu=gelu), exact.detach()) < 1e-6
    grad_gate, grad_up = gated_backward(gate, up, grad, gelu=gelu)
    assert relative(grad_gate, g.grad) < 1e-6
    assert relative(grad_up, u.grad) < 1e-6


def rotated(x, weight, cos, sin, rotary, gemma, eps=1e-5):
    """[T, h, E] in the dtype of x, by transformers' function."""
    if weight is not None:
        unit = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        x = unit * (1 + weight if gemma else weight)
    turned = x[..., :rotary].transpose(0, 1)[None]
    out = apply_rotary_pos_emb(turned, turned, cos[None], sin[None])[0][0].transpose(0, 1)
    return torch.cat([out, x[..., rotary:]], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_sinks_and_its_gradients_are_those_of_float64(dtype):
    attended, grad = draw(9, 3, 12, dtype=dtype), draw(9, 36, dtype=dtype, seed=1)
    log_sum_exp, sinks = 3 * draw(9, 3, seed=2), draw(3, dtype=dtype, seed=3)
    leaves = [x.double().requires_grad_() for x in (attended, log_sum_exp, sinks)]
    scores = torch.stack([leaves[1], leaves[2].expand(9, 3)])
    exact = (leaves[0] * scores.softmax(0)[0][..., None]).flatten(1)
    exact.backward(grad.double())
    rounding = 1e-6 + torch.finfo(dtype).eps / 2
    assert relative(with_sinks(attended, log_sum_exp, sinks), exact.detach()) < rounding
    grads = with_sinks_backward(attended, log_sum_exp, sinks, grad, sinks_dtype=torch.float32)
    for got, leaf, tolerance in zip(grads, leaves, (rounding, 1e-6, 1e-6), strict=True):
        assert relative(got, leaf.grad) < tolerance
    assert with_sinks_backward(attended, log_sum_exp, sinks, grad, sinks_dtype=None)[2] is None


def test_sinks_have_the_bits_of_a_token_alone_and_of_no_tokens_nothing():
    attended, log_sum_exp, sinks = draw(5, 3, 12), draw(5, 3, seed=1), draw(3, seed=2)
    whole = with_sinks(attended, log_sum_exp, sinks)
    assert torch.equal(with_sinks(attended[2:3].clone(), log_sum_exp[2:3].clone(), sinks), whole[2:3])
    empty = with_sinks(torch.zeros(1, 3, 12), torch.full((1, 3), -torch.inf), sinks)  # a row without a query
    assert torch.equal(empty, torch.zeros(1, 36))


@pytest.mark.parametrize(("turning", "gemma", "normed"), [(12, False, False), (8, False, True), (12, True, True)])
def test_rotary_positions_and_their_gradients_are_those_of_float64(turning, gemma, normed):
    heads, rows = Heads(4, 2, 12, turning), 5
    qkv = draw(rows, 8 * 12)
    columns = (48, 24, 24)
    angle = draw(9, turning // 2, seed=1)
    cos, sin = (f(torch.cat([angle, angle], 1)) for f in (torch.cos, torch.sin))
    position = torch.tensor([0, 3, 8, 2, 2], dtype=torch.int32)
    norms = HeadNorms(draw(12, seed=2), draw(12, seed=3), 1e-5, gemma) if normed else None
    query, key, value = qkv.split(columns, 1)
    found = rotate(query, key, value, heads, position, cos, sin, norms)
    leaf = qkv.double().requires_grad_()
    weights = [w.double().requires_grad_() for w in (norms.query, norms.key)] if norms else [None, None]
    wanted = []
    for part, weight, count in zip(leaf.split(columns, 1), [*weights, None], (4, 2, 2), strict=True):
        part = part.unflatten(1, (count, 12))
        turned = rotated(part, weight, cos[position].double(), sin[position].double(), turning, gemma)
        wanted.append(turned if len(wanted) < 2 else part)
    grads = [draw(rows, count, 12, seed=4 + count) for count in (4, 2, 2)]
    sum((w * g).sum() for w, g in zip(wanted, grads, strict=True)).backward()
    for got, want in zip(found, wanted, strict=True):
        assert relative(got, want.detach()) < 1e-6
    dtypes = None if norms is None else (query.dtype, key.dtype)
    grad, *grad_norms = rotate_backward(query, key, heads, position, cos, sin, norms, *grads, norm_dtypes=dtypes)
    assert relative(grad, leaf.grad) < 1e-6
    for got, weight in zip(grad_norms, weights, strict=True):
        assert (got is None) if weight is None else relative(got, weight.grad) < 1e-6


def in_pairs(x, weight, turns, factor, eps=1e-5):
    """[T, h, E] in the dtype of x, each two neighbours as a complex number, as Llama 4 has it."""
    if weight is not None:
        x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    if turns is not None:
        x = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns[:, None]).flatten(-2)
    return x if factor is None else x * factor[:, None, None]


@pytest.mark.parametrize("turning", [12, 0])
def test_pairs_of_neighbours_factors_of_queries_and_their_gradients_are_those_of_float64(turning):
    heads, rows, columns, ones = Heads(4, 2, 12, turning, interleaved=True), 5, (48, 24, 24), torch.ones(12)
    qkv, position = draw(rows, 8 * 12), torch.tensor([0, 3, 8, 2, 2], dtype=torch.int32)
    angle, norms, factor = draw(9, 6, seed=1), HeadNorms(ones, ones, 1e-5), None
    cos, sin = (f(angle).repeat_interleave(2, 1) for f in (torch.cos, torch.sin))
    turns = torch.polar(torch.ones(9, 6).double(), angle.double())[position]
    if turning == 0:
        cos, sin, turns, norms, factor = None, None, None, None, 1 + draw(9, seed=3).abs()
    query, key, value = qkv.split(columns, 1)
    found = rotate(query, key, value, heads, position, cos, sin, norms, factor=factor)
    leaf = qkv.double().requires_grad_()
    parts = [part.unflatten(1, (-1, 12)) for part in leaf.split(columns, 1)]
    weight, of_query = None if norms is None else ones.double(), None if factor is None else factor[position].double()
    wanted = [in_pairs(parts[0], weight, turns, of_query), in_pairs(parts[1], weight, turns, None), parts[2]]
    grads = [draw(rows, count, 12, seed=4 + count) for count in (4, 2, 2)]
    sum((w * g).sum() for w, g in zip(wanted, grads, strict=True)).backward()
    for got, want in zip(found, wanted, strict=True):
        assert relative(got, want.detach()) < 1e-6
    options = {"norm_dtypes": None, "factor": factor}
    grad, *_ = rotate_backward(query, key, heads, position, cos, sin, norms, *grads, **options)
    assert relative(grad, leaf.grad) < 1e-6


def test_pairs_of_neighbours_are_rounded_once():
    heads, position = Heads(4, 2, 12, 12, interleaved=True), torch.arange(9)
    query, key, value = draw(9, 96, dtype=torch.bfloat16).split((48, 24, 24), 1)
    angle = draw(9, 6, seed=1)
    cos, sin = (f(angle).repeat_interleave(2, 1) for f in (torch.cos, torch.sin))
    found = rotate(query, key, value, heads, position, cos, sin, None)[0].double()
    exact = in_pairs(query.double().unflatten(1, (-1, 12)), None, torch.polar(torch.ones(9, 6), angle).cdouble(), None)
    assert ((found - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


def test_norms_over_all_heads_of_a_token_and_their_gradients_are_those_of_float64():
    heads, rows, columns = Heads(4, 2, 12, 8), 5, (48, 24, 24)
    qkv, weights = draw(rows, 96), (draw(48, seed=2), draw(24, seed=3))
    angle = draw(9, 4, seed=1)
    cos, sin = (f(torch.cat([angle, angle], 1)) for f in (torch.cos, torch.sin))
    position, norms = torch.tensor([0, 3, 8, 2, 2], dtype=torch.int32), HeadNorms(*weights, 1e-5)
    query, key, value = qkv.split(columns, 1)
    leaf, leaves = qkv.double().requires_grad_(), [w.double().requires_grad_() for w in weights]
    wanted = [
        rotated(
            (x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w).unflatten(1, (-1, 12)),
            None, cos[position].double(), sin[position].double(), 8, False,
        )
        for x, w in zip(leaf.split(columns, 1), leaves, strict=False)
    ]  # fmt: skip
    grads = [draw(rows, count, 12, seed=4 + count) for count in (4, 2, 2)]
    (
        sum((w * g).sum() for w, g in zip(wanted, grads, strict=False)) + (leaf[:, 72:] * grads[2].flatten(1)).sum()
    ).backward()
    found = rotate(query, key, value, heads, position, cos, sin, norms)
    assert all(relative(got, want.detach()) < 1e-6 for got, want in zip(found, wanted, strict=False))
    assert torch.equal(found[2].flatten(1), value)
    dtypes = (torch.float32, torch.float32)
    grad, *grad_norms = rotate_backward(query, key, heads, position, cos, sin, norms, *grads, norm_dtypes=dtypes)
    assert relative(grad, leaf.grad) < 1e-6
    assert all(relative(got, want.grad) < 1e-6 for got, want in zip(grad_norms, leaves, strict=True))
    again, *none = rotate_backward(query, key, heads, position, cos, sin, norms, *grads, norm_dtypes=None)
    assert torch.equal(again, grad)
    assert none == [None, None]


def test_several_tokens_a_program_are_rotated_as_one_at_a_time(monkeypatch):
    heads, norms = Heads(4, 2, 12, 8), HeadNorms(draw(12, seed=2), draw(12, seed=3), 1e-5)
    query, key, value = draw(8, 8 * 12).split((48, 24, 24), 1)
    cos, sin, position = draw(9, 8, seed=1), draw(9, 8, seed=5), torch.tensor([0, 3, 8, 2, 2, 1, 5, 4])
    one = rotate(query, key, value, heads, position, cos, sin, norms)
    monkeypatch.setattr(rotary, "MANY", 8)
    for several, expected in zip(rotate(query, key, value, heads, position, cos, sin, norms), one, strict=True):
        assert torch.equal(several, expected)


def test_keys_and_values_go_to_their_slots_and_nowhere_without_one():
    heads = Heads(2, 2, 8, 8)
    query, key, value = (draw(3, 16, seed=s) for s in range(3))
    cos, sin = torch.ones(4, 8), torch.zeros(4, 8)
    cache = [torch.full((5, 2, 8), float("nan")) for _ in range(2)]
    position = torch.zeros(3, dtype=torch.int32)
    rotate(
        query, key, value, heads, position, cos, sin, None,
        key_out=cache[0], value_out=cache[1], slot=torch.tensor([4, -1, 1]),
    )  # fmt: skip
    for kept, given in zip(cache, (key, value), strict=True):
        assert torch.equal(kept[[4, 1]].flatten(1), given[[0, 2]])
        assert kept[[0, 2, 3]].isnan().all()
