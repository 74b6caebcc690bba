"""The laws of attention on a GPU, at real sizes: bits equal, gradients near float64."""

import pytest
import torch
import triton

from logitless.models import attention
from logitless.models.attention import AttentionLayout, prefix_attention
from logitless.models.kernels import attention_launch
from logitless.models.kernels.attention_tiles import hopper_tiles, plain_tiles
from logitless.models.kernels.window import Chunks
from logitless.models.row_invariant import paged_attention
from logitless.models.row_invariant.paged_attention import (
    DecodeLayout,
    SharedPages,
    decode_attention,
)
from logitless.types import PromptGroup
from tests.models.kernels.attention_cases import Case, dense, draw, unlike

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ordinary_memory")]

GROUPS = (
    PromptGroup(512, (64, 130, 257, 34)),
    PromptGroup(300, (2, 62)),
    PromptGroup(0, (200, 90)),
    PromptGroup(700, (900,)),
    PromptGroup(66, (40,) * 4),
    PromptGroup(1100, (30, 600)),
)
TREE = (
    PromptGroup(1100, (PromptGroup(130, (300, 20, PromptGroup(64, (5, 200)))), 90, PromptGroup(7, (600, 1)))),
    PromptGroup(30, (PromptGroup(0, (70, 9)), PromptGroup(500, (PromptGroup(17, (40, 40)), 0)))),
)
SHAPES = [(14, 2, 64), (16, 8, 128), (32, 8, 128), (32, 32, 96), (8, 4, 256)]
OPTIONS = [{}, {"window": 400}, {"softcap": 50.0}, {"window": Chunks(256)}]


def on_gpu(shape, dtype=torch.bfloat16, groups=GROUPS, **options):
    return Case(shape, groups, dtype, "cuda", **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_shared_unshared_prefilled_and_decoded_have_the_same_bits(shape, dtype, options):
    case = on_gpu(shape, dtype, **options)
    assert case.unlike_unshared() == [0, 0]
    assert case.unlike_prefilled(100) == [0, 0]
    assert case.unlike_prefilled(1 << 20) == [0, 0]
    assert case.unlike_last_decoded(8, shared=True) == [0, 0]
    assert case.unlike_last_decoded(8, shared=False) == [0, 0]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tree_has_the_bits_of_its_sequences_alone(shape, options, monkeypatch):
    case = on_gpu(shape, groups=TREE, **options)
    assert case.layout.branch_rows is not None
    assert case.unlike_unshared() == [0, 0]
    monkeypatch.setattr(attention, "attention_tiles", lambda width, *_: plain_tiles(width))
    assert unlike(case.packed(), case.expected) == [0, 0]


def test_rows_of_another_branch_are_noticed():
    case = on_gpu((16, 8, 128), groups=TREE)
    vars(case.layout)["branch_rows"] = case.layout.branch_rows.roll(1)
    assert min(unlike(case.packed(), case.expected)) > 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_for_other_gpus_have_the_same_bits(shape, monkeypatch):
    case = on_gpu(shape)
    for module in (attention, paged_attention):
        monkeypatch.setattr(module, "attention_tiles", lambda width, *_: plain_tiles(width))
    assert unlike(case.packed(), case.expected) == [0, 0]
    assert case.unlike_prefilled(100) == [0, 0]
    assert case.unlike_last_decoded(2, shared=True) == [0, 0]


def test_nothing_is_compiled_for_another_length(monkeypatch):
    """Shapes are arguments: once attention has run, other packed rows and pages run the same kernels."""

    def run(*groups):
        case = on_gpu((16, 8, 128), groups=groups)
        case.query.requires_grad_()
        prefix_attention(case.query, case.key, case.value, case.layout)[0].backward(case.grad)
        case.query.requires_grad_(False)
        assert case.unlike_prefilled(100) == [0, 0]
        assert case.unlike_last_decoded(2, shared=True) == [0, 0]

    run(*GROUPS)
    run(PromptGroup(640, (640,) * 16))
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda *, fn, **_: compiled.append(fn.name) or False
    )
    for size in (31, 64, 513, 900):
        run(PromptGroup(size, (size + 3, 700)), PromptGroup(128, (256,) * 7))
    assert not compiled


def test_a_million_packed_rows_have_the_bits_of_their_decoded_tokens():
    """Rows times heads; every position of long sequences, over splits that merge."""
    case = on_gpu((16, 8, 128), groups=(PromptGroup(900, (1100,) * 8), PromptGroup(40, (700,) * 8)))
    assert case.unlike_unshared() == [0, 0]
    assert case.unlike_last_decoded(600, shared=True) == [0, 0]


def test_decoding_replays_in_a_graph_after_its_tables_changed():
    case = on_gpu((16, 8, 128))
    cache, pages, groups = case.paged.cache, case.paged.pages, case.paged.groups
    lengths, own = case.lengths, case.own
    layout = DecodeLayout.of(pages, [0] * len(lengths), groups, "cuda")
    query = torch.zeros(len(lengths), 16, 128, dtype=torch.bfloat16, device="cuda")
    unshared = layout._replace(shared=SharedPages(layout.shared.members, *(x * 0 for x in layout.shared[1:])))
    decode_attention(query, cache, unshared)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decode_attention(query, cache, layout)
    for back in range(3):
        ends = torch.tensor(lengths, device="cuda") - back
        row = torch.stack([rows[end - 1] for rows, end in zip(own, ends.tolist(), strict=True)])
        layout.position.copy_(ends - 1)
        query.copy_(case.query[row])
        if not all(ends[i] > 64 * count for rows, count in groups for i in rows):
            break
        graph.replay()
        assert unlike(found, [x[row] for x in case.expected]) == [0, 0]


def relative(a, b):
    return float((a.detach().double() - b.detach()).norm() / b.detach().norm())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tiles", [None, plain_tiles])
def test_gradients_are_as_near_to_float64_as_those_of_dense_attention(shape, options, tiles, monkeypatch):
    if tiles is not None:
        monkeypatch.setattr(attention, "attention_tiles", lambda width, *_: tiles(width))
    layout = AttentionLayout(GROUPS, "cuda")
    *x, grad = draw(layout.num_tokens, *shape, torch.bfloat16, "cuda")

    def gradients(attend, x):
        leaves = [t.detach().requires_grad_() for t in x]
        output = attend(*leaves, layout, **options)[0]
        return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(output.dtype))]

    truth = gradients(dense, [t.double() for t in x])
    plain = gradients(dense, x)
    first, second = gradients(prefix_attention, x), gradients(prefix_attention, x)
    assert unlike(first, second) == [0, 0, 0, 0]
    for name, a, b, c in zip(("output", "query", "key", "value"), first, plain, truth, strict=True):
        assert relative(a, c) <= 1.5 * relative(b, c), name


def test_float32_is_near_float64():
    layout = AttentionLayout(GROUPS, "cuda")
    *x, _ = draw(layout.num_tokens, 4, 2, 64, torch.float32, "cuda")
    truth = dense(*(t.double() for t in x), layout)
    found = prefix_attention(*x, layout)
    assert all(relative(a, b) < 3e-6 for a, b in zip(found, truth, strict=True))


def test_rows_beyond_two_gigabytes_are_reached():
    """64-bit offsets of rows: 140,000 tokens of 64 heads of 256 numbers."""
    lengths = (130000, 10000)
    layout = AttentionLayout.of_sequences(lengths, "cuda")
    x = draw(sum(lengths), 64, 1, 256, torch.bfloat16, "cuda")[:3]
    window = 100
    output = attention_launch.attention_forward_rows(
        *x, layout.query_tiles(2, 1, window), attention_launch.Form(1 / 16, window, None), hopper_tiles(256),
        every_row=True,
    )[0]  # fmt: skip
    last = [t[130000:] for t in x]
    alone = prefix_attention(*last, AttentionLayout.of_sequences((10000,), "cuda"), window=window, scale=1 / 16)[0]
    assert torch.equal(output[130000:], alone)
