"""The experts' products in tiles of every number of rows, for ``self_check``."""

from collections.abc import Callable
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
        """A description, for reports.

        Example:
            >>> ExpertsProblem(2048, 768, Act(), False, torch.bfloat16, torch.device("cpu")).name
            'experts 2048 -> 768 bfloat16'
        """
        more = ", transposed" * self.transposed + ", clamped" * (self.act.limit > 0)
        return f"experts {self.width} -> {self.inner} {str(self.dtype).removeprefix('torch.')}{more}"

    @torch.no_grad()
    def launched(self) -> None:
        """Launch every kernel of the check once; nothing is sampled or copied, as a CUDA graph may be recording."""
        first = self._weight(2 * self.inner, self.width, torch.empty)
        second = self._weight(self.width, self.inner, torch.empty)
        x = torch.empty(2, self.width, dtype=self.dtype, device=self.device)
        chosen = torch.zeros(2, 2, dtype=torch.int32, device=self.device)
        for rows in TILE_ROWS:
            self._computed(x, chosen, first, second, rows)

    @torch.no_grad()
    def differences(self) -> dict[str, int]:
        """How many numbers differ from those of the largest tile, by rows of a tile."""
        normal = partial(torch.randn, generator=torch.Generator(self.device).manual_seed(self.width))
        first = self._weight(2 * self.inner, self.width, normal) * self.width**-0.5
        second = self._weight(self.width, self.inner, normal) * self.inner**-0.5
        num_tokens = 300 if self.device.type == "cuda" else 20
        x = normal(num_tokens, self.width, dtype=self.dtype, device=self.device)
        chosen = torch.tensor([[0, 2], [2, 1], [2, 0]], device=self.device, dtype=torch.int32)
        given = x, chosen.repeat(100, 1)[:num_tokens], first, second
        expected = self._computed(*given, TILE_ROWS[-1])
        count = dict[str, int]()
        for rows in TILE_ROWS[:-1]:
            found = self._computed(*given, rows)
            count[f"tiles of {rows} rows"] = sum(int((a != b).sum()) for a, b in zip(found, expected, strict=True))
        return count

    def _weight(self, columns: int, length: int, make: Callable[..., Tensor]) -> Tensor:
        """A weight [3, columns, length] of three experts."""
        options: Any = {"dtype": self.dtype, "device": self.device}
        if self.transposed:
            return make(3, length, columns, **options).transpose(1, 2)
        return make(3, columns, length, **options)

    def _computed(self, x: Tensor, chosen: Tensor, first: Tensor, second: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        slots = Slots.of(chosen, 3, rows=rows)
        hidden, _ = gated_products(x, first, slots, self.act)
        return hidden, grouped_product(hidden, second, slots, to_slots=True)
