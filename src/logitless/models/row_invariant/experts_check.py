"""The experts' products in tiles of every number of rows, for ``self_check``."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from logitless.models.kernels.experts import TILE_ROWS, Act, Slots, gated_products, grouped_product


@dataclass(frozen=True)
class ExpertsProblem:
    """Two products of a few random experts, in tiles that must all equal the largest.

    Args:
        width, inner: D and I.
        act: between the products.
        transposed: whether weights are stored [E, M, N].
        dtype, device: of the weights.
    """

    width: int
    inner: int
    act: Act
    transposed: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> str:
        """In words.

        Example:
            >>> ExpertsProblem(2048, 768, Act(), False, torch.bfloat16, torch.device("cpu")).name
            'experts 2048 -> 768 bfloat16'
        """
        more = ", transposed" * self.transposed + ", clamped" * (self.act.limit > 0)
        return f"experts {self.width} -> {self.inner} {str(self.dtype).removeprefix('torch.')}{more}"

    def launched(self) -> None:
        """Launch every kernel of the check once."""
        for rows in TILE_ROWS:
            self._computed(rows, num_tokens=2)

    def differences(self) -> dict[str, int]:
        """Count of numbers that differ from those of the largest tile, by rows of a tile."""
        num_tokens = 300 if self.device.type == "cuda" else 20
        expected = self._computed(TILE_ROWS[-1], num_tokens)
        found = {rows: self._computed(rows, num_tokens) for rows in TILE_ROWS[:-1]}
        count = {
            rows: sum(int((a != b).sum()) for a, b in zip(got, expected, strict=True)) for rows, got in found.items()
        }
        return {f"tiles of {rows} rows": number for rows, number in count.items()}

    @torch.no_grad()
    def _computed(self, rows: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(self.device).manual_seed(self.width)
        normal = partial(torch.randn, device=self.device, generator=generator)

        def weight(columns: int, length: int) -> Tensor:
            shape = (3, length, columns) if self.transposed else (3, columns, length)
            made = (normal(*shape) * length**-0.5).to(self.dtype)
            return made.transpose(1, 2) if self.transposed else made

        first, second = weight(2 * self.inner, self.width), weight(self.width, self.inner)
        x = normal(300, self.width).to(self.dtype)[:num_tokens]
        chosen: Any = torch.tensor([[0, 2], [2, 1], [2, 0]], device=self.device, dtype=torch.int32).repeat(100, 1)
        slots = Slots.of(chosen[:num_tokens], 3, rows=rows)
        hidden, _ = gated_products(x, first, slots, self.act)
        return hidden, grouped_product(hidden, second, slots, to_slots=True)
