"""Causal attention over packed rows whose sequences may share a prefix; batch-invariant per row (row-invariant).

Equal to running every sequence alone, prompt and completion together. A prompt is stored once in the row, followed by
its completions:

    row:       [prompt A][completion A1][completion A2] [prompt B][completion B1] ...
    position:   0 .. P-1   P .. P+n1-1    P .. P+n2-1     0 .. Q-1   Q ..

A completion may itself be a group: a prefix tree in depth-first order. All tokens that attend to a node lie between it
and the end of its subtree.

A token's output and log-sum-exp are bitwise identical for a shared and a repeated prompt, in any packing and order,
and in ``paged_attention`` with any chunking. Blocks and splits of keys are aligned to positions in the sequence;
``kernels/attention_forward.py`` explains why that suffices. The backward pass is deterministic (no atomics), and sums
the gradients of a prompt's keys over its completions in float32.

Not supported: non-causal attention, biases, and more than 64 query heads per key head. Padding at the end of the row
must hold finite numbers; its output is zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logitless.errors import InputError, UnavailableError
from logitless.models.kernels.attention_tiles import PROCESSORS, AttentionTiles, attention_tiles
from logitless.models.kernels.rows import as_rows, divided_up
from logitless.models.kernels.window import Chunks, Window, end_of_queries, first_seen
from logitless.models.one_node import apply, refuse_twice
from logitless.transfer import sent
from logitless.types import PromptGroup

MAX_WIDTH = 256
MAX_GROUP = 64


class Piece(NamedTuple):
    """A node of the prefix tree: consecutive tokens of the packed row that belong to the same sequences."""

    sees: tuple[tuple[int, int], ...]  # (row, length) of each ancestor, the root first: the prefix of this piece
    row: int
    length: int
    last_seen_by: int  # end of the last row that attends to this piece (exclusive)
    is_prompt: bool  # whether it has children
    group: int  # index of its prompt group

    @property
    def seen_rows(self) -> Int[Tensor, "p"]:
        """[p] rows of the prefix, by position."""
        return torch.cat([torch.arange(0), *(torch.arange(row, row + length) for row, length in self.sees)])


class Segments(NamedTuple):
    """The pieces of a packed row and their prefixes, as columns of shape [S], int64."""

    prefix_row: Tensor
    prefix_length: Tensor
    row: Tensor
    length: Tensor
    last_seen_by: Tensor
    """End (exclusive) of the rows that attend to the piece."""
    is_prompt: Tensor
    """Whether other pieces attend to it."""
    rank: Tensor
    """Rank of its group by size, the largest first."""
    trunk_length: Tensor
    """Length of the trunk: the part of the prefix that is contiguous from ``prefix_row`` on."""
    branch: Tensor
    """Offset in ``AttentionLayout.branch_rows`` of the rows of the rest of the prefix."""


@dataclass(frozen=True)
class AttentionLayout:
    """The prompts and completions of a packed row, and the kernels' work tables for it.

    Tables are built on first use, and shared by all layers and passes.

    Args:
        groups: in the order of the row.
        device: of the model.
        num_tokens: T; tokens after the last group are padding. Default: no padding.

    Raises:
        InputError: a group has no tokens or a negative length, or the groups have more than ``num_tokens`` tokens.

    Example:
        >>> layout = AttentionLayout([PromptGroup(3, (2, 1)), PromptGroup(0, (2, 2))])
        >>> layout.num_tokens, layout.positions.tolist()
        (10, [0, 1, 2, 3, 4, 3, 0, 1, 0, 1])
    """

    groups: Sequence[PromptGroup]
    device: torch.device | str = "cpu"
    num_tokens: int = -1
    tables: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        groups = self.groups
        sizes = [group.size for group in groups]
        used = sum(sizes)
        if not groups or min(sizes) < 1 or any(group.least < 0 for group in groups):
            raise InputError(
                needed="groups with at least one token and no negative length",
                given=f"{groups[:4]}",
                remedy="Drop sequences without tokens before packing.",
            )
        if self.num_tokens == -1:
            object.__setattr__(self, "num_tokens", used)
        if used > self.num_tokens:
            raise InputError(
                needed=f"groups of at most {self.num_tokens} tokens",
                given=f"{used} tokens",
                remedy="Leave num_tokens out, or raise it.",
            )

    @classmethod
    def of_sequences(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu", num_tokens: int = -1
    ) -> "AttentionLayout":
        """The layout of sequences without shared prefixes.

        Example:
            >>> AttentionLayout.of_sequences((2, 3)).positions.tolist()
            [0, 1, 0, 1, 2]
        """
        return cls([PromptGroup(length) for length in lengths], device, num_tokens)

    @cached_property
    def every_row(self) -> bool:
        """Whether the row has no padding."""
        return self.num_tokens == sum(group.size for group in self.groups)

    @cached_property
    def longest(self) -> int:
        """Length of the longest sequence, its prefix included."""
        return max(group.longest for group in self.groups)

    @cached_property
    def pieces(self) -> list[Piece]:
        """The nodes of the prefix trees in the order of the row; a node with a single child is merged with it."""
        found: list[Piece] = []

        def lay(group: PromptGroup, sees: tuple[tuple[int, int], ...], row: int, length: int, number: int) -> int:
            """Appends the pieces of a group that starts at ``row`` with a prompt of ``length``; returns its end."""
            going_on = [each for each in group.branches if each.size]
            if len(going_on) == 1:
                return lay(going_on[0], sees, row, length + going_on[0].prompt, number)
            end = row + length + sum(each.size for each in going_on)
            if length:
                found.append(Piece(sees, row, length, end, bool(going_on), number))
                sees = (*sees, (row, length))
            at = row + length
            for each in going_on:
                at = lay(each, sees, at, each.prompt, number)
            return end

        at = 0
        for number, group in enumerate(self.groups):
            at = lay(group, (), at, group.prompt, number)
        return found

    @cached_property
    def segments(self) -> Segments:
        """The pieces as columns."""
        columns: list[tuple[int, ...]] = []
        branch = 0
        for sees, row, length, last_seen_by, is_prompt, group in self.pieces:
            prefix = sum(count for _, count in sees)
            first = trunk = sees[0][0] if sees else 0
            for begin, count in sees:
                if begin != trunk:
                    break
                trunk += count
            columns.append((first, prefix, row, length, last_seen_by, is_prompt, group, trunk - first, branch))
            branch += prefix - (trunk - first)
        prefix_row, prefix_length, rows, lengths, last, prompts, groups, trunks, branches = torch.tensor(columns).T
        sizes = torch.tensor([group.size for group in self.groups])
        rank = torch.argsort(torch.argsort(-sizes, stable=True))[groups]
        return Segments(prefix_row, prefix_length, rows, lengths, last, prompts.bool(), rank, trunks, branches)

    @cached_property
    def branch_rows(self) -> Int[Tensor, "b"] | None:
        """[b] int32: for each piece, the rows of its prefix after the trunk; None if every prefix is all trunk."""
        trunks = self.segments.trunk_length
        if torch.equal(trunks, self.segments.prefix_length):
            return None
        seen = [piece.seen_rows[trunk:] for piece, trunk in zip(self.pieces, trunks.tolist(), strict=True)]
        return sent(torch.cat(seen).int(), self.device)

    @cached_property
    def positions(self) -> Int[Tensor, "T"]:
        """[T] int32: position of each token in its sequence; 0 in padding."""
        prefix_length, length = self.segments.prefix_length, self.segments.length
        starts = length.cumsum(0) - length
        within = torch.arange(int(length.sum())) - torch.repeat_interleave(starts - prefix_length, length)
        padded = torch.zeros(self.num_tokens, dtype=torch.int32)
        padded[: len(within)] = within.int()
        return sent(padded, self.device)

    def unshared(self) -> "tuple[AttentionLayout, Int[Tensor, 'U']]":
        """The layout of the same sequences with every prefix repeated, and the row in this layout of each token.

        Example:
            >>> AttentionLayout([PromptGroup(2, (1, 1))]).unshared()[1].tolist()
            [0, 1, 2, 0, 1, 3]
        """
        rows, lengths = [], []
        for piece in self.pieces:
            if not piece.is_prompt:
                rows.append(torch.cat([piece.seen_rows, torch.arange(piece.row, piece.row + piece.length)]))
                lengths.append(len(rows[-1]))
        return AttentionLayout.of_sequences(lengths, self.device), torch.cat(rows).to(self.device)

    def query_tiles(self, tokens: int, num_key_heads: int, window: Window | None) -> Int[Tensor, "n 8"]:
        """The tiles of queries, at most ``tokens`` tokens of one piece each.

        Returns:
            [n, 8] int32: the prefix's first row and length; the piece's first row and length; the tile's first token
            in the piece; the trunk's length; the offset in ``branch_rows``; 0.
        """

        def make() -> Tensor:
            prefix_row, prefix_length, row, length, _, _, rank, trunk, branch = self.segments
            segment, first, order = cut_queries(prefix_length, length, rank, tokens, num_key_heads, window)
            of_segment = (x[segment] for x in (prefix_row, prefix_length, row, length))
            columns = (*of_segment, first, trunk[segment], branch[segment])
            return table(columns, order, self.device)

        return self.kept(("query", tokens, num_key_heads, window), make)

    def divide(self, lengths: Sequence[int]) -> None:
        """Compute gradients of these consecutive rows as if each part was a row of its own, bit for bit.

        Args:
            lengths: of the parts, of whole groups each.
        """
        self.kept("parts", lambda: torch.tensor(lengths).cumsum(0))

    def key_tiles(self, keys: int, num_key_heads: int, window: Window | None) -> tuple[Tensor, Tensor, int]:
        """The tiles of keys, at most ``keys`` keys of one piece each, and the queries that attend to them.

        Returns:
            tiles: [tiles, 8] int32: start and end row of keys, start and end row of queries, number of the part or -1.
            split: [split, 8] int32, the keys whose queries are split into parts: start and end row of keys, first part,
                number of parts.
            Number of parts in total.
        """

        def make() -> tuple[Tensor, Tensor, int]:
            _, prefix_length, row, length, last_seen_by, is_prompt, rank, *_ = self.segments
            segment, offset = cut(length, keys)
            first = row[segment] + offset
            last = torch.minimum(first + keys, (row + length)[segment])
            end = last_seen_by[segment]
            if window is not None:
                to_position = (prefix_length - row)[segment]
                until = end_of_queries(last - 1 + to_position, window) - to_position
                beyond = is_prompt[segment]
                if isinstance(window, Chunks):  # no completion attends to a chunk that ends within its prompt
                    beyond = beyond & (until > (row + length)[segment])
                end = torch.where(beyond, end, torch.minimum(end, until))
            work = end - first
            # Keys of a long prompt have many queries. To balance the load, they are split into equal parts.
            ends = self.tables.get("parts", torch.tensor([self.num_tokens]))
            part_of_row = torch.bucketize(first, ends, right=True)
            sums = torch.zeros(len(ends), dtype=work.dtype).index_add_(0, part_of_row, work)
            share = divided_up(sums * num_key_heads, 4 * PROCESSORS).clamp(min=512)[part_of_row]
            size = divided_up(divided_up(work, divided_up(work, share)), 16) * 16  # rows of queries a part
            parts = divided_up(work, size)
            tile, part = cut(work, size)
            begin = first[tile] + part
            stop = torch.minimum(begin + size[tile], end[tile])
            is_cut = parts > 1
            before = torch.where(is_cut, parts, 0).cumsum(0) - torch.where(is_cut, parts, 0)
            number = torch.where(is_cut[tile], before[tile] + part // size[tile], -1)
            order = in_order(rank[segment[tile]], stop - begin, num_key_heads)
            tiles = table((first[tile], last[tile], begin, stop, number), order, self.device)
            several = torch.nonzero(is_cut)[:, 0]
            return tiles, table((first, last, before, parts), several, self.device), int(parts[is_cut].sum())

        return self.kept(("key", keys, num_key_heads, window), make)

    def kept(self, name: Any, make: Callable[[], Any]) -> Any:
        """The cached result of ``make`` under ``name``."""
        if name not in self.tables:
            self.tables[name] = make()
        return self.tables[name]


def cut(lengths: Tensor, size: "int | Tensor") -> tuple[Tensor, Tensor]:
    """Splits each length into chunks of at most ``size``: index of its length, and offset in it, of each chunk."""
    counts = divided_up(lengths, size)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    number = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    return owner, number * (size[owner] if isinstance(size, Tensor) else size)


def cut_queries(
    prefix_length: Tensor, length: Tensor, rank: Tensor, tokens: int, num_key_heads: int, window: Window | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles of at most ``tokens`` queries of one piece: its index, the offset in it, and the order of ``in_order``.

    Args:
        prefix_length, length, rank: of each piece; its group's rank.
        tokens: of a tile.
        num_key_heads, window: of the layer.
    """
    piece, first = cut(length, tokens)
    end = prefix_length[piece] + torch.minimum(first + tokens, length[piece])
    lowest = first_seen(prefix_length[piece] + first, window)
    return piece, first, in_order(rank[piece], end - lowest, num_key_heads)


def in_order(rank: Tensor, work: Tensor, num_key_heads: int) -> Tensor:
    """The order in which tiles are launched: batches of groups, and the most work first within a batch."""
    # A batch has just enough groups to keep all processors busy, so that its keys stay in the GPU's cache. On an H200
    # this takes 10 to 20% off the time of long rows.
    programs = torch.bincount(rank) * num_key_heads
    together = (programs.cumsum(0) - programs) // (4 * PROCESSORS)
    by_work = torch.argsort(-work, stable=True)
    return by_work[torch.argsort(together[rank[by_work]], stable=True)]


def table(columns: tuple[Tensor, ...], order: Tensor, device: torch.device | str) -> Tensor:
    """The columns as [n, 8] int32 on the device, rows in this order, padded with zeros."""
    rows = torch.zeros(len(order), 8, dtype=torch.int32)
    rows[:, : len(columns)] = torch.stack(columns, 1)[order]
    return sent(rows, device)


def prefix_attention(
    query: Float[Tensor, "T H E"],
    key: Float[Tensor, "T K E"],
    value: Float[Tensor, "T K E"],
    layout: AttentionLayout,
    *,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "T H E"], Float[Tensor, "T H"]]:
    """Causal attention over a packed row whose completions may share a prompt.

    ``out[t] = sum_s softmax_s(z[t, s]) v[s]``, ``z[t, s] = scale * q[t] @ k[s]`` (with a softcap
    ``softcap * tanh(z / softcap)``), over tokens s of t's own sequence, its prompt included, with
    ``position[t] - window < position[s] <= position[t]``, or with ``Chunks`` of t's own chunk of positions.

    Gradient: through both outputs, to query, key and value; deterministic.

    Args:
        query, key, value: H query heads, K key heads with K dividing H, E up to 256; bfloat16, float16 or float32, on
            CUDA (on the CPU only under Triton's interpreter). Slices of a fused QKV projection are not copied.
        layout: of the row.
        scale: default ``E ** -0.5``.
        window: number of positions that a token attends to, its own included, or ``Chunks``; None for all.
        softcap: bound of the absolute scores (Gemma 2: 50); None for none.

    Returns:
        The output, in the query's dtype, and the float32 log-sum-exp of z in nats. Zeros in padding.

    Raises:
        InputError: the shapes, dtypes and layout do not match.

    Memory: backward 2 H T float32, and K * 2 * E float32 per part for every key whose queries are split into parts.

    Example:
        >>> from logitless.models.attention import AttentionLayout, prefix_attention
        >>> from logitless.types import PromptGroup
        >>> layout = AttentionLayout([PromptGroup(prompt=5, completions=(3, 4))])
        >>> query = torch.randn(12, 4, 16)
        >>> prefix_attention(query[:3], query[:3], query[:3], layout)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        logitless.errors.InputError: needed query, key and value of 12 tokens, those of the layout; given 3 queries ...
    """
    check_heads(query, key, value)
    if not len(query) == len(key) == layout.num_tokens:
        raise InputError(
            needed=f"query, key and value of {layout.num_tokens} tokens, those of the layout",
            given=f"{len(query)} queries and {len(key)} keys",
            remedy="Make the layout from the groups of this row.",
        )
    scale = query.shape[2] ** -0.5 if scale is None else scale
    output, log_sum_exp = apply(PrefixAttention, query, key, value, layout, scale, window, softcap)
    return output, log_sum_exp


def check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises InputError for shapes and dtypes that the kernels do not support."""
    heads, width = query.shape[1:]
    if key.shape[-2:] != value.shape[-2:] or key.shape[-1] != width or heads % key.shape[-2]:
        raise InputError(
            needed="one width, and a number of query heads that the number of key heads divides",
            given=f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}",
            remedy="Pass heads as [T, heads, width].",
        )
    if width > MAX_WIDTH or heads // key.shape[-2] > MAX_GROUP:
        raise InputError(
            needed=f"heads up to {MAX_WIDTH} wide and up to {MAX_GROUP} query heads a key head",
            given=f"width {width}, {heads // key.shape[-2]} query heads a key head",
            remedy="Use another attention for this model.",
        )
    if not query.dtype == key.dtype == value.dtype or query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise InputError(
            needed="query, key and value in one of bfloat16, float16 and float32",
            given=f"{query.dtype}, {key.dtype}, {value.dtype}",
            remedy="Cast them to one dtype.",
        )


def launches() -> Any:
    """The module that launches the kernels, imported on first use.

    Raises:
        UnavailableError: Triton is not installed.
    """
    try:
        from logitless.models.kernels import attention_launch
    except ImportError as error:
        raise UnavailableError(
            needed="Triton, for row-invariant attention",
            given=str(error),
            remedy="Install logitless[triton], or choose another attention.",
        ) from error
    return attention_launch


def forward_tiles(
    layout: Any, heads: Any, dtype: torch.dtype, device: torch.device, window: Window | None
) -> tuple[AttentionTiles, Int[Tensor, "n 8"]]:
    """The tile sizes of the kernels, and the forward kernel's table of query tiles.

    Args:
        layout: an ``AttentionLayout`` or a ``PrefillLayout``, which caches the table on the device.
        heads: ``attention_launch.Heads``.
        dtype, device: of the keys.
        window: of the layer.
    """
    choice = attention_tiles(heads.padded, dtype, device)
    return choice, layout.query_tiles(choice.forward.rows // heads.group, heads.num_key, window)


def prepare_tables(
    layout: Any, form: Any, dtype: torch.dtype, *, gradients: bool = False, device: torch.device | None = None
) -> None:
    """Copies the layout's tables to the device, before a CUDA graph is captured.

    Args:
        layout: an ``AttentionLayout`` or a ``PrefillLayout``, which caches its tables.
        form: of a layer, an ``AttentionForm``.
        dtype: of its keys.
        gradients: also the tables of the backward pass; only for an ``AttentionLayout``.
        device: of the model, if the layout is on the CPU; None: the layout's.
    """
    # Tables are otherwise copied on first use, and a graph capture does not allow copies from the host.
    device = layout.positions.device if device is None else device
    heads = launches().Heads.of_counts(form.heads.query, form.heads.key, form.heads.width)
    choice, _ = forward_tiles(layout, heads, dtype, device, form.window)
    _ = layout.slots if hasattr(layout, "slots") else layout.branch_rows
    if gradients:
        layout.query_tiles(choice.query_gradient.rows // heads.group, heads.num_key, form.window)
        layout.key_tiles(choice.key_gradient.keys, heads.num_key, form.window)


class PrefixAttention(torch.autograd.Function):
    """``prefix_attention`` without its checks."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, scale: float,
        window: Window | None, softcap: float | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        launch = launches()
        form = launch.Form(scale, window, softcap)
        query, (key, value) = as_rows(query), launch.key_value_rows(key, value)
        choice, tiles = forward_tiles(layout, launch.Heads.of(query, key), query.dtype, query.device, window)
        output, log_sum_exp = launch.attention_forward_rows(
            query, key, value, tiles, form, choice, every_row=layout.every_row, branch_rows=layout.branch_rows
        )
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        ctx.layout, ctx.form, ctx.choice = layout, form, choice
        ctx.set_materialize_grads(False)
        return output, log_sum_exp

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_log_sum_exp: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_twice()
        query, key, value, output, log_sum_exp = ctx.saved_tensors
        layout, form, choice = ctx.layout, ctx.form, ctx.choice
        launch = launches()
        heads = launch.Heads.of(query, key)
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output.contiguous()
        grad_log_sum_exp = None if grad_log_sum_exp is None else grad_log_sum_exp.contiguous()
        tiles = layout.query_tiles(choice.query_gradient.rows // heads.group, heads.num_key, form.window)
        grad_query, terms = launch.query_gradient(
            query, key, value, output, log_sum_exp, grad_output, grad_log_sum_exp, tiles, form, choice,
            every_row=layout.every_row, branch_rows=layout.branch_rows,
        )  # fmt: skip
        position = None if form.window is None else layout.positions
        tables = launch.KeyTables(*layout.key_tiles(choice.key_gradient.keys, heads.num_key, form.window), position)
        grad_key, grad_value = launch.key_gradient(
            query, key, value, grad_output, terms, tables, form, choice, every_row=layout.every_row
        )
        return grad_query, grad_key, grad_value, None, None, None, None
