"""The forward and the backward of the fused head, put together from kernels and small torch operations on [N].

Nothing here waits for the device, and every shape is known before the first kernel runs: row skipping happens on the
device, through ``launch.Compaction``.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from logitless.head.kernels import launch
from logitless.head.kernels.launch import Compaction, Operands, Rows
from logitless.head.kernels.variants import variant
from logitless.types import LMHead

LOG2E = 1 / math.log(2)

BLOCK_BYTES = 192 * 2**20
"""Logit gradients that are made anew are held for a block of columns of about this size."""


class State(NamedTuple):
    """What the forward knows of each row; logits and anchors in bits.

    Args:
        low: [N, padded] high and low part of lora_scale * hidden @ lora_a.T in hidden's dtype, or None.
        target: [N].
        multiplier: bits per unit of the product (of tanh, with a softcap).
        anchor, others, target_logit, slope: a, S, z_y and the softcap's slope at the target.
        logp, entropy, normaliser, rounding: see ``launch.Scores``.
    """

    low: Tensor | None
    target: Tensor
    multiplier: Tensor
    anchor: Tensor
    others: Tensor
    target_logit: Tensor
    slope: Tensor
    logp: Tensor
    entropy: Tensor
    normaliser: Tensor
    rounding: Tensor

    def part(self, index: slice | Tensor) -> "State":
        """The state of some rows."""
        return State(*(None if x is None else x[index] for x in self))  # type: ignore[arg-type]


class Needed(NamedTuple):
    """Which inputs need a gradient."""

    hidden: bool
    weight: bool
    bias: bool
    lora_a: bool
    lora_b: bool


class Gradients(NamedTuple):
    """Gradients by input; None where none is needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None


def operands(hidden: Tensor, head: LMHead) -> Operands:
    """The head as the kernels multiply it, rounded to hidden's dtype."""
    weight = head.weight.to(hidden.dtype).contiguous()
    return Operands(
        weight=weight,
        bias=None if head.bias is None else head.bias.float().contiguous(),
        low_weight=None if head.lora_b is None else _beside([head.lora_b.to(hidden.dtype)] * _addends(hidden.dtype)),
        inner=1.0 if head.softcap is None else head.scale / head.softcap,
        softcap=head.softcap is not None,
        rank=0 if head.lora_b is None else head.lora_b.shape[1],
        variant=variant(hidden, weight),
    )


def scored(
    operands: Operands,
    head: LMHead,
    hidden: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor,
    anchor: Tensor | None,
    kept_rows: int,
) -> tuple[State, Tensor | None]:
    """The scores of every row, and the exponentials of the first ``kept_rows`` rows."""
    multiplier = _by_row((head.scale if head.softcap is None else head.softcap) * LOG2E, temperature, hidden)
    rows = Rows(hidden, _low(hidden, head), multiplier, target)
    target_logit, slope, own_anchor = launch.target_logits(operands, rows, anchored=anchor is None)
    anchor = own_anchor if anchor is None else anchor.float() * LOG2E
    assert anchor is not None
    kept = None
    if kept_rows:
        kept = launch.kept_rows(kept_rows, len(operands.weight), operands.variant, hidden.device)
    others, weighted = launch.anchored_sums(operands, rows, target_logit, anchor, kept, kept_rows)
    scores = launch.row_scores(operands, rows, others, weighted, anchor, target_logit, slope, kept, kept_rows)
    return State(rows.low, target, multiplier, anchor, others, target_logit, slope, *scores), kept


def gradients(
    state: State,
    head: LMHead,
    hidden: Tensor,
    kept: Tensor | None,
    order: Tensor | None,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    *,
    needed: Needed,
) -> Gradients:
    """Gradients of the head's inputs: from kept exponentials for the first rows, by making logits anew for the rest.

    Args:
        state, hidden, grad_logp, grad_entropy: by row of the forward.
        kept: E of the first rows; it is used up.
        order: where each of these rows stands in the result, None where it stands where it is.
    """
    multiplied = operands(hidden, head)
    num_kept = 0 if kept is None else len(kept)
    place = torch.arange(len(hidden), device=hidden.device) if order is None else order
    logit = _LogitGradient.of(state, grad_logp, grad_entropy)
    sink = _Sink(multiplied, head, hidden, needed)
    pieces: list[tuple[_Part, Tensor]] = []
    if kept is not None:
        rows = slice(num_kept)
        part = _from_kept(state.part(rows), logit.part(rows), hidden[rows], kept, place[rows], multiplied, needed)
        kept = kept[:, : len(head.weight)]
        sink.add_rows(part, kept, 0)
        pieces.append((part, kept))
    if num_kept == len(hidden):
        sink.add_columns(pieces, 0)
    else:
        rows = slice(num_kept, None)
        anew = _anew(state.part(rows), logit.part(rows), hidden[rows], place[rows], multiplied, needed)
        variant = multiplied.variant
        width = block_width(
            len(anew.hidden), len(head.weight), tile=variant.score.columns, itemsize=variant.kept.itemsize
        )
        block = torch.empty(len(anew.hidden), width, dtype=multiplied.variant.kept, device=hidden.device)
        for first in range(0, len(head.weight), width):
            anew.logit_gradient(multiplied, first, block)
            columns = block[:, : len(head.weight) - first]
            sink.add_rows(anew.part, columns, first)
            blocks = [(part, kept[:, first : first + width]) for part, kept in pieces]
            sink.add_columns([*blocks, (anew.part, columns)], first)
    return sink.gradients()


class _LogitGradient(NamedTuple):
    """What comes in by row, and the gradient in the target's logit; nats."""

    logp: Tensor
    entropy: Tensor | None
    target: Tensor
    live: Tensor

    @classmethod
    def of(cls, state: State, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> "_LogitGradient":
        g = torch.zeros_like(state.logp) if grad_logp is None else grad_logp.float()
        h = None if grad_entropy is None else grad_entropy.float()
        at_target = g * (state.others / state.normaliser)
        live = g != 0
        if h is not None:
            p = torch.exp2(state.target_logit - state.anchor) / state.normaliser
            at_target = at_target - h * torch.where(p == 0, 0.0, p * (state.logp + state.entropy))
            live = live | (h != 0)
        return cls(g, h, at_target, live)

    def part(self, index: slice | Tensor) -> "_LogitGradient":
        return _LogitGradient(*(None if x is None else x[index] for x in self))  # type: ignore[arg-type]


class _Part(NamedTuple):
    """Rows that enter the products, live ones first.

    Args:
        hidden: [slots, D], times ``factor`` where there is one; 0 in slots that are not taken.
        chosen: which rows these are among the part's.
        row_of_slot: which rows these are in the result.
        factor: [slots] what turns products with E into gradients, or None.
        low: [slots, padded] beside each other what lora_b and the bias are multiplied with, like ``hidden``; or None.
    """

    hidden: Tensor
    chosen: Compaction
    row_of_slot: Tensor
    factor: Tensor | None
    low: Tensor | None


class _Anew(NamedTuple):
    """A part whose logit gradients are made a block of columns at a time."""

    part: _Part
    state: State
    logit: _LogitGradient
    log_normaliser: Tensor

    @property
    def hidden(self) -> Tensor:
        return self.part.hidden

    def logit_gradient(self, multiplied: Operands, first: int, block: Tensor) -> None:
        state, logit = self.state, self.logit
        factor = state.multiplier * multiplied.slope
        rows = Rows(self.hidden, state.low, state.multiplier, state.target)
        launch.logit_gradient(
            multiplied,
            rows,
            self.part.chosen.taken,
            self.log_normaliser,
            logit.logp * factor,
            logit.target * factor,
            None if logit.entropy is None else logit.entropy * factor,
            state.entropy,
            first,
            block,
        )


def _from_kept(
    state: State, logit: _LogitGradient, hidden: Tensor, kept: Tensor, place: Tensor, multiplied: Operands,
    needed: Needed,
) -> _Part:  # fmt: skip
    """Moves live rows of ``kept`` to the front; with an entropy gradient, makes it the gradient of both first."""
    factor = -state.multiplier * multiplied.slope / state.normaliser
    if logit.entropy is None:
        factor = factor * logit.logp * state.rounding
    else:
        exact = -state.normaliser * logit.target * state.slope
        stored = exact.to(kept.dtype).float()
        factor = factor * torch.where(stored == 0, 1.0, exact / stored)
        launch.add_entropy_gradient(
            kept, logit.live, state.target, exact, -torch.log2(state.normaliser), logit.logp, logit.entropy,
            state.entropy, multiplied,
        )  # fmt: skip
    chosen = launch.compaction(logit.live)
    launch.move_rows(kept, chosen, multiplied.variant)
    source = chosen.source
    factor = factor[source]
    return _Part(
        hidden=launch.gather_rows(hidden, source, factor, chosen.taken, multiplied.variant.kept),
        chosen=chosen,
        row_of_slot=place[source],
        factor=factor,
        low=_low_and_one(state.low, chosen, factor, multiplied) if needed.bias or needed.lora_b else None,
    )


def _anew(
    state: State, logit: _LogitGradient, hidden: Tensor, place: Tensor, multiplied: Operands, needed: Needed
) -> _Anew:
    """Live rows first, with all that their logit gradients are made of."""
    chosen = launch.compaction(logit.live)
    part = _Part(
        hidden=launch.gather_rows(hidden, chosen.source, None, chosen.taken, hidden.dtype),
        chosen=chosen,
        row_of_slot=place[chosen.source],
        factor=None,
        low=_low_and_one(state.low, chosen, None, multiplied) if needed.bias or needed.lora_b else None,
    )
    moved = state.part(chosen.source)
    return _Anew(
        part=part,
        state=moved,
        logit=logit.part(chosen.source),
        log_normaliser=moved.anchor + torch.log2(moved.normaliser),
    )


class _Sink:
    """Gradients as they fill: rows of hidden states, then blocks of columns of the head."""

    def __init__(self, multiplied: Operands, head: LMHead, hidden: Tensor, needed: Needed) -> None:
        self._multiplied, self._head, self._needed = multiplied, head, needed
        self._hidden = torch.zeros_like(hidden) if needed.hidden else None
        self._weight = torch.empty_like(head.weight) if needed.weight else None
        self._columns: Tensor | None = None
        self._lora_a: Tensor | None = None
        self._wide: Tensor | None = None
        self._low: Tensor | None = None

    def add_rows(self, part: _Part, k: Tensor, first: int) -> None:
        """What columns ``first`` and on of a part's logit gradient add to its hidden states and to lora_a.

        Blocks come in order; sums over them stay float32 and are rounded once, with the last.
        """
        multiplied, head, count = self._multiplied, self._head, part.chosen.taken
        variant = multiplied.variant
        block = slice(first, first + k.shape[1])
        last = block.stop >= len(head.weight)
        low = None
        if head.lora_a is not None and head.lora_b is not None and (self._needed.hidden or self._needed.lora_a):
            narrow = _beside([head.lora_b[block].to(multiplied.weight.dtype)])
            before, self._low = (None, _zeros(k, narrow)) if first == 0 else (self._low, self._low)
            assert self._low is not None
            launch.row_product(k, narrow, self._low, count, variant, base=before)
            if last:
                moved = (self._low * head.lora_scale).to(variant.kept)
                low = (moved, _padded(head.lora_a.to(part.hidden.dtype), moved.shape[1]).to(variant.kept))
                if self._needed.lora_a:
                    added = _product(moved.T, part.hidden.to(variant.kept))[: len(head.lora_a)]
                    self._lora_a = added if self._lora_a is None else self._lora_a + added
        if self._hidden is None:
            return
        weight = multiplied.weight[block]
        before = None if first == 0 else self._wide
        if last:
            launch.row_product(
                k, weight, self._hidden, count, variant,
                row_of_slot=part.row_of_slot, factor=part.factor, low=low, base=before,
            )  # fmt: skip
            self._wide = None
        else:
            if first == 0:
                self._wide = torch.empty(len(k), weight.shape[1], dtype=torch.float32, device=k.device)
            assert self._wide is not None
            launch.row_product(k, weight, self._wide, count, variant, base=before)

    def add_columns(self, pieces: list[tuple[_Part, Tensor]], first: int) -> None:
        """What all parts add to rows ``first`` and on of the weight, of lora_b and of the bias: their only block."""
        block = slice(first, first + pieces[0][1].shape[1])
        if self._weight is not None:
            self._chain([(k, part.hidden, part.chosen.taken) for part, k in pieces], self._weight[block])
        low = [(k, part.low, part.chosen.taken) for part, k in pieces if part.low is not None]
        if low:
            if self._columns is None:
                self._columns = _zeros(self._head.weight, low[0][1])
            self._chain(low, self._columns[block])

    def gradients(self) -> Gradients:
        head, columns = self._head, self._columns
        rank = 0 if head.lora_b is None else head.lora_b.shape[1]
        return Gradients(
            hidden=self._hidden,
            weight=self._weight,
            bias=_like(head.bias, None if columns is None else columns[:, rank]) if self._needed.bias else None,
            lora_a=_like(head.lora_a, self._lora_a) if self._needed.lora_a else None,
            lora_b=_like(head.lora_b, None if columns is None else columns[:, :rank]) if self._needed.lora_b else None,
        )

    def _chain(self, products: list[tuple[Tensor, Tensor, Tensor]], out: Tensor) -> None:
        """The sum of k.T @ h over all (k, h, taken), float32 until the last."""
        base = None
        for k, h, taken in products[:-1]:
            wide = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            launch.column_product(k, h, wide, taken, self._multiplied.variant, base=base)
            base = wide
        k, h, taken = products[-1]
        launch.column_product(k, h, out, taken, self._multiplied.variant, base=base)


def _by_row(value: float, temperature: float | Tensor, hidden: Tensor) -> Tensor:
    """[N] float32 value / temperature."""
    if isinstance(temperature, Tensor):
        return value / temperature.float()
    return torch.full((len(hidden),), value / temperature, dtype=torch.float32, device=hidden.device)


def _like(value: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return None if value is None or gradient is None else gradient.to(value.dtype)


def _addends(dtype: torch.dtype) -> int:
    """How many numbers of this dtype add up to about a float32."""
    return 1 if dtype == torch.float32 else 2


def _low(hidden: Tensor, head: LMHead) -> Tensor | None:
    """lora_scale * hidden @ lora_a.T as addends in hidden's dtype."""
    if head.lora_a is None:
        return None
    product = head.lora_scale * _product(hidden, head.lora_a.to(hidden.dtype).T)
    high = product.to(hidden.dtype)
    return _beside([high, (product - high).to(hidden.dtype)][: _addends(hidden.dtype)])


def _low_and_one(low: Tensor | None, chosen: Compaction, factor: Tensor | None, multiplied: Operands) -> Tensor:
    """Columns of ``low``, its addends summed, and of ones, in slot order; times ``factor``; 0 in free slots."""
    source = chosen.source
    taken = torch.arange(len(source), device=source.device) < chosen.taken
    columns = [torch.ones(len(source), 1, dtype=torch.float32, device=source.device)]
    if low is not None:
        rank, addends = multiplied.rank, _addends(low.dtype)
        moved = low[source].float()
        columns.insert(0, sum((moved[:, i * rank : (i + 1) * rank] for i in range(addends)), torch.zeros(())))
    wide = torch.cat(columns, 1)
    if factor is not None:
        wide = wide * factor[:, None]
    return _beside([torch.where(taken[:, None], wide, 0.0).to(multiplied.variant.kept)])


def _beside(columns: list[Tensor]) -> Tensor:
    """Blocks of columns beside each other, with zeros up to a width that a tile can have."""
    together = torch.cat(columns, dim=1) if len(columns) > 1 else columns[0]
    width = together.shape[1]
    return torch.nn.functional.pad(together, (0, max(16, 1 << (width - 1).bit_length()) - width)).contiguous()


def _padded(matrix: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, 0, 0, rows - len(matrix))).contiguous()


def _zeros(rows: Tensor, columns: Tensor) -> Tensor:
    return torch.zeros(len(rows), columns.shape[1], dtype=torch.float32, device=rows.device)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32."""
    if a.dtype == torch.float32 or a.device.type != "cuda":
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


def block_width(rows: int, vocabulary: int, *, tile: int, itemsize: int) -> int:
    """Columns of a block of logit gradients: about BLOCK_BYTES, in whole tiles."""
    fitting = max(1, BLOCK_BYTES // (rows * itemsize * tile)) * tile
    return min(fitting, -(-vocabulary // tile) * tile)
