"""Which tiles attention takes on which GPU; every choice of a forward or decoding tile gives the same bits."""

from dataclasses import dataclass
from functools import cache

import torch

BLOCK = 64
"""Positions in a block of keys, and in a page of a cache. Part of the result's bits, as is SPLIT."""

SPLIT = 512
"""Positions in a split, the unit that decoding works on in parallel."""

PROCESSORS = 132
"""Work on keys with many queries is cut for so many processors, on every GPU: gradients do not depend on the GPU."""


@dataclass(frozen=True)
class QueryTile:
    """Rows (tokens times query heads of a key head), warps, pipeline stages, a cap on registers (0: none).

    ``tma``: whole blocks of keys come through TMA descriptors.
    """

    rows: int
    warps: int
    stages: int
    tma: bool = False
    registers: int = 0


@dataclass(frozen=True)
class KeyTile:
    """Keys, rows of queries in a step, warps, stages; TMA for queries, and for the log-sum-exps of their rows."""

    keys: int
    rows: int
    warps: int
    stages: int
    tma_rows: bool = False
    tma_terms: bool = False
    registers: int = 0


@dataclass(frozen=True)
class AttentionTiles:
    """Tiles of a width, a dtype and a GPU.

    Args:
        forward: of packed rows and of prefilling.
        query_gradient, key_gradient: of the backward pass.
        decode: of a row's own keys. 16 rows on one warp or 64 on four, here and below: 16 or 32 rows on two or four
            warps add up a row of a block in another order (on an H200 2 to 7% of log-sum-exps differ, and too few
            outputs to notice).
        decode_few: the same where programs are too few to fill the GPU: at most ``few``.
        decode_shared: of keys that a group shares.
        precision: how float32 operands are multiplied (irrelevant for 16-bit ones).
    """

    forward: QueryTile
    query_gradient: QueryTile
    key_gradient: KeyTile
    decode: QueryTile
    decode_few: QueryTile
    decode_shared: QueryTile
    precision: str = "ieee"
    few: int = 4 * PROCESSORS


INTERPRETED = AttentionTiles(
    forward=QueryTile(32, 1, 1),
    query_gradient=QueryTile(32, 1, 1),
    key_gradient=KeyTile(64, 32, 1, 1),
    decode=QueryTile(16, 1, 1),
    decode_few=QueryTile(16, 1, 1),
    decode_shared=QueryTile(16, 1, 1),
)


@cache
def attention_tiles(width: int, dtype: torch.dtype, device: torch.device) -> AttentionTiles:
    """Of heads of ``width`` (a power of two, padding included).

    Example:
        >>> attention_tiles(64, torch.float32, torch.device("cpu")).forward.rows
        32
    """
    if device.type == "cpu":
        return INTERPRETED
    if dtype == torch.float32:
        return float32_tiles()
    return hopper_tiles(width) if torch.cuda.get_device_capability(device)[0] == 9 else plain_tiles(width)


def hopper_tiles(width: int) -> AttentionTiles:
    """With TMA; tensor cores by warp groups. The fastest on an H200 of those tried, with prompts shared and not."""
    if width <= 64:
        return AttentionTiles(
            forward=QueryTile(128, 8, 3, tma=True, registers=128),
            query_gradient=QueryTile(128, 8, 3, tma=True, registers=128),
            key_gradient=KeyTile(64, 128, 4, 2, tma_terms=True),
            decode=QueryTile(16, 1, 3),
            decode_few=QueryTile(64, 4, 3),
            decode_shared=QueryTile(64, 4, 5),
            few=PROCESSORS,
        )
    if width <= 128:
        return AttentionTiles(
            forward=QueryTile(64, 4, 3, tma=True),
            query_gradient=QueryTile(128, 8, 3, tma=True),
            key_gradient=KeyTile(64, 64, 4, 2, tma_rows=True, tma_terms=True),
            decode=QueryTile(16, 1, 2),
            decode_few=QueryTile(64, 4, 3),
            decode_shared=QueryTile(64, 4, 3),
            few=8 * PROCESSORS,
        )
    return AttentionTiles(
        forward=QueryTile(128, 8, 2, tma=True),
        query_gradient=QueryTile(64, 4, 2, tma=True),
        key_gradient=KeyTile(64, 64, 8, 2, tma_rows=True, tma_terms=True),
        decode=QueryTile(64, 4, 3),
        decode_few=QueryTile(64, 4, 3),
        decode_shared=QueryTile(64, 4, 2),
    )


def plain_tiles(width: int) -> AttentionTiles:
    """For any GPU from sm_80 on: loads through pointers, under 99 KiB of shared memory. Their speed is unmeasured."""
    if width <= 128:
        return AttentionTiles(
            forward=QueryTile(64, 4, 2),
            query_gradient=QueryTile(64, 4, 2),
            key_gradient=KeyTile(64, 32, 4, 2 if width <= 64 else 1),
            decode=QueryTile(16, 1, 2),
            decode_few=QueryTile(64, 4, 2),
            decode_shared=QueryTile(64, 4, 2),
        )
    return AttentionTiles(
        forward=QueryTile(64, 4, 1),
        query_gradient=QueryTile(32, 4, 1),
        key_gradient=KeyTile(32, 32, 4, 1),
        decode=QueryTile(16, 1, 1),
        decode_few=QueryTile(64, 4, 1),
        decode_shared=QueryTile(64, 4, 1),
    )


def float32_tiles() -> AttentionTiles:
    """For tests: three products of tf32 for one of float32."""
    return AttentionTiles(
        forward=QueryTile(64, 4, 1),
        query_gradient=QueryTile(64, 4, 1),
        key_gradient=KeyTile(32, 32, 4, 1),
        decode=QueryTile(16, 1, 1),
        decode_few=QueryTile(64, 4, 1),
        decode_shared=QueryTile(64, 4, 1),
        precision="tf32x3",
    )
