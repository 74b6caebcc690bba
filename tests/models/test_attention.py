"""Attention over packed rows: bitwise identical in every packing, and gradients as good as a dense one's.

On a CPU kernels run under Triton's interpreter, with splits of 128 positions so that small rows have several.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.errors import InputError, UnavailableError
from logitless.models import attention
from logitless.models.attention import AttentionLayout, prefix_attention
from logitless.models.kernels import attention_tiles
from logitless.models.kernels.attention_tiles import INTERPRETED, KeyTile, QueryTile
from logitless.models.kernels.window import Chunks, first_seen
from logitless.types import PromptGroup
from tests.head.interpreter import interpreted
from tests.models.kernels.attention_cases import dense, draw, unlike

pytestmark = pytest.mark.skipif(not interpreted(), reason="the interpreter is off: test_attention_gpu.py")

GROUPS = (PromptGroup(140, (30, 1)), PromptGroup(0, (65, 20)), PromptGroup(64, (10, 40)), PromptGroup(70, (70,)))
"""A prompt that ends in a block, plain sequences, a prompt that ends with a block, a prompt of one completion."""

TREE = (
    PromptGroup(70, (PromptGroup(75, (20, PromptGroup(3, (8, 70)), 1)), 10, PromptGroup(58, (5, 30)))),
    PromptGroup(5, (PromptGroup(0, (9, 2)), PromptGroup(64, (PromptGroup(64, (3, 4)), 0)))),
)
"""Branches of branches: behind a trunk that they continue in memory and behind one that they do not, shorter than a
block and longer, ending with a block and in it."""

PAIR = (PromptGroup(70, (30, 1, 40)), PromptGroup(0, (45, 5)))
OPTIONS = [{}, {"window": 70}, {"softcap": 3.0}]
CHUNKS = {"window": Chunks(128)}


@pytest.fixture(autouse=True)
def small_splits(monkeypatch):
    monkeypatch.setattr(attention_tiles, "SPLIT", 128)


@pytest.fixture
def tiles(monkeypatch):
    """Sets some of the tiles."""

    def choose(**changed):
        monkeypatch.setattr(attention, "attention_tiles", lambda *_: replace(INTERPRETED, **changed))

    return choose


def shared_and_unshared(layout, x, **options):
    """Elements of the output and of the log-sum-exp that sharing changes."""
    copies, rows = layout.unshared()
    together = prefix_attention(*x, layout, **options)
    apart = prefix_attention(*(t[rows] for t in x), copies, **options)
    return unlike([each[rows] for each in together], apart)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [*zip([torch.bfloat16, torch.float16, torch.float32], OPTIONS, strict=True), (torch.bfloat16, CHUNKS)],
    ids=str,
)
def test_a_shared_prompt_gives_the_bits_of_its_copies(dtype, options):
    layout = AttentionLayout(GROUPS)
    assert shared_and_unshared(layout, draw(layout.num_tokens, 4, 2, 16, dtype)[:3], **options) == [0, 0]


@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.bfloat16, {}), (torch.float32, {"window": 70}), (torch.bfloat16, CHUNKS)], ids=str
)
def test_a_tree_gives_the_bits_of_its_sequences_alone(dtype, options):
    layout = AttentionLayout(TREE)
    assert layout.branch_rows is not None
    assert shared_and_unshared(layout, draw(layout.num_tokens, 4, 2, 16, dtype)[:3], **options) == [0, 0]


@given(data=st.data())
@settings(max_examples=5, deadline=None, derandomize=True)
def test_no_packing_changes_a_bit_of_a_sequence(data):
    """Sequences in any order, split over any two rows, with padding behind them."""
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=2, max_size=4))
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(1, len(lengths) - 1))
    padding = data.draw(st.integers(0, 5))
    x = draw(sum(lengths), 2, 1, 16, torch.bfloat16)[:3]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    expected = prefix_attention(*x, AttentionLayout.of_sequences(lengths))
    for part in (order[:cut], order[cut:]):
        rows = torch.cat([torch.arange(starts[i], starts[i] + lengths[i]) for i in part])
        some = [torch.cat([t[rows], t.new_ones(padding, *t.shape[1:])]) for t in x]
        layout = AttentionLayout.of_sequences([lengths[i] for i in part], num_tokens=len(rows) + padding)
        found = prefix_attention(*some, layout)
        assert unlike([each[: len(rows)] for each in found], [each[rows] for each in expected]) == [0, 0]
        assert not any(each[len(rows) :].any() for each in found)


@pytest.mark.parametrize(
    ("tile", "options"),
    [
        (QueryTile(16, 1, 1), {}),
        (QueryTile(64, 1, 1), {"window": 70}),
        (QueryTile(32, 1, 1, tma=True), {}),
        (QueryTile(32, 1, 1, tma=True), {"softcap": 3.0}),
        (QueryTile(64, 1, 1, tma=True), CHUNKS),
    ],
    ids=str,
)
def test_no_tile_of_the_forward_pass_changes_a_bit(tiles, tile, options):
    layout = AttentionLayout(GROUPS)
    x = draw(layout.num_tokens, 3, 1, 16, torch.bfloat16)[:3]
    expected = prefix_attention(*x, layout, **options)
    tiles(forward=tile)
    assert unlike(prefix_attention(*x, layout, **options), expected) == [0, 0]


@pytest.mark.parametrize("constant", ["BLOCK", "SPLIT"])
def test_another_block_or_split_gives_other_bits(monkeypatch, constant):
    """The laws above can fail: bits do depend on what they say they depend on."""
    layout = AttentionLayout.of_sequences((300,))
    x = draw(300, 2, 1, 16)[:3]
    expected = prefix_attention(*x, layout)
    monkeypatch.setattr(attention_tiles, constant, getattr(attention_tiles, constant) // 2)
    assert min(unlike(prefix_attention(*x, layout), expected)) > 0


def gradients(x, layout, upstream, attend, **options):
    leaves = [t.detach().requires_grad_() for t in x]
    outputs = attend(*leaves, layout, **options)
    return outputs, torch.autograd.grad(
        outputs, leaves, [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=True)]
    )


def test_a_second_derivative_is_refused():
    layout = AttentionLayout([PromptGroup(3, (2,))])
    leaves = [t.float().requires_grad_() for t in draw(5, 2, 1, 16)[:3]]
    output = prefix_attention(*leaves, layout)[0]
    with pytest.raises(UnavailableError, match="differentiated twice"):
        torch.autograd.grad(output.sum(), leaves, create_graph=True)


def error(a, b):
    return float((a.detach().double() - b.detach()).norm() / b.detach().norm())


@pytest.mark.parametrize(
    ("heads", "width", "dtype", "options", "groups"),
    [
        ((4, 2), 16, torch.float32, {}, PAIR),
        ((3, 3), 24, torch.float32, {"window": 50}, TREE[1:]),
        ((7, 1), 16, torch.float32, {"softcap": 2.0}, PAIR),
        ((4, 2), 16, torch.bfloat16, {}, TREE[:1]),
        ((4, 2), 96, torch.float16, {"window": 70, "softcap": 5.0}, PAIR),
        ((4, 2), 16, torch.float32, {"window": Chunks(64)}, TREE[:1]),
        ((4, 2), 16, torch.float32, {"window": Chunks(40)}, PAIR),
    ],
    ids=str,
)
def test_gradients_are_as_near_to_float64_as_those_of_dense_attention(heads, width, dtype, options, groups):
    layout = AttentionLayout(groups)
    *x, grad = draw(layout.num_tokens, *heads, width, dtype)
    upstream = (grad, torch.randn(layout.num_tokens, heads[0]))
    truth = gradients([t.double() for t in x], layout, upstream, dense, **options)
    plain = gradients(x, layout, upstream, dense, **options)
    ours = gradients(x, layout, upstream, prefix_attention, **options)
    for name, a, b, c in zip(
        ("output", "log-sum-exp", "query", "key", "value"), (*ours[0], *ours[1]), (*plain[0], *plain[1]),
        (*truth[0], *truth[1]), strict=True,
    ):  # fmt: skip
        assert error(a, c) <= 3 * error(b, c) + 1e-6, name


@pytest.mark.parametrize(
    "tile", [KeyTile(32, 16, 1, 1), KeyTile(64, 64, 1, 1), KeyTile(64, 32, 1, 1, True, True)], ids=str
)
def test_no_tile_changes_a_gradient_by_more_than_rounding(tiles, tile):
    layout = AttentionLayout((PromptGroup(70, (30, 40)),), num_tokens=150)
    *x, grad = draw(150, 4, 2, 16)
    upstream = (grad, torch.zeros(150, 4))
    expected = gradients(x, layout, upstream, prefix_attention)[1]
    tiles(key_gradient=tile, query_gradient=QueryTile(16, 1, 1, tma=True))
    for a, b in zip(gradients(x, layout, upstream, prefix_attention)[1], expected, strict=True):
        assert error(a, b.double()) < 1e-6
        assert not a[140:].any()


def test_keys_with_many_queries_are_cut_and_summed():
    layout = AttentionLayout((PromptGroup(20, (700, 500)),))
    tiles, cut, parts = layout.key_tiles(64, 1, None)
    of_prompt = tiles[tiles[:, 0] == 0]
    assert sorted(of_prompt[:, 2:5].tolist()) == [[0, 416, 0], [416, 832, 1], [832, 1220, 2]]
    assert cut[0].tolist()[:4] == [0, 20, 0, 3]
    assert parts == int(cut[:, 3].sum()) == len(tiles[tiles[:, 4] >= 0])
    *x, grad = draw(layout.num_tokens, 1, 1, 16)
    upstream = (grad, torch.zeros(layout.num_tokens, 1))
    truth = gradients([t.double() for t in x], layout, upstream, dense)[1]
    for a, b in zip(gradients(x, layout, upstream, prefix_attention)[1], truth, strict=True):
        assert error(a, b) < 1e-6


@pytest.mark.parametrize("groups", [GROUPS, TREE], ids=["groups", "tree"])
def test_tiles_cover_every_query_and_every_pair_once(groups):
    layout = AttentionLayout(groups)
    for tokens in (9, 16):
        seen = torch.zeros(layout.num_tokens, dtype=torch.int64)
        for _, _, row, length, first, *_ in layout.query_tiles(tokens, 2, None).tolist():
            seen[row + first : row + min(first + tokens, length)] += 1
        assert (seen == 1).all()
    for keys, window in ((64, None), (32, 20), (64, Chunks(48))):
        pairs = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.int64)
        for first, last, begin, stop, *_ in layout.key_tiles(keys, 2, window)[0].tolist():
            pairs[begin:stop, first:last] += 1
        assert pairs.max() == 1
        for piece in layout.pieces:
            row, length = piece.row, piece.length
            position = torch.arange(len(piece.seen_rows) + length)
            rows = torch.cat([piece.seen_rows, torch.arange(row, row + length)])
            own = position[len(piece.seen_rows) :]
            wanted = (position <= own[:, None]) & (position >= first_seen(own, window)[:, None])
            assert (pairs[row : row + length, rows][wanted] == 1).all()


def test_long_sequences_follow_each_other_and_short_ones_are_mixed_by_their_work():
    """A long one fills the GPU alone, and its keys fit the GPU's cache."""
    rows = AttentionLayout.of_sequences((700, 900)).query_tiles(1, 1, None)[:, 2].tolist()
    assert rows == [700] * 900 + [0] * 700
    tiles = AttentionLayout.of_sequences((3, 4, 2)).query_tiles(1, 1, None)
    assert tiles[:, 4].tolist() == [3, 2, 2, 1, 1, 1, 0, 0, 0]


def test_the_backward_pass_repeats_its_bits():
    layout = AttentionLayout((PromptGroup(70, (30, 40)),))
    *x, grad = draw(layout.num_tokens, 2, 1, 16, torch.bfloat16)
    upstream = (grad, torch.zeros(layout.num_tokens, 2))
    first, second = (gradients(x, layout, upstream, prefix_attention)[1] for _ in range(2))
    assert unlike(first, second) == [0, 0, 0]


def test_views_of_one_fused_projection_are_read_as_they_lie():
    layout = AttentionLayout((PromptGroup(20, (30, 40)),))
    fused = torch.randn(layout.num_tokens, 4, 16)
    x = (fused[:, :2], fused[:, 2:3], fused[:, 3:])
    expected = prefix_attention(*(t.contiguous() for t in x), layout)
    assert unlike(prefix_attention(*x, layout), expected) == [0, 0]


def test_another_sequences_nan_stays_there():
    layout = AttentionLayout.of_sequences((70, 30, 20))
    x = [t.clone() for t in draw(120, 2, 1, 16)[:3]]
    expected = prefix_attention(*x, layout)
    for t in x:
        t[70:100] = float("nan")
    found, there = prefix_attention(*x, layout), torch.tensor([*range(70), *range(100, 120)])
    assert unlike([each[there] for each in found], [each[there] for each in expected]) == [0, 0]


@pytest.mark.parametrize(
    ("shapes", "dtype", "needed"),
    [
        (((9, 2, 16), (9, 1, 16)), torch.float32, "10 tokens"),
        (((10, 3, 16), (10, 2, 16)), torch.float32, "divides"),
        (((10, 2, 512), (10, 1, 512)), torch.float32, "up to 256"),
        (((10, 2, 16), (10, 1, 16)), torch.float64, "bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(shapes, dtype, needed):
    query, key = (torch.zeros(s, dtype=dtype) for s in shapes)
    layout = AttentionLayout.of_sequences((10,))
    with pytest.raises(InputError, match=needed):
        prefix_attention(query, key, key, layout)


@pytest.mark.parametrize("groups", [[], [PromptGroup(0)], [PromptGroup(3, (-1,))]])
def test_a_layout_of_nothing_is_refused(groups):
    with pytest.raises(InputError, match="at least one token"):
        AttentionLayout(groups)


def test_a_layout_larger_than_its_row_is_refused():
    with pytest.raises(InputError, match="at most 4 tokens"):
        AttentionLayout([PromptGroup(5)], num_tokens=4)
