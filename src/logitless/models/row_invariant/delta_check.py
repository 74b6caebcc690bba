"""The convolution and rule of a gated delta net: packed, prefilled in chunks and decoded, for ``self_check``."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from logitless.models.attention import AttentionLayout
from logitless.models.one_node import apply
from logitless.models.row_invariant.delta_net import (
    CHUNK,
    Convolved,
    DecayAndBeta,
    DecodedStates,
    DeltaForm,
    DeltaRows,
    DeltaRule,
    DeltaSlots,
    DeltaWeights,
    PrefilledStates,
    prefilled,
    stepped,
)


def delta_name(form: DeltaForm, dtype: torch.dtype) -> str:
    """A description of the form, for reports.

    Example:
        >>> delta_name(DeltaForm(16, 32, 128, 128, 4, 1e-6), torch.bfloat16)
        'delta net, 32 heads, 16 of keys, 128 and 128 wide, 4 taps, bfloat16'
    """
    heads = f"{form.heads} heads, {form.key_heads} of keys, {form.key_width} and {form.width} wide, {form.taps} taps"
    return f"delta net, {heads}, {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class DeltaProblem:
    """A sequence of random products, and other ways to compute its rows, which must equal the packed row's.

    Args:
        form: of the layer.
        products: mixed, b and a, [T, ...].
        weights: of the layer.
        rows: the packed row.
        slots: one for each way.
        begins: the first chunks of two ways.
        rest: what follows the first of them.
    """

    form: DeltaForm
    products: tuple[Tensor, Tensor, Tensor]
    weights: DeltaWeights
    rows: DeltaRows
    slots: DeltaSlots
    begins: tuple[PrefilledStates, PrefilledStates]
    rest: PrefilledStates

    @classmethod
    @torch.no_grad()
    def of(cls, form: DeltaForm, dtype: torch.dtype, device: torch.device) -> "DeltaProblem":
        """A problem with random products."""
        length = 3 * CHUNK - 9 if device.type == "cuda" else CHUNK + 3
        normal = partial(torch.randn, generator=torch.Generator(device).manual_seed(form.heads), device=device)
        mixed, b, a = (normal(length, n).to(dtype) for n in (form.channels, form.heads, form.heads))
        shapes = ((form.channels, 1, form.taps), (form.heads,), (form.heads,), (form.width,))
        weights = DeltaWeights._make(normal(*shape).to(dtype) for shape in shapes)
        begun, almost = (
            PrefilledStates.of([(0, n, slot)], form.taps, device) for slot, n in enumerate((CHUNK, length - 2))
        )
        return cls(
            form, (mixed, b, a), weights, DeltaRows.of(AttentionLayout.of_sequences([length], device), form.taps),
            DeltaSlots.empty(3, form, dtype, device), (begun, almost),
            PrefilledStates.of([(CHUNK, length - CHUNK, 0)], form.taps, device),
        )  # fmt: skip

    @torch.no_grad()
    def launched(self) -> None:
        """Launch every kernel of the check once."""
        self._packed()
        self._prefilled(self.begins[0], slice(0, CHUNK))
        zero = torch.zeros(1, dtype=torch.int32, device=self.slots.history.device)
        self._decoded(DecodedStates(zero, zero.clone(), zero.clone()), 0)

    @torch.no_grad()
    def differences(self) -> dict[str, int]:
        """How many numbers differ from the packed row's, by way of computing."""
        expected = self._packed()
        length, device = len(expected), expected.device

        def decoded(start: int, slot: int) -> Tensor:
            rows = [
                self._decoded(DecodedStates.of(*torch.tensor([[slot], [t]], device=device)), t)
                for t in range(start, length)
            ]
            return torch.cat(rows)

        begun, almost = (slice(0, CHUNK), slice(0, length - 2))
        found = {
            "prefilled in chunks": [
                self._prefilled(self.begins[0], begun), self._prefilled(self.rest, slice(CHUNK, length)),
            ],
            "decoded behind a prompt": [self._prefilled(self.begins[1], almost), decoded(length - 2, 1)],
            "decoded": [decoded(0, 2)],
        }  # fmt: skip
        return {how: int((torch.cat(rows) != expected).sum()) for how, rows in found.items()}

    def _packed(self) -> Tensor:
        mixed, b, a = self.products
        heads = apply(Convolved, mixed, self.weights.convolution, self.rows, self.form)
        gates = apply(DecayAndBeta, b, a, self.weights.a_log, self.weights.dt_bias, self.rows)
        out: Tensor = apply(DeltaRule, *heads, *gates, self.rows.chunks)
        return out

    def _prefilled(self, states: PrefilledStates, rows: slice) -> Tensor:
        return prefilled(self.slots, states, self.form, self.weights, *(each[rows].clone() for each in self.products))

    def _decoded(self, states: DecodedStates, row: int) -> Tensor:
        some = (each[row : row + 1].clone() for each in self.products)
        return stepped(self.slots, states, self.form, self.weights, *some)
