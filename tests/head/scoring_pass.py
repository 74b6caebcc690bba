"""The scoring pass of the head alone: inputs at its edges, and what it is to give, in float64."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.head import passes
from logitless.head.kernels import launch
from logitless.head.kernels.variants import Variant
from logitless.head.sharded import Shard
from logitless.types import LMHead

UNTOUCHED = -7.0
"""In kept exponentials where nothing is to be written, or anything may be."""

CHUNK = 8
"""bfloat16 numbers in 16 bytes: the copy engine stores nothing less, so a row's last chunk is its own beyond V too."""


@dataclass(frozen=True)
class Shape:
    """N, D, V, LoRA's rank, and how many rows keep their exponentials."""

    rows: int
    width: int
    vocabulary: int
    rank: int = 0
    num_kept: int = 0

    def __str__(self) -> str:
        return f"{self.rows}x{self.width}x{self.vocabulary}-rank{self.rank}-kept{self.num_kept}"


EDGES = [
    Shape(1, 64, 256, 0, 1),  # one tile, full but for its rows
    Shape(1, 8, 1, 4, 1),  # less than one of everything
    Shape(64, 72, 257, 0, 64),  # half of the rows; the last tile has one column
    Shape(65, 72, 384, 1, 0),  # the right half of the last tile is outside
    Shape(128, 320, 385, 16, 127),  # a step more than there are stages; one column in that right half
    Shape(129, 24, 128, 33, 65),  # LoRA's columns reach into another step of depth
    Shape(300, 208, 700, 64, 131),  # several tiles a program; kept rows end inside a tile
    Shape(257, 448, 1000, 48, 257),
]


class Given(NamedTuple):
    """One call of ``launch.exp_product``."""

    operands: launch.Operands
    rows: launch.Rows
    anchor: Tensor


class Found(NamedTuple):
    """What it gives: E (UNTOUCHED beyond its columns, among them a chunk that is another's), S and T of each tile."""

    kept: Tensor | None
    s: Tensor
    t: Tensor


def drawn(shape: Shape, variant: Variant, device: str = "cpu") -> Given:
    """Targets lie in every tile, at its edges and outside of the vocabulary, as those of another rank do."""
    g = torch.Generator().manual_seed(shape.rows + shape.width + shape.rank)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=g) * scale).bfloat16().to(device)

    n, d, v = shape.rows, shape.width, shape.vocabulary
    factors = {}
    if shape.rank:
        factors = {"lora_a": normal(shape.rank, d, scale=0.1), "lora_b": normal(v, shape.rank)}
    head = LMHead(normal(v, d, scale=4 / math.sqrt(d)), lora_scale=0.3, **factors)
    hidden = normal(n, d)
    target = torch.randint(0, v, (n,), generator=g)
    edges = torch.tensor([v - 1, -1, 0, v, 127, 128, 255, 256, -v, v + 300, v - 2])
    target[: len(edges)] = edges[:n]
    multiplier = passes.LOG2E / (0.5 + torch.rand(n, generator=g)).to(device)
    form = launch.Form(torch.bfloat16, 1.0, False, variant)
    operands = passes.operands(form, head, Shard(0, head.weight, 0))
    rows = launch.Rows(hidden, passes.low_rows(hidden, head, variant), multiplier, target.to(device))
    return Given(operands, rows, (20 * torch.rand(n, generator=g)).to(device))


def scored(given: Given, num_kept: int) -> Found:
    """By the kernel."""
    operands = given.operands
    kept, v = None, len(operands.weight)
    if num_kept:
        kept = launch.kept_rows(num_kept, v + CHUNK, operands.variant, given.anchor.device).fill_(UNTOUCHED)
    sums = launch.TileSums.of(operands, given.rows)
    launch.exp_product(operands, given.rows, given.anchor, kept, num_kept, sums, None, maximum=False)
    if kept is not None:
        kept[:, v : v + -v % CHUNK] = UNTOUCHED
    return Found(kept, *sums)


def exact(given: Given, num_kept: int) -> Found:
    """In float64, from the operands as they are multiplied."""
    rows, operands, columns = given.rows, given.operands, given.operands.variant.score.columns
    v = len(operands.weight)
    z = rows.wide.double() @ operands.wide.double().T
    d = z * (rows.multiplier.double() * operands.gain)[:, None] - given.anchor.double()[:, None]
    d[torch.arange(v, device=d.device) == rows.target[:, None]] = -torch.inf
    e = d.exp2()
    kept = None
    if num_kept:
        kept = torch.full((num_kept, v + -v % CHUNK + CHUNK), UNTOUCHED, dtype=torch.float64, device=d.device)
        kept[:, :v] = e[:num_kept]
    weighted = torch.where(e == 0, 0.0, e * d)
    s, t = (torch.stack([tile.sum(1) for tile in x.split(columns, dim=1)]) for x in (e, weighted))
    return Found(kept, s, t)


def wrong(found: Found, given: Given, num_kept: int) -> list[str]:
    """What differs from the truth by more than float32 and, of kept exponentials, one bfloat16 rounding."""
    wanted = exact(given, num_kept)
    # d is up to 64 bits wide, and a float32 sum of products: 16 units in the last place, which 2^d makes relative ones.
    relative = 16 * 64 * torch.finfo(torch.float32).eps
    size = wanted.t.abs() + 64 * wanted.s
    names = []
    if found.kept is not None and wanted.kept is not None:
        off = (found.kept.double() - wanted.kept).abs()
        if not (off <= (2**-8 + relative) * wanted.kept.abs() + 1e-37).all():
            names.append("kept")
    if not ((found.s.double() - wanted.s).abs() <= relative * wanted.s + 1e-37).all():
        names.append("s")
    if not ((found.t.double() - wanted.t).abs() <= relative * size + 1e-37).all():
        names.append("t")
    return names
