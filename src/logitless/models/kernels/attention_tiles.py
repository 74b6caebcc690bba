"""Tile sizes of attention by GPU; every forward and decoding tile gives bitwise the same results."""

from dataclasses import dataclass
from functools import cache

import torch

BLOCK = 64
"""Positions in a block of keys, and in a page of a cache. Results depend on it and on SPLIT in the last bits."""

SPLIT = 512
"""Positions in a split; decoding works on splits in parallel."""

PROCESSORS = 132
"""Keys with many queries are divided for this many processors, on every GPU: gradients do not depend on the GPU."""


@dataclass(frozen=True)
class QueryTile:
    """Rows (tokens times query heads of a key head), warps, pipeline stages, a bound on registers (0: none).

    ``tma``: whole blocks of keys are loaded through TMA descriptors.
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
            warps sum a row of a block in another order (on an H200 2 to 7% of log-sum-exps differ, and very few
            outputs).
        decode_few: the same, if at most ``few`` programs are launched, too few to fill the GPU.
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
    """Tiles for heads of ``width`` (a power of two, padding included).

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
    """With TMA. The fastest of those tried on an H200, with and without shared prompts."""
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
    """For any GPU from sm_80 on: without TMA, under 99 KiB of shared memory. Their speed is not measured."""
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
