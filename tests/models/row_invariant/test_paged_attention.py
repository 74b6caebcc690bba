"""Attention over pages: by chunk and by token the bits of the packed row, whoever shares what."""

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from logitless.errors import InputError
from logitless.models.kernels import attention_tiles
from logitless.models.kernels.window import Chunks
from logitless.models.row_invariant.paged_attention import (
    PAGE,
    Chunk,
    DecodeLayout,
    PagedCache,
    PrefillLayout,
    decode_attention,
    prefill_attention,
)
from logitless.types import PromptGroup
from tests.head.interpreter import interpreted
from tests.models.kernels.attention_cases import Case

pytestmark = pytest.mark.skipif(not interpreted(), reason="the interpreter is off: test_attention_gpu.py")

GROUPS = (PromptGroup(140, (30, 1, 60)), PromptGroup(0, (65,)), PromptGroup(64, (10, 40)))
"""A prompt that ends in a page, a plain sequence, a prompt that ends with a page."""

OPTIONS = [{}, {"window": 70}, {"softcap": 3.0}, {"window": Chunks(50)}, {"window": Chunks(128)}]


@pytest.fixture(autouse=True)
def small_splits(monkeypatch):
    monkeypatch.setattr(attention_tiles, "SPLIT", 128)


def case(heads=(3, 1), dtype=torch.bfloat16, **options):
    return Case((*heads, 16), GROUPS, dtype, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_prompt_prefilled_in_chunks_of_any_size_has_the_packed_rows_bits(options):
    given = case(**options)
    for size in (50, 1000):
        assert given.unlike_prefilled(size) == [0, 0]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_decoded_token_has_the_packed_rows_bits(options, shared):
    given = case(**options)
    assert given.unlike_decoded(given.lengths, shared, beside=2) == [0, 0]


@drawn(data=st.data())
@settings(max_examples=4)
def test_no_position_and_no_row_beside_it_changes_a_decoded_token(data):
    """Tokens anywhere behind what their group shares."""
    given = case(heads=(2, 1))
    least = [1] * len(given.lengths)
    for rows, count in given.paged.groups:
        for row in rows:
            least[row] = count * PAGE + 1
    ends = [data.draw(st.integers(a, b)) for a, b in zip(least, given.lengths, strict=True)]
    assert given.unlike_decoded(ends, shared=data.draw(st.booleans())) == [0, 0]


def test_a_capacity_of_one_split_gives_the_same_bits():
    """Without splits to merge a row is finished by the program that reads its keys."""
    given = case()
    given.paged.pages = [pages[:2] for pages in given.paged.pages]
    given.paged.groups = [(rows, min(count, 1)) for rows, count in given.paged.groups]
    ends = [min(length, 2 * PAGE) for length in given.lengths]
    for shared in (True, False):
        assert given.unlike_decoded(ends, shared) == [0, 0]


@pytest.mark.parametrize(("constant", "size"), [("BLOCK", 32), ("SPLIT", 64)])
def test_another_block_or_split_while_decoding_gives_other_bits(monkeypatch, constant, size):
    """The laws above can fail."""
    given = case(dtype=torch.float32)
    monkeypatch.setattr(attention_tiles, constant, size)
    if constant == "BLOCK":  # the same rows of the cache as pages of half the size
        halves = [tuple(half for page in pages for half in (2 * page, 2 * page + 1)) for pages in given.paged.pages]
        given.paged.pages, given.paged.groups = halves, [(rows, 2 * count) for rows, count in given.paged.groups]
    assert sum(given.unlike_decoded(given.lengths, shared=True)) > 0


def test_slots_are_where_pages_say():
    layout = PrefillLayout([Chunk(60, 6, (3, 1)), Chunk(0, 2, (2,))])
    assert layout.slots.tolist() == [252, 253, 254, 255, 64, 65, 128, 129]
    assert layout.positions.tolist() == [60, 61, 62, 63, 64, 65, 0, 1]
    cache = PagedCache.empty(4, 1, 16, torch.float32, "cpu")
    key = torch.randn(8, 1, 16)
    cache.write(key, -key, layout.slots)
    assert torch.equal(cache.key[layout.slots], key)
    assert torch.equal(cache.value[layout.slots], -key)


def test_a_chunk_without_pages_for_it_is_refused():
    with pytest.raises(InputError, match="a page for every 64 positions"):
        PrefillLayout([Chunk(60, 6, (3,))])


def test_queries_of_another_number_are_refused():
    cache = PagedCache.empty(1, 1, 16, torch.float32, "cpu")
    query = torch.zeros(3, 1, 16)
    with pytest.raises(InputError, match="2 queries"):
        prefill_attention(query, cache, PrefillLayout([Chunk(0, 2, (0,))]))
    with pytest.raises(InputError, match="1 queries"):
        decode_attention(query, cache, DecodeLayout.of([(0,)], [1]))
