"""Kernels of gated delta nets: float64's outputs and gradients, and bits of decoding, packed rows and convolution."""

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from logitless.models.attention import AttentionLayout
from logitless.models.kernels import delta_launch as delta
from logitless.models.kernels.convolution import convolution, convolution_backward, convolution_step
from logitless.models.kernels.delta_forward import from_halves, high_half, low_half
from logitless.models.kernels.delta_gates import (
    decay_and_beta,
    decay_and_beta_backward,
    gated_norm,
    gated_norm_backward,
)
from logitless.models.kernels.delta_launch import Chunks, DeltaCache, DeltaTile, DeltaTiles, Segment, delta_step
from logitless.models.row_invariant.delta_net import DeltaRule
from tests.models.kernels.checked_addresses import checked_addresses
from tests.rounding import of_roundings


@triton.jit
def split_and_joined(state, high, joined, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(state + at)
    half = high_half(value, False)
    tl.store(high + at, half)
    tl.store(joined + at, from_halves(half, low_half(value)))


HEADS, VALUE_HEADS, KEY_WIDTH, WIDTH = 1, 2, 16, 32
TILES = DeltaTiles()


def draw(tokens, dtype=torch.float32, seed=0, widths=(KEY_WIDTH, WIDTH)):
    """Queries, keys, values, log-decays (of one head strong) and beta; keys are alike, as after SiLU."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    query, key = (F.silu(normal(tokens, HEADS, widths[0])).to(dtype) for _ in range(2))
    value = normal(tokens, VALUE_HEADS, widths[1]).to(dtype)
    decay = -F.softplus(normal(tokens, VALUE_HEADS) - 2.0) * torch.tensor([1.0, 60.0])
    return query, key, value, decay, normal(tokens, VALUE_HEADS).sigmoid()


def ages(lengths):
    return AttentionLayout.of_sequences(lengths).positions


def lengths_around(size):
    return [1, size - 1, size, size + 1, 3 * size + 5]


def at(inputs, rows):
    return [x[rows] for x in inputs]


def recurrent(inputs, lengths):
    """The rule one token after the other, each sequence from a state of zeros."""
    outs = []
    for part in zip(*(x.split(lengths) for x in inputs), strict=True):
        query, key, value, decay, beta = part
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
        query, key = (x.repeat_interleave(VALUE_HEADS // HEADS, 1) for x in (query, key))
        state = torch.zeros(VALUE_HEADS, key.shape[-1], value.shape[-1], dtype=value.dtype)
        for t in range(len(query)):
            state = state * decay[t].exp()[:, None, None]
            new = beta[t, :, None] * (value[t] - (state * key[t, :, :, None]).sum(1))
            state = state + key[t, :, :, None] * new[:, None]
            outs.append((state * query[t, :, :, None]).sum(1) * key.shape[-1] ** -0.5)
    return torch.stack(outs)


def relative(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


def test_the_recurrence_of_these_tests_is_that_of_transformers():
    inputs = draw(9)
    query, key, value, decay, beta = (x[None] for x in inputs)
    query, key = (x.repeat_interleave(2, 2) for x in (query, key))
    theirs, _ = torch_recurrent_gated_delta_rule(query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)
    # A few dozen roundings of float32 a token, each damped by the decay.
    assert relative(theirs[0], recurrent([x.double() for x in inputs], [9])) < of_roundings(torch.float32, 64)


# Roundings on the way to an output, each of which may cost half a step: keys and queries, T, M, R, the state, its keys'
# sum and the output itself in the inputs' dtype.
ROUNDINGS = 8


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 16), (torch.bfloat16, 16), (torch.bfloat16, 64)], ids=str)
def test_outputs_and_gradients_are_those_of_float64(dtype, size):
    lengths = lengths_around(size) if size == 16 else [size + 5]
    inputs, grad = draw(sum(lengths), dtype), draw(sum(lengths), dtype, seed=1)[2]
    leaves, exact = ([x.clone().to(kind or x.dtype).requires_grad_() for x in inputs] for kind in (None, torch.float64))
    out, wanted = DeltaRule.apply(*leaves, Chunks.of(lengths, size)), recurrent(exact, lengths)
    out.backward(grad)
    wanted.backward(grad.double())
    bound = of_roundings(dtype, ROUNDINGS)
    assert relative(out.detach(), wanted.detach()) < bound
    for leaf, right in zip(leaves, exact, strict=True):
        assert relative(leaf.grad, right.grad) < 2 * bound  # forward and backward


@pytest.mark.parametrize(
    ("dtype", "size", "prompted"),
    [
        (torch.bfloat16, 16, False),
        (torch.float32, 16, True),
        *(pytest.param(torch.bfloat16, 32, prompted, marks=pytest.mark.slow) for prompted in (False, True)),
    ],
    ids=str,
)
def test_a_decoded_token_has_the_bits_of_packed_rows(dtype, size, prompted):
    lengths = lengths_around(size)
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    inputs = draw(sum(lengths), dtype)
    slots = range(len(lengths))
    cache, ends = (DeltaCache.empty(len(lengths), HEADS, VALUE_HEADS, KEY_WIDTH, WIDTH, size=size, dtype=dtype)
                   for _ in range(2))  # fmt: skip
    packed, _ = delta.forward(*inputs, Chunks.of(lengths, size, slots=slots), TILES, cache=ends)
    begins = [0] * len(lengths)
    if prompted:  # some end inside a chunk, some at its limit
        begins = [min(length, 1 + n * size // 2) for n, length in enumerate(lengths)]
        rows = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, begins, strict=True)])
        delta.forward(*at(inputs, rows), Chunks.of(begins, size, slots=slots), TILES, cache=cache)
    for step in range(max(length - begin for length, begin in zip(lengths, begins, strict=True))):
        slots = [n for n in reversed(range(len(lengths))) if begins[n] + step < lengths[n]]
        rows = torch.tensor([starts[n] + begins[n] + step for n in slots])
        index = torch.tensor([(begins[n] + step) % size for n in slots], dtype=torch.int32)
        slot = torch.tensor(slots, dtype=torch.int32)
        out = delta_step(*at(inputs, rows), cache, slot, index, slot * size + index)
        assert torch.equal(out, packed[rows])
    for mine, theirs in zip(cache[:2], ends[:2], strict=True):
        assert theirs is None or torch.equal(mine, theirs)


def test_a_sequence_that_is_continued_from_a_slot_has_the_bits_of_the_whole():
    inputs = draw(40, torch.bfloat16)
    whole, _ = delta.forward(*inputs, Chunks.of([40], 16), TILES)
    cache = DeltaCache.empty(3, HEADS, VALUE_HEADS, KEY_WIDTH, WIDTH, size=16)
    parts = (Segment(0, 0, 16, after=2), Segment(0, 16, 40, before=2, after=2))
    outs = [
        delta.forward(*at(inputs, slice(part.start, part.stop)), Chunks.laid([part], 16, "cpu"), TILES, cache=cache)[0]
        for part in parts
    ]
    assert torch.equal(torch.cat(outs), whole)


def test_rows_that_have_no_token_change_nothing():
    inputs = draw(2, torch.bfloat16)
    cache = DeltaCache.empty(1, HEADS, VALUE_HEADS, KEY_WIDTH, WIDTH, size=16)
    none = torch.full((2,), -1, dtype=torch.int32)
    assert not delta_step(*inputs, cache, none, torch.zeros_like(none), none).any()
    assert all(part is None or not part.any() for part in cache)


def test_a_sequence_has_the_same_bits_in_any_row_and_by_any_tile():
    lengths = [21, 40, 7]
    inputs = draw(sum(lengths), torch.bfloat16)
    packed = delta.forward(*inputs, Chunks.of(lengths, 16), TILES)[0]
    alone = delta.forward(*at(inputs, slice(21, 61)), Chunks.of([40], 16), TILES)[0]
    assert torch.equal(alone, packed[21:61])
    tiles = DeltaTiles(scan=DeltaTile(16, 1, 1))
    assert torch.equal(delta.forward(*inputs, Chunks.of(lengths, 16), tiles)[0], packed)


def test_gradients_repeat_in_every_bit_and_end_at_each_sequence():
    lengths = [21, 40]
    inputs, grad = draw(sum(lengths)), draw(sum(lengths), seed=1)[2]

    def grads(rows, chunks):
        leaves = [x.clone().requires_grad_() for x in at(inputs, rows)]
        return torch.autograd.grad(DeltaRule.apply(*leaves, chunks), leaves, grad[rows])

    whole, again = (grads(slice(None), Chunks.of(lengths, 16)) for _ in range(2))
    alone = grads(slice(21, None), Chunks.of([40], 16))
    for first, second, mine in zip(whole, again, alone, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first[21:], mine)


def test_decay_beta_and_the_gated_norm_are_those_of_torch_with_their_gradients():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    a, b, a_log, dt_bias, *grads = normal(19, 3) * 8, normal(19, 3), normal(3), normal(3), normal(19, 3), normal(19, 3)
    exact = [x.double().requires_grad_() for x in (a, b, a_log, dt_bias)]
    wanted = (-exact[2].exp() * F.softplus(exact[0] + exact[3]), exact[1].sigmoid())
    torch.autograd.backward(wanted, [grad.double() for grad in grads])
    found = decay_and_beta(a, b, a_log, dt_bias)
    gradients = decay_and_beta_backward(a, b, a_log, dt_bias, *grads)
    truth = (*(x.detach() for x in wanted), *(x.grad for x in exact))
    x, gate, weight, grad = normal(19, 3, 16), normal(19, 48), normal(16), normal(19, 48)
    exact = [x.double().requires_grad_(), gate.double().requires_grad_(), weight.double().requires_grad_()]
    normed = F.rms_norm(exact[0], (16,), exact[2], 1e-6).flatten(1) * F.silu(exact[1])
    normed.backward(grad.double())
    found += (gated_norm(x, gate, weight, 1e-6),)
    gradients += gated_norm_backward(x, gate, weight, 1e-6, grad)
    truth = (*truth[:2], normed.detach(), *truth[2:], *(x.grad for x in exact))
    for mine, right in zip((*found, *gradients), truth, strict=True):
        assert relative(mine, right) < of_roundings(torch.float32, 64)  # of sums over 19 tokens and 16 columns


def convolved(x, weight, lengths):
    """transformers' convolution of each sequence alone."""
    outs = []
    for part in x.split(lengths):
        full = F.conv1d(part.T[None], weight[:, None], padding=weight.shape[1] - 1, groups=weight.shape[0])
        outs.append(F.silu(full[0, :, : len(part)].T))
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_convolution_and_its_gradients_are_those_of_float64_and_end_at_each_sequence(dtype):
    lengths = [1, 3, 19]
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(23, 20, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(20, 4, generator=generator).to(dtype)
    exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
    wanted = convolved(*exact, lengths)
    wanted.backward(grad.double())
    bound = of_roundings(torch.float32, 16) + torch.finfo(dtype).eps / 2
    assert relative(convolution(x, weight, ages(lengths)), wanted.detach()) < bound
    grad_x, grad_weight = convolution_backward(x, weight, ages(lengths), grad)
    assert relative(grad_x, exact[0].grad) < bound
    assert relative(grad_weight, exact[1].grad) < of_roundings(torch.float32, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_the_convolution_has_the_bits_of_packed_rows(dtype):
    lengths = [1, 3, 9]
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((13, 20), (20, 4)))
    packed = convolution(x, weight, ages(lengths)).split(lengths)
    history = torch.zeros(3, 3, 20, dtype=dtype)
    for step in range(9):
        slots = [n for n in (2, 0, 1) if step < lengths[n]]
        rows = torch.stack([x.split(lengths)[n][step] for n in slots])
        out = convolution_step(rows, weight, history, torch.tensor(slots, dtype=torch.int32))
        assert torch.equal(out, torch.stack([packed[n][step] for n in slots]))


def test_no_kernel_touches_memory_outside_its_tensors():
    lengths, size = [1, 16, 37], 16
    tokens, widths = sum(lengths), [HEADS * KEY_WIDTH, HEADS * KEY_WIDTH, VALUE_HEADS * WIDTH]
    mixed = torch.randn(tokens, sum(widths), generator=torch.Generator().manual_seed(0)).bfloat16()
    query, key, value = (x.unflatten(1, (-1, n)) for x, n in zip(mixed.split(widths, 1), (16, 16, 32), strict=True))
    _, _, _, decay, beta = draw(tokens, torch.bfloat16)
    chunks = Chunks.of(lengths, size)
    cache = DeltaCache.empty(4, HEADS, VALUE_HEADS, KEY_WIDTH, WIDTH, size=size)
    slot, index = torch.tensor([3, -1, 0], dtype=torch.int32), torch.tensor([size - 1, 0, 5], dtype=torch.int32)
    tree = [
        Segment(0, 0, 16, after=0, num_following=2),
        *(
            Segment(token, 16, 16 + n, before=0, gradient=i, level=1)
            for i, (token, n) in enumerate([(16, 21), (37, 17)])
        ),
    ]
    with checked_addresses() as launched:
        out, made = delta.forward(query, key, value, decay, beta, Chunks.laid(tree, size, "cpu"), TILES)
        delta.backward(query, key, value, beta, made, out, Chunks.laid(tree, size, "cpu"), TILES)
        for tiles in (TILES, DeltaTiles(scan=DeltaTile(16, 1, 1), gradient_depth=16)):
            out, made = delta.forward(query, key, value, decay, beta, chunks, tiles)
            delta.backward(query, key, value, beta, made, out, chunks, tiles)
        delta.forward(query, key, value, decay, beta, Chunks.of(lengths, size, slots=[0, 2, 1]), TILES, cache=cache)
        place = torch.where(slot < 0, -1, slot * size + index).int()
        for tiles in (TILES, DeltaTiles(advance=DeltaTile(16, 1, 1))):
            some = [x[-3:] for x in (query, key, value, decay, beta)]
            delta_step(*some, cache, slot, index, place, tiles)
        x, weight, age = mixed[:, : widths[0] + 4], torch.randn(widths[0] + 4, 4), ages(lengths)
        convolution_backward(x, weight, age, convolution(x, weight, age))
        convolution_step(x[:3], weight, torch.zeros(4, 3, widths[0] + 4, dtype=x.dtype), slot)
        a, b = mixed[:, :VALUE_HEADS], mixed[:, 5 : 5 + VALUE_HEADS]
        decay_and_beta_backward(a, b, decay[0], beta[0], *decay_and_beta(a, b, decay[0], beta[0]))
        gate = mixed[:, : VALUE_HEADS * WIDTH]
        gated_norm_backward(out, gate, out[0, 0], 1e-6, gated_norm(out, gate, out[0, 0], 1e-6))
    assert len(set(launched)) == 19  # every kernel, and the sum of parts


def test_an_address_outside_a_launchs_tensors_is_found():
    chunks = Chunks.of([17], 16)
    with checked_addresses(), pytest.raises(Exception, match="decay_kernel loads 2 elements outside its tensors"):
        delta.decay_sums(torch.zeros(17, 2)[:16], 2, chunks)


def test_a_state_that_is_not_a_number_stays_none_in_its_half_and_joined_and_numbers_are_restored():
    bits = [0x7FFFFFFF, -1, 0x7F80FFFF, 0x7F808000, 0x7FC00000, 0x3F808000, -0x40000001, 0x7F800000]
    state = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    high, joined = torch.empty(8, dtype=torch.bfloat16), torch.empty(8)
    split_and_joined[(1,)](state, high, joined, 8)
    assert high.isnan().tolist() == joined.isnan().tolist() == [True] * 5 + [False] * 3
    assert joined.view(torch.int32).tolist()[5:] == bits[5:]
