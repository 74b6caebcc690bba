"""Launches of the attention kernels; callers have checked the arguments."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless.models.kernels import attention_backward, attention_decode, attention_forward, attention_tiles
from logitless.models.kernels.attention_tiles import AttentionTiles, KeyTile, QueryTile
from logitless.models.kernels.overlap import overlapping
from logitless.models.kernels.rows import as_rows, divided_up, empty_rows, power_of_two
from logitless.models.kernels.window import Chunks, Window
from logitless.quick_launch import descriptor

_LOG2E = math.log2(math.e)


class Form(NamedTuple):
    """Options of ``prefix_attention``: ``scale``, ``window`` and ``softcap``."""

    scale: float
    window: Window | None
    softcap: float | None

    @property
    def numbers(self) -> tuple[int, float, float]:
        """Window, and the factors ``inner`` and ``gain``, as kernels with query-key products take them."""
        softcap = self.softcap or 0.0
        length = self.window.length if isinstance(self.window, Chunks) else self.window or 0
        return length, self.scale / (softcap or 1.0), (softcap or self.scale) * _LOG2E

    @property
    def constants(self) -> dict[str, int]:
        """Constants of the same kernels."""
        return {"WINDOWED": self.windowed, "SOFTCAP": self.softcap is not None}

    @property
    def windowed(self) -> int:
        """0 without a window, 1 with one, 2 for chunks."""
        return 0 if self.window is None else 1 + isinstance(self.window, Chunks)


class Heads(NamedTuple):
    """Key heads, query heads a key head, width and width padded to a power of two."""

    num_key: int
    group: int
    width: int
    padded: int

    @classmethod
    def of(cls, query: Tensor, key: Tensor) -> "Heads":
        """For query [T, H, E] and key [T, K, E]."""
        return cls.of_counts(query.shape[1], key.shape[1], query.shape[2])

    @classmethod
    def of_counts(cls, num_heads: int, num_key: int, width: int) -> "Heads":
        """For these numbers of query heads and key heads."""
        return cls(num_key, num_heads // num_key, width, max(16, power_of_two(width)))

    @property
    def constants(self) -> dict[str, int]:
        """Constants of most kernels."""
        return {"K": self.num_key, "R": self.group, "E": self.width, "WIDTH": self.padded}


def key_value_rows(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with heads side by side and the same row stride."""
    key, value = as_rows(key), as_rows(value)
    return (key, value) if key.stride(0) == value.stride(0) else (key.contiguous(), value.contiguous())


def attention_forward_rows(
    query: Tensor, key: Tensor, value: Tensor, tiles: Tensor, form: Form, choice: AttentionTiles, *,
    every_row: bool, branch_rows: Tensor | None = None, page_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [T, H, E] and log-sum-exp [T, H]. Unless ``every_row`` is in a tile, the other rows are set to 0."""
    heads, tile = Heads.of(query, key), choice.forward
    rows, num_heads, width = query.shape
    output = empty_rows(rows, num_heads, width, like=query)
    log_sum_exp = torch.empty(rows, num_heads, dtype=torch.float32, device=query.device)
    if not every_row:
        output.zero_()
        log_sum_exp.zero_()
    blocks = _key_blocks(key, value, heads, tile.tma)
    attention_forward.attention_forward[(len(tiles) * heads.num_key,)](
        query, key, value, *blocks, output, log_sum_exp, tiles, branch_rows, page_table,
        0 if page_table is None else page_table.shape[1], query.stride(0), key.stride(0), *form.numbers,
        **form.constants, **heads.constants, BM=tile.rows, BLOCK=attention_tiles.BLOCK, SPLIT=attention_tiles.SPLIT,
        PAGED=page_table is not None, TMA=blocks[0] is not None, PRECISION=choice.precision,
        **_resources(tile),
    )  # fmt: skip
    return output, log_sum_exp


class RowTerms(NamedTuple):
    """[K, T, R] float32 each: log-sum-exp in bits, and d."""

    normaliser: Tensor
    d: Tensor


def query_gradient(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum_exp: Tensor, grad_output: Tensor,
    grad_log_sum_exp: Tensor | None, tiles: Tensor, form: Form, choice: AttentionTiles, *, every_row: bool,
    branch_rows: Tensor | None = None,
) -> tuple[Tensor, RowTerms]:  # fmt: skip
    """Gradient of queries, and the row terms that ``key_gradient`` reads."""
    heads, tile = Heads.of(query, key), choice.query_gradient
    rows = len(query)
    gradient = (torch.empty_like if every_row else torch.zeros_like)(output)
    terms = torch.empty(2, heads.num_key, rows, heads.group, dtype=torch.float32, device=query.device)
    blocks = _key_blocks(key, value, heads, tile.tma)
    attention_backward.query_gradient[(len(tiles) * heads.num_key,)](
        query, key, value, *blocks, output, grad_output, log_sum_exp, grad_log_sum_exp, terms[0], terms[1], gradient,
        tiles, branch_rows, rows, query.stride(0), key.stride(0), *form.numbers, form.scale, **form.constants,
        **heads.constants, BM=tile.rows, BLOCK=attention_tiles.BLOCK, TMA=blocks[0] is not None,
        PRECISION=choice.precision, **_resources(tile),
    )  # fmt: skip
    return gradient, RowTerms(terms[0], terms[1])


class KeyTables(NamedTuple):
    """Tiles of keys [tiles, 8], the divided ones [cut, 8], their number of parts, and positions [T] (with a window)."""

    tiles: Tensor
    cut: Tensor
    num_parts: int
    position: Tensor | None


def key_gradient(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, terms: RowTerms, tables: KeyTables, form: Form,
    choice: AttentionTiles, *, every_row: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of keys and values."""
    heads, tile = Heads.of(query, key), choice.key_gradient
    rows = len(query)
    new = torch.empty if every_row else torch.zeros
    shape = (rows, heads.num_key, heads.width)
    grad_key, grad_value = (new(shape, dtype=key.dtype, device=key.device) for _ in range(2))
    part_shape = (tables.num_parts, heads.num_key, 2, tile.keys, heads.padded)
    parts = torch.empty(part_shape, dtype=torch.float32, device=key.device)
    row_blocks: tuple[Any, Any] = (None, None)
    if tile.tma_rows and tile.rows % heads.group == 0 and _aligned(query, grad_output):
        block = [tile.rows // heads.group, heads.group, heads.padded]
        row_blocks = (descriptor(query, block), descriptor(grad_output, block))
    term_blocks: tuple[Any, Any] = (None, None)
    if tile.tma_terms and _aligned(terms.d):
        term_blocks = tuple(descriptor(x.view(-1), [tile.rows]) for x in terms)
    attention_backward.key_gradient[(len(tables.tiles) * heads.num_key,)](
        query, key, value, grad_output, *row_blocks, terms.normaliser, terms.d, *term_blocks, grad_key, grad_value,
        parts, tables.tiles, tables.position, rows, query.stride(0), key.stride(0), *form.numbers, form.scale,
        **form.constants, **heads.constants, BK=tile.keys, BM=tile.rows, TMA_ROWS=row_blocks[0] is not None,
        TMA_TERMS=term_blocks[0] is not None, PRECISION=choice.precision, **_resources(tile),
    )  # fmt: skip
    if tables.num_parts:
        attention_backward.sum_key_parts[(len(tables.cut) * heads.num_key, tile.keys // 16)](
            parts, grad_key, grad_value, tables.cut, form.scale, K=heads.num_key, E=heads.width, WIDTH=heads.padded,
            BK=tile.keys, ROWS=16, num_warps=4,
        )  # fmt: skip
    return grad_key, grad_value


class Decoding(NamedTuple):
    """A step of decoding: its launches, to be made in order, and its results.

    Args:
        launches: one alone may be run to compile it; its results are then meaningless.
        output: [rows, H, E].
        log_sum_exp: [rows, H].
    """

    launches: list[Callable[[], Any]]
    output: Tensor
    log_sum_exp: Tensor


def decoding(
    query: Tensor, key: Tensor, value: Tensor, page_table: Tensor, position: Tensor,
    shared: tuple[Tensor, Tensor, Tensor] | None, form: Form, choice: AttentionTiles, *, reach: int | None = None,
) -> Decoding:  # fmt: skip
    """Attention of one query a row.

    Args:
        key, value: [pages * BLOCK, K, E].
        shared: members [groups, size], number of shared pages by group and by row; None without shared pages.
        reach: a bound above every position; None: the page table's capacity.
    """
    heads = Heads.of(query, key)
    rows, num_heads, width = query.shape
    device = query.device
    max_pages = page_table.shape[1]
    splits = divided_up(reach or max_pages * attention_tiles.BLOCK, attention_tiles.SPLIT)
    direct = splits == 1
    tile = choice.decode_few if rows * heads.num_key * splits <= choice.few else choice.decode
    output = empty_rows(rows, num_heads, width, like=query)
    log_sum_exp = torch.empty(rows, num_heads, dtype=torch.float32, device=device)
    state_rows = 0 if direct and shared is None else rows
    m, s = torch.empty(2, state_rows, splits, num_heads, dtype=torch.float32, device=device)
    o = torch.empty(state_rows, splits, num_heads, heads.padded, dtype=torch.float32, device=device)
    form_and_heads = form.constants | heads.constants
    blocks = {"BLOCK": attention_tiles.BLOCK, "SPLIT": attention_tiles.SPLIT, "PRECISION": choice.precision}
    blocks |= overlapping(device)
    launches: list[Callable[[], Any]] = []
    if shared is not None:
        members, group_pages, _ = shared
        groups, size = members.shape
        wide = choice.decode_shared
        grid = (groups * divided_up(size * heads.group, wide.rows), heads.num_key, splits)
        read_shared = partial(
            attention_decode.decode_shared[grid],
            query, key, value, page_table, position, members, group_pages, m, s, o, splits, max_pages, size,
            query.stride(0), key.stride(0), *form.numbers, BM=wide.rows, **blocks, **form_and_heads, **_resources(wide),
        )  # fmt: skip
        launches.append(read_shared)
    read_own = partial(
        attention_decode.decode_own[(rows, heads.num_key, splits)],
        query, key, value, page_table, position, None if shared is None else shared[2], m, s, o, output, log_sum_exp,
        splits, max_pages, query.stride(0), key.stride(0), *form.numbers, BM=tile.rows, DIRECT=direct, **blocks,
        **form_and_heads, **_resources(tile),
    )  # fmt: skip
    launches.append(read_own)
    if not direct:
        merge = partial(
            attention_decode.merge_splits[(rows, heads.num_key)],
            m, s, o, position, output, log_sum_exp, splits, form.numbers[0], H=num_heads, R=heads.group, E=width,
            WIDTH=heads.padded, HEADS=power_of_two(heads.group), SPLIT=attention_tiles.SPLIT,
            AT_ONCE=4, WINDOWED=form.windowed, num_warps=4, **overlapping(device),
        )  # fmt: skip
        launches.append(merge)
    return Decoding(launches, output, log_sum_exp)


def _key_blocks(key: Tensor, value: Tensor, heads: Heads, tma: bool) -> tuple[Any, Any]:
    """TMA descriptors of blocks of keys and of values; None if they are loaded through pointers."""
    if not tma or not _aligned(key, value):
        return None, None
    block = [attention_tiles.BLOCK, 1, heads.padded]
    return descriptor(key, block), descriptor(value, block)


def _aligned(*operands: Tensor) -> bool:
    """Whether TMA can read these: all strides but the last, and the start, are multiples of 16 bytes."""
    for x in operands:
        if x.data_ptr() % 16:
            return False
        item = x.itemsize
        for stride in x.stride()[:-1]:
            if stride * item % 16:
                return False
    return True


@cache
def _resources(tile: QueryTile | KeyTile) -> dict[str, int]:
    cap = {"maxnreg": tile.registers} if tile.registers else {}
    return {"num_warps": tile.warps, "num_stages": tile.stages} | cap
