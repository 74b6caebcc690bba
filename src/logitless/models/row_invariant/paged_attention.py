"""Attention over a paged cache: prefill in chunks, then decoding; bitwise identical to a packed row.

A page holds 64 positions of a sequence, as many as a block of ``prefix_attention``. Sequences with the same prompt
share the pages that it fills; each has its own copy of the page in which the prompt ends. Decoding reads the pages that
a group shares once for all of its rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logitless.errors import InputError
from logitless.models.attention import check_heads, cut_queries, forward_tiles, launches, table
from logitless.models.kernels.attention_tiles import BLOCK, attention_tiles
from logitless.models.kernels.rows import as_rows
from logitless.models.kernels.window import Window
from logitless.models.row_invariant.delta_net import PrefilledStates

PAGE = BLOCK


class PagedCache(NamedTuple):
    """Keys and values of one layer, in pages.

    Args:
        key, value: row ``page * 64 + position % 64`` holds a position of a sequence.

    Example:
        >>> PagedCache.empty(num_pages=3, num_key_heads=2, width=16, dtype=torch.bfloat16, device="cpu").key.shape
        torch.Size([192, 2, 16])
    """

    key: Float[Tensor, "P*64 K E"]
    value: Float[Tensor, "P*64 K E"]

    @classmethod
    def empty(
        cls, num_pages: int, num_key_heads: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> "PagedCache":
        """A cache of this many pages, uninitialised."""
        shape = (num_pages * PAGE, num_key_heads, width)
        return cls(*(torch.empty(shape, dtype=dtype, device=device) for _ in range(2)))

    def write(self, key: Float[Tensor, "n K E"], value: Float[Tensor, "n K E"], slots: Int[Tensor, "n"]) -> None:
        """Write keys and values of tokens to their rows, in place."""
        self.key.index_copy_(0, slots, key)
        self.value.index_copy_(0, slots, value)


class Chunk(NamedTuple):
    """Consecutive tokens of a sequence from position ``start`` on, the sequence's pages, and its slot of states."""

    start: int
    length: int
    pages: tuple[int, ...]
    slot: int = 0


@dataclass(frozen=True)
class PrefillLayout:
    """Chunks of sequences, end to end in a row of queries.

    Args:
        chunks: in order, of different sequences or of one.
        device: of the model.

    Raises:
        InputError: a chunk without tokens, or more positions than its pages hold.

    Example:
        >>> PrefillLayout([Chunk(start=63, length=2, pages=(4, 1))]).slots.tolist()
        [319, 64]
    """

    chunks: Sequence[Chunk]
    device: torch.device | str = "cpu"
    _tables: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            if chunk.length < 1 or chunk.start < 0 or chunk.start + chunk.length > len(chunk.pages) * PAGE:
                raise InputError(
                    needed=f"at least one token, and a page for every {PAGE} positions",
                    given=f"positions {chunk.start} to {chunk.start + chunk.length} in {len(chunk.pages)} pages",
                    remedy="Give the sequence more pages, and drop empty chunks.",
                )

    @cached_property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @cached_property
    def positions(self) -> Int[Tensor, "T"]:
        """[T] int32: position of each token in its sequence."""
        ranges = [torch.arange(chunk.start, chunk.start + chunk.length) for chunk in self.chunks]
        return torch.cat(ranges).int().to(self.device)

    @cached_property
    def page_table(self) -> Int[Tensor, "C P"]:
        """[chunks, pages] int32: the pages of each chunk's sequence."""
        pages = torch.zeros(len(self.chunks), max(len(chunk.pages) for chunk in self.chunks), dtype=torch.int32)
        for i, chunk in enumerate(self.chunks):
            pages[i, : len(chunk.pages)] = torch.tensor(chunk.pages)
        return pages.to(self.device)

    @cached_property
    def slots(self) -> Int[Tensor, "T"]:
        """[T] int64: the cache's row of each token."""
        chunk = torch.repeat_interleave(
            torch.arange(len(self.chunks)), torch.tensor([chunk.length for chunk in self.chunks])
        ).to(self.device)
        return self.page_table[chunk, self.positions // PAGE].long() * PAGE + self.positions % PAGE

    def states(self, taps: int) -> PrefilledStates:
        """The slots that the chunks continue, for gated delta nets with a convolution of ``taps`` taps."""

        def make() -> PrefilledStates:
            return PrefilledStates.of([(each.start, each.length, each.slot) for each in self.chunks], taps, self.device)

        found: PrefilledStates = self._kept(("states", taps), make)
        return found

    def query_tiles(self, tokens: int, num_key_heads: int, window: Window | None) -> Int[Tensor, "n 8"]:
        """As of ``AttentionLayout``: line of the page table, positions before the chunk, row, length, token."""

        def make() -> Tensor:
            start = torch.tensor([chunk.start for chunk in self.chunks])
            length = torch.tensor([chunk.length for chunk in self.chunks])
            rank = torch.arange(len(self.chunks))
            chunk, first, order = cut_queries(start, length, rank, tokens, num_key_heads, window)
            columns = (chunk, start[chunk], (length.cumsum(0) - length)[chunk], length[chunk], first)
            return table(columns, order, self.device)

        found: Tensor = self._kept((tokens, num_key_heads, window), make)
        return found

    def _kept(self, name: Any, make: Callable[[], Any]) -> Any:
        """The cached result of ``make`` under ``name``."""
        if name not in self._tables:
            self._tables[name] = make()
        return self._tables[name]


def prefill_attention(
    query: Float[Tensor, "T H E"],
    cache: PagedCache,
    layout: PrefillLayout,
    *,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "T H E"], Float[Tensor, "T H"]]:
    """Attention of chunks of sequences over their pages, which hold the chunks' own keys already.

    Equals: ``prefix_attention`` of the whole sequences, bit for bit, for any division into chunks.

    Args:
        query: of the chunks' tokens.
        cache: of the layer; positions after a chunk may hold anything.
        layout: of the chunks.
        scale, window, softcap: as of ``prefix_attention``.

    Returns:
        Output and float32 log-sum-exp; no gradient.

    Raises:
        InputError: shapes, dtypes or the layout do not fit each other.
    """
    check_heads(query, cache.key, cache.value)
    if len(query) != layout.num_tokens:
        raise InputError(
            needed=f"{layout.num_tokens} queries, those of the layout",
            given=f"{len(query)}",
            remedy="Make the layout from the chunks of this row.",
        )
    launch = launches()
    query = as_rows(query)
    form = launch.Form(query.shape[2] ** -0.5 if scale is None else scale, window, softcap)
    choice, tiles = forward_tiles(layout, launch.Heads.of(query, cache.key), query.dtype, query.device, window)
    output, log_sum_exp = launch.attention_forward_rows(
        query, cache.key, cache.value, tiles, form, choice, every_row=True, page_table=layout.page_table
    )
    return output, log_sum_exp


class SharedPages(NamedTuple):
    """Which rows share leading pages. All on the GPU, so that a captured graph reads the current values.

    Args:
        members: rows of each group, padded with -1.
        pages: number of leading pages that the rows of each group share.
        row_pages: that number for each row; 0 without a group.
    """

    members: Int[Tensor, "G M"]
    pages: Int[Tensor, "G"]
    row_pages: Int[Tensor, "R"]


class DecodeLayout(NamedTuple):
    """One query a row. All int32 on the device: shapes are capacities, contents may change between two replays.

    Args:
        page_table: each row's pages, from position 0 on; entries after its position may hold anything.
        position: of each row's query, whose key is in the cache already; -1 for a row without a query.
        shared: groups with shared pages; None: each row reads all of its pages itself.
        reach: a bound above every row's position, which saves idle programs; None: the capacity of the pages.

    Example:
        >>> layout = DecodeLayout.of([(0, 1, 2), (0, 1, 3)], positions=(130, 140), groups=[((0, 1), 2)])
        >>> layout.slots.tolist()
        [130, 204]
    """

    page_table: Int[Tensor, "R P"]
    position: Int[Tensor, "R"]
    shared: SharedPages | None = None
    reach: int | None = None

    @classmethod
    def of(
        cls,
        pages: Sequence[Sequence[int]],
        positions: Sequence[int],
        groups: Sequence[tuple[Sequence[int], int]] = (),
        device: torch.device | str = "cpu",
    ) -> "DecodeLayout":
        """From lists on the host; a group is (rows, number of leading pages that they share)."""
        page_table = torch.zeros(len(pages), max(len(row) for row in pages), dtype=torch.int32)
        for i, row in enumerate(pages):
            page_table[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
        shared = None
        if groups:
            members = torch.full((len(groups), max(len(rows) for rows, _ in groups)), -1, dtype=torch.int32)
            row_pages = torch.zeros(len(pages), dtype=torch.int32)
            for i, (rows, count) in enumerate(groups):
                members[i, : len(rows)] = torch.tensor(rows, dtype=torch.int32)
                row_pages[list(rows)] = count
            counts = torch.tensor([count for _, count in groups], dtype=torch.int32)
            shared = SharedPages(*(x.to(device) for x in (members, counts, row_pages)))
        return cls(page_table.to(device), torch.tensor(positions, dtype=torch.int32, device=device), shared)

    @property
    def slots(self) -> Int[Tensor, "R"]:
        """[rows] int64: the cache's row of each query's own key; page 0 for a row without a query."""
        page = self.page_table.gather(1, (self.position.clamp(min=0) // PAGE).long()[:, None])[:, 0]
        return page.long() * PAGE + self.position.clamp(min=0) % PAGE


def decode_attention(
    query: Float[Tensor, "R H E"],
    cache: PagedCache,
    layout: DecodeLayout,
    *,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "R H E"], Float[Tensor, "R H"]]:
    """Attention of one query a row over its pages, whose last position is the query's own.

    Equals: that row of ``prefix_attention``, bit for bit, with or without sharing and whatever the other rows are.
    Launches depend on shapes alone, so that it can be captured in a graph.

    Args:
        query: a row may be without a query (position -1) and then holds anything.
        cache: of the layer.
        layout: of the rows.
        scale, window, softcap: as of ``prefix_attention``.

    Returns:
        Output and float32 log-sum-exp, 0 and -inf in rows without a query; no gradient.

    Raises:
        InputError: shapes or dtypes do not fit each other.
    """
    step = decoding(query, cache, layout, scale=scale, window=window, softcap=softcap)
    for launch in step.launches:
        launch()
    return step.output, step.log_sum_exp


def decoding(
    query: Tensor, cache: PagedCache, layout: DecodeLayout, *, scale: float | None = None, window: Window | None = None,
    softcap: float | None = None,
) -> Any:  # fmt: skip
    """The launches of ``decode_attention``, to be made in order, and the tensors that then hold its results."""
    check_heads(query, cache.key, cache.value)
    if not len(query) == len(layout.position) == len(layout.page_table):
        raise InputError(
            needed=f"{len(layout.position)} queries, one a row of the layout",
            given=f"{len(query)}",
            remedy="Make the layout for these rows.",
        )
    launch = launches()
    query = as_rows(query)
    choice = attention_tiles(launch.Heads.of(query, cache.key).padded, query.dtype, query.device)
    form = launch.Form(query.shape[2] ** -0.5 if scale is None else scale, window, softcap)
    return launch.decoding(
        query, cache.key, cache.value, layout.page_table, layout.position, layout.shared, form, choice,
        reach=layout.reach,
    )  # fmt: skip
