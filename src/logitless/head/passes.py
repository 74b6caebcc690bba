"""Forward and backward of the fused head, from kernels and small torch operations on [N].

Nothing synchronizes with the device, and every shape is known before the first kernel runs: rows are skipped on the
device, through ``launch.Compaction``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from logitless.head.columns import Columns
from logitless.head.kernels import launch
from logitless.head.kernels.launch import Compaction, Form, Operands, Rows, Sums, TileSums
from logitless.head.kernels.variants import Variant, variant
from logitless.head.sharded import Shard
from logitless.types import LMHead

LOG2E = 1 / math.log(2)

BLOCK_BYTES = 192 * 2**20
"""Approximate size of a block of recomputed logit gradients."""

SCRATCH_RATIO = 8
"""A weight gradient this many times as large as a block of logit gradients gives its memory to the block as scratch.

The last columns then take more time: at a ratio of 4 (hidden size 4096) a step took 4% longer, at 10 1%.
"""

MIN_FILL = 0.9
"""A block is made narrower if its weight gradient fills a smaller part of its rounds of the grid."""


class State(NamedTuple):
    """Values of each row that the forward saves; logits and anchors in bits (base 2).

    Args:
        target: [N] index among this rank's columns.
        multiplier: bits per unit of the product (of tanh, with a softcap).
        anchor, others, target_logit, slope: a, S, z_y and the softcap's slope at the target.
        logp, entropy, normaliser, rounding: see ``launch.Scores``.
    """

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


def form(hidden: Tensor, head: LMHead) -> Form:
    """How the kernels multiply these hidden states with any columns of the head."""
    return Form(
        product=hidden.dtype,
        inner=1.0 if head.softcap is None else head.scale / head.softcap,
        softcap=head.softcap is not None,
        variant=variant(hidden),
    )


def operands(form: Form, head: LMHead, shard: Shard) -> Operands:
    """A shard's columns of the head, rounded to hidden's dtype and aligned for the kernels."""
    columns = slice(shard.first, shard.first + len(shard.weight))
    weight, low = shard.weight.to(form.product), None
    if head.lora_b is not None:
        low = _side_by_side([head.lora_b[columns].to(form.product)] * _addends(form.product), align=8)
    aligned = weight.data_ptr() % 16 == 0
    return Operands(
        **vars(form),
        weight=weight.contiguous() if aligned else weight.clone(memory_format=torch.contiguous_format),
        low=low,
        bias=None if head.bias is None else head.bias[columns].float().contiguous(),
        first=shard.first,
    )


def scored(
    columns: Columns,
    head: LMHead,
    hidden: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor,
    anchor: Tensor | None,
    kept_rows: int,
) -> tuple[State, Tensor | None]:
    """The scores of every row, and the exponentials of the first ``kept_rows`` rows.

    Without a given anchor, a row's anchor is its target's logit. If the weight arrives shard by shard (FSDP2), where
    the target's shard may be last, it is the largest logit in the first tile of columns.
    """
    product_form = form(hidden, head)
    multiplier = _by_row((head.scale if head.softcap is None else head.softcap) * LOG2E, temperature, hidden)
    low = low_rows(hidden, head, product_form.variant)
    target_logit, slope = columns.target_logits(multiplier), torch.ones_like(multiplier)
    kept = launch.kept_rows(kept_rows, columns.kept_width, product_form.variant, hidden.device) if kept_rows else None
    sums = None
    for shard in columns.shards_in_turn(hidden.dtype):
        multiplied = operands(product_form, head, shard)
        rows = Rows(hidden, low, multiplier, _counted_from(shard.first, target))
        launch.target_logits(multiplied, rows, target_logit, slope)
        columns.summed(target_logit)
        if sums is not None:
            start = sums.anchor
        elif anchor is not None:
            start = anchor.float().nan_to_num() * LOG2E
        elif columns.num_shards == 1:
            start = target_logit.clamp(min=launch.LOWEST)
        else:
            start = launch.leading_maximum(multiplied, rows)
        before, place = sums, columns.kept_block(shard)
        block = None if kept is None else kept[:, place]
        sums = _anchored_sums(multiplied, rows, target_logit, start, before, block, kept_rows, columns)
        if kept is not None and before is not None:
            launch.rescale_rows(kept[:, : place.start], before.anchor, sums.anchor, product_form.variant)
    assert sums is not None
    own = columns.kept_place(target)
    scores = launch.row_scores(product_form, sums, target_logit, slope, own, columns.kept_width, kept)
    return State(target, multiplier, sums.anchor, sums.others, target_logit, slope, *scores), kept


def _anchored_sums(
    multiplied: Operands, rows: Rows, target_logit: Tensor, anchor: Tensor, before: Sums | None, kept: Tensor | None,
    num_kept: int, columns: Columns,
) -> Sums:  # fmt: skip
    """S and T of every row, added to those of ``before``; writes E of these columns to ``num_kept`` rows of ``kept``.

    Rows whose sums leave the range are recomputed with their maximum as the anchor.
    """
    parts = TileSums.of(multiplied, rows)
    anchor = anchor.clone()
    s, t = torch.empty_like(anchor), torch.empty_like(anchor)
    flagged = torch.zeros(len(anchor), dtype=torch.bool, device=anchor.device)
    launch.exp_product(multiplied, rows, anchor, kept, num_kept, parts, None, maximum=False)
    parts.sum(s, t, None, anchor, before, target_logit, flagged)
    _of_all_ranks(s, t, columns, anchor, target_logit, flagged)
    again = launch.listed(flagged)
    launch.exp_product(multiplied, rows, anchor, None, 0, parts, again, maximum=True)
    parts.sum(anchor, t, again, maximum=True)
    columns.largest(anchor)
    launch.exp_product(multiplied, rows, anchor, kept, num_kept, parts, again, maximum=False)
    parts.sum(s, t, again, anchor, before)
    return Sums(anchor, *_of_all_ranks(s, t, columns))


def _of_all_ranks(
    s: Tensor, t: Tensor, columns: Columns, anchor: Tensor | None = None, target_logit: Tensor | None = None,
    flagged: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sums over the ranks that share the vocabulary, in rank order."""
    if not columns.shared:
        return s, t
    total_s, total_t = torch.empty_like(s), torch.empty_like(t)
    by_rank = columns.by_rank(torch.stack([s, t]))
    TileSums(by_rank[0], by_rank[1]).sum(total_s, total_t, None, anchor, None, target_logit, flagged)
    return total_s, total_t


def gradients(
    state: State,
    columns: Columns,
    head: LMHead,
    hidden: Tensor,
    kept: Tensor | None,
    order: Tensor | None,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    *,
    needed: Needed,
) -> Gradients:
    """Gradients of the head's inputs: from kept exponentials for the first rows, with recomputed logits for the rest.

    Args:
        state, hidden, grad_logp, grad_entropy: by row, in the forward's order.
        kept: E of the first rows; it is overwritten.
        order: [N] the caller's row of each of these rows; None if they are the same.
    """
    product_form = form(hidden, head)
    num_kept = 0 if kept is None else len(kept)
    place = torch.arange(len(hidden), device=hidden.device) if order is None else order
    logit = _LogitGradient.of(state, grad_logp, grad_entropy)
    sums = _Sums(product_form, columns, head, hidden, needed)
    before = recomputed = None
    width = columns.most
    if kept is not None:
        rows = slice(num_kept)
        before = _kept_part(
            state.part(rows), logit.part(rows), hidden[rows], kept, place[rows], product_form, columns, head, needed
        )
    if num_kept < len(hidden):
        rows = slice(num_kept, None)
        lent = sums.hidden_as_scratch() if kept is None else None
        recomputed = _recomputed_rows(
            state.part(rows), logit.part(rows), hidden[rows], place[rows], product_form, head, needed, lent
        )
        width = block_width(len(recomputed.part.hidden), hidden.shape[1], columns.most, variant=product_form.variant)
    for shard in columns.shards_in_turn(hidden.dtype):
        sums.open(shard)
        here = None if kept is None else kept[:, columns.kept_block(shard)]
        if before is not None and here is not None:
            sums.add_rows(before, here, 0)
        for first, scratch in [(0, None)] if recomputed is None else sums.blocks(len(recomputed.part.hidden), width):
            pieces = []
            if before is not None and here is not None:
                pieces.append((before, here if scratch is None else here[:, first : first + scratch.shape[1]]))
            if recomputed is not None and scratch is not None:
                recomputed.logit_gradient(sums.multiplied, first, scratch)
                pieces.append((recomputed.part, scratch[:, : len(shard.weight) - first]))
            sums.add_columns(pieces, first)
            if recomputed is not None:  # last: the rows' gradient may overwrite their hidden states
                sums.add_rows(*pieces[-1], first)
        sums.close(shard)
    return sums.gradients()


class _LogitGradient(NamedTuple):
    """Incoming gradients by row, and the gradient of the target's logit; nats."""

    logp: Tensor
    entropy: Tensor | None
    target: Tensor
    nonzero: Tensor

    @classmethod
    def of(cls, state: State, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> "_LogitGradient":
        # The gradient of a sum arrives expanded: one number with a stride of 0.
        g = torch.zeros_like(state.logp) if grad_logp is None else grad_logp.float().contiguous()
        h = None if grad_entropy is None else grad_entropy.float().contiguous()
        at_target = g * (state.others / state.normaliser)
        nonzero = g != 0
        if h is not None:
            p = torch.exp2(state.target_logit - state.anchor) / state.normaliser
            at_target = at_target - h * torch.where(p == 0, 0.0, p * (state.logp + state.entropy))
            nonzero = nonzero | (h != 0)
        return cls(g, h, at_target, nonzero)

    def part(self, index: slice | Tensor) -> "_LogitGradient":
        return _LogitGradient(*(None if x is None else x[index] for x in self))  # type: ignore[arg-type]


class _Part(NamedTuple):
    """Rows as the products take them, those with a gradient first: slot j holds row ``chosen.source[j]``.

    Args:
        hidden: [slots, D], times ``factor`` if there is one; 0 in free slots.
        chosen: rows of the part by slot.
        row_of_slot: rows of the result by slot.
        factor: [slots] what products with E are multiplied with to be gradients, or None.
        low: [slots, padded] the other factors of lora_b's and the bias's gradient, side by side; or None.
        sums: sums over the columns so far.
    """

    hidden: Tensor
    chosen: Compaction
    row_of_slot: Tensor
    factor: Tensor | None
    low: Tensor | None
    sums: "_RowSums"


@dataclass
class _RowSums:
    """A part's logit gradients times the weight (``wide``) and lora_b (``low``), over the columns so far; float32."""

    wide: Tensor | None = None
    low: Tensor | None = None


class _Recomputed(NamedTuple):
    """Rows without kept exponentials: their logit gradients are recomputed a block of columns at a time."""

    part: _Part
    wide: Tensor
    state: State
    logit: _LogitGradient
    log_normaliser: Tensor

    def logit_gradient(self, multiplied: Operands, first: int, block: Tensor) -> None:
        state, logit = self.state, self.logit
        factor = state.multiplier * multiplied.slope
        rows = Rows(self.wide, None, state.multiplier, _counted_from(multiplied.first, state.target))
        of_entropy = None if logit.entropy is None else logit.entropy * factor
        launch.logit_gradient(
            multiplied, rows, self.part.chosen.taken, self.log_normaliser, logit.logp * factor, logit.target * factor,
            of_entropy, state.entropy, first, block,
        )  # fmt: skip


def _kept_part(
    state: State, logit: _LogitGradient, hidden: Tensor, kept: Tensor, place: Tensor, form: Form, columns: Columns,
    head: LMHead, needed: Needed,
) -> _Part:  # fmt: skip
    """The rows with kept exponentials. Moves those with a gradient to the front of ``kept``.

    With an entropy gradient, ``kept`` first becomes the logit gradient of both results.
    """
    factor = -state.multiplier * form.slope / state.normaliser
    if logit.entropy is None:
        factor = factor * logit.logp * state.rounding
    else:
        exact = -state.normaliser * logit.target * state.slope
        stored = exact.to(kept.dtype).float()
        factor = factor * torch.where(stored == 0, 1.0, exact / stored)
        launch.add_entropy_gradient(
            kept, logit.nonzero, columns.kept_place(state.target), exact, -torch.log2(state.normaliser), logit.logp,
            logit.entropy, state.entropy, form.variant,
        )  # fmt: skip
    chosen = launch.compaction(logit.nonzero)
    launch.move_rows(kept, chosen, form.variant)
    factor = factor[chosen.source]
    scaled = launch.gather_rows(hidden, chosen.source, factor, chosen.taken, form.variant.kept)
    low = _low_columns(scaled, factor, chosen, head, form) if needed.bias or needed.lora_b else None
    return _Part(
        hidden=scaled, chosen=chosen, row_of_slot=place[chosen.source], factor=factor, low=low, sums=_RowSums()
    )


def _recomputed_rows(
    state: State, logit: _LogitGradient, hidden: Tensor, place: Tensor, form: Form, head: LMHead, needed: Needed,
    lent: Tensor | None,
) -> _Recomputed:  # fmt: skip
    """The rows to recompute, those with a gradient first; ``lent`` is scratch for their hidden states."""
    chosen = launch.compaction(logit.nonzero)
    rows = launch.gather_rows(hidden, chosen.source, None, chosen.taken, hidden.dtype, lent)
    low = _low_columns(rows, None, chosen, head, form) if needed.bias or needed.lora_b else None
    moved = state.part(chosen.source)
    row_of_slot = place[chosen.source]
    return _Recomputed(
        part=_Part(hidden=rows, chosen=chosen, row_of_slot=row_of_slot, factor=None, low=low, sums=_RowSums()),
        wide=launch.widened(rows, low_rows(rows, head, form.variant)),
        state=moved,
        logit=logit.part(chosen.source),
        log_normaliser=moved.anchor + torch.log2(moved.normaliser),
    )


class _Sums:
    """Accumulates the gradients of all inputs, shard by shard and a block of columns at a time."""

    def __init__(self, form: Form, columns: Columns, head: LMHead, hidden: Tensor, needed: Needed) -> None:
        self._form, self._of_ranks, self._head, self._needed = form, columns, head, needed
        self._dtype = hidden.dtype
        dtype = torch.float32 if columns.shared else hidden.dtype  # rounded once, after the sum over ranks
        self._hidden = torch.zeros_like(hidden, dtype=dtype) if needed.hidden else None
        self._lent = False
        self._weight: Tensor | None = None
        self._mine: Tensor | None = None
        self._shards = columns.gradient_of_shards() if needed.weight else None
        self._columns: Tensor | None = None
        self._lora_a: Tensor | None = None

    def hidden_as_scratch(self) -> Tensor | None:
        """The hidden gradient's memory, as scratch until the last ``add_rows``; None if its dtype is not hidden's."""
        self._lent = self._hidden is not None and self._hidden.dtype == self._dtype
        return self._hidden if self._lent else None

    def open(self, shard: Shard) -> None:
        """Start a shard."""
        self.multiplied = operands(self._form, self._head, shard)
        self._weight = self._of_ranks.gradient_buffer(shard) if self._needed.weight else None

    def blocks(self, rows: int, width: int) -> Iterator[tuple[int, Tensor]]:
        """Blocks of the shard's columns in order: the first column of each, and scratch [rows, columns] for logit
        gradients.

        If the weight's gradient is large, the scratch is its end, which is written last. Memory is then allocated for
        the columns of the end only, in narrower blocks.
        """
        columns, weight, variant = len(self.multiplied.weight), self._weight, self._form.variant
        free = 0
        if weight is not None and not self._of_ranks.adds and variant.tma and weight.is_contiguous():
            lent = weight.view(-1).view(variant.kept)
            free = scratch_columns(rows * width, width, columns, len(lent))
            if free:
                scratch = lent[-rows * width :].view(rows, width)
                yield from ((first, scratch) for first in range(0, free, width))
                width = last_block_width(width, variant)
        scratch = torch.empty(rows, width, dtype=variant.kept, device=self.multiplied.weight.device)
        yield from ((first, scratch) for first in range(free, columns, width))

    def close(self, shard: Shard) -> None:
        """Finish a shard."""
        if self._weight is not None:
            if self._shards is None:
                self._mine = self._weight
            else:
                self._shards.add(self._weight, shard)
            self._weight = None

    def add_rows(self, part: _Part, k: Tensor, first: int) -> None:
        """Add the part of the shard's columns from ``first`` on to the gradients of hidden states and lora_a.

        Blocks come in order. Their sum is float32, and rounded once, with the last block.
        """
        multiplied, head, count, sums = self.multiplied, self._head, part.chosen.taken, part.sums
        variant = multiplied.variant
        block = slice(first, first + k.shape[1])
        among_all = slice(multiplied.first + block.start, multiplied.first + block.stop)
        last = among_all.stop >= len(head.weight)
        whole = last and among_all.start == 0
        before = None if among_all.start == 0 else sums.wide
        if head.lora_a is not None and head.lora_b is not None and (self._needed.hidden or self._needed.lora_a):
            narrow = _padded(head.lora_b[among_all].to(multiplied.product))
            low, sums.low = (None, _zeros(k, narrow)) if among_all.start == 0 else (sums.low, sums.low)
            assert sums.low is not None
            launch.row_product(k, narrow, sums.low, count, variant, base=low, whole=whole)
            if last:
                moved = (sums.low * head.lora_scale).to(variant.kept)[:, : len(head.lora_a)]
                if self._needed.lora_a:
                    added = _product(moved.T, part.hidden.to(variant.kept))
                    self._lora_a = added if self._lora_a is None else self._lora_a + added
                if self._needed.hidden:
                    added = _product(moved, head.lora_a.to(part.hidden.dtype).to(variant.kept))
                    before = added if before is None else before.add_(added)
        if self._hidden is None:
            return
        weight = multiplied.weight[block]
        if last:
            if self._lent:
                self._hidden.zero_()  # the gradient of rows that are left out
            launch.row_product(
                k, weight, self._hidden, count, variant, row_of_slot=part.row_of_slot, factor=part.factor, base=before,
                whole=whole,
            )  # fmt: skip
            sums.wide = None
        else:
            if sums.wide is None:
                sums.wide = torch.empty(len(k), weight.shape[1], dtype=torch.float32, device=k.device)
            launch.row_product(k, weight, sums.wide, count, variant, base=before)

    def add_columns(self, pieces: list[tuple[_Part, Tensor]], first: int) -> None:
        """Set the gradients of weight, lora_b and bias in the shard's rows from ``first`` on, from all parts."""
        block = slice(first, first + pieces[0][1].shape[1])
        among_all = slice(self.multiplied.first + block.start, self.multiplied.first + block.stop)
        if self._weight is not None:
            products = [(k, part.hidden, part.chosen.taken) for part, k in pieces]
            self._chain(products, self._weight[block], adds=self._of_ranks.adds)
        low = [(k, part.low, part.chosen.taken) for part, k in pieces if part.low is not None]
        if low:
            if self._columns is None:
                self._columns = _zeros(self._head.weight, low[0][1])
            self._chain(low, self._columns[among_all])

    def gradients(self) -> Gradients:
        """The complete gradients; those of replicated inputs are summed over ranks that share the vocabulary."""
        head, columns = self._head, self._columns
        rank = 0 if head.lora_b is None else head.lora_b.shape[1]
        mine = self._mine if self._shards is None else self._shards.mine()
        for partial in (self._hidden, self._lora_a):
            if partial is not None:
                self._of_ranks.summed(partial)
        return Gradients(
            hidden=None if self._hidden is None else self._hidden.to(self._dtype),
            weight=self._of_ranks.as_weight(mine) if self._needed.weight else None,
            bias=_like(head.bias, None if columns is None else columns[:, rank]) if self._needed.bias else None,
            lora_a=_like(head.lora_a, self._lora_a) if self._needed.lora_a else None,
            lora_b=_like(head.lora_b, None if columns is None else columns[:, :rank]) if self._needed.lora_b else None,
        )

    def _chain(self, products: list[tuple[Tensor, Tensor, Tensor]], out: Tensor, *, adds: bool = False) -> None:
        """``out = sum k.T @ h`` over all (k, h, taken), rounded once; with ``adds``, ``out +=`` that."""
        base = out if adds else None
        for k, h, taken in products[:-1]:
            wide = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
            launch.column_product(k, h, wide, taken, self._form.variant, base=base)
            base = wide
        k, h, taken = products[-1]
        launch.column_product(k, h, out, taken, self._form.variant, base=base)


def _by_row(value: float, temperature: float | Tensor, hidden: Tensor) -> Tensor:
    """[N] float32 value / temperature."""
    if isinstance(temperature, Tensor):
        return value / temperature.float()
    return torch.full((len(hidden),), value / temperature, dtype=torch.float32, device=hidden.device)


def _counted_from(first: int, target: Tensor) -> Tensor:
    return target - first if first else target


def _like(value: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return None if value is None or gradient is None else gradient.to(value.dtype)


def _addends(dtype: torch.dtype) -> int:
    """How many numbers of this dtype represent a float32, as their sum, to about its precision."""
    return 1 if dtype == torch.float32 else 2


def low_rows(hidden: Tensor, head: LMHead, variant: Variant) -> Tensor | None:
    """With LoRA, ``lora_scale * hidden @ lora_a.T`` as addends in hidden's dtype, side by side."""
    if head.lora_a is None:
        return None
    lora_a = head.lora_a.to(hidden.dtype).contiguous()
    return launch.low_rows(hidden, lora_a, head.lora_scale, variant, addends=_addends(hidden.dtype))


def _low_columns(hidden: Tensor, factor: Tensor | None, chosen: Compaction, head: LMHead, form: Form) -> Tensor:
    """Factors of the gradients of lora_b and bias, by slot; 0 in free slots.

    ``lora_scale * hidden @ lora_a.T``, where hidden includes the part's factor, and beside it the factor.
    """
    taken = torch.arange(len(hidden), device=hidden.device) < chosen.taken
    ones = taken.float() if factor is None else torch.where(taken, factor, 0.0)
    columns = [ones[:, None]]
    if head.lora_a is not None:
        low_a = head.lora_a.to(form.product).to(hidden.dtype)
        columns.insert(0, head.lora_scale * _product(hidden, low_a.T))
    return _padded(torch.cat(columns, 1).to(form.variant.kept))


def _side_by_side(columns: list[Tensor], *, align: int) -> Tensor:
    """Matrices side by side, with zero columns up to a multiple of ``align``."""
    width = sum(c.shape[1] for c in columns)
    if -width % align:
        columns = [*columns, columns[0].new_zeros(len(columns[0]), -width % align)]
    return torch.cat(columns, dim=1)


def _padded(matrix: Tensor) -> Tensor:
    """The matrix with zero columns up to a power of two, at least 16, which a tile can have."""
    width = matrix.shape[1]
    return pad(matrix, (0, max(16, 1 << (width - 1).bit_length()) - width)).contiguous()


def _zeros(rows: Tensor, columns: Tensor) -> Tensor:
    return torch.zeros(len(rows), columns.shape[1], dtype=torch.float32, device=rows.device)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32."""
    if a.dtype == torch.float32 or a.device.type != "cuda":
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


def block_width(rows: int, width: int, vocabulary: int, *, variant: Variant) -> int:
    """Columns of a block of logit gradients: about BLOCK_BYTES, or fewer to fill rounds of the grid."""
    tile, step = variant.weight, variant.score.columns
    across = -(-width // tile.columns)
    most = max(step, BLOCK_BYTES // (rows * variant.kept.itemsize) // step * step)
    rounds = most * across / (tile.rows * variant.programs)
    filling = int(rounds) * variant.programs // across * tile.rows // step * step
    chosen = most if rounds > MIN_FILL * math.ceil(rounds) or filling < step else filling
    return min(chosen, -(-vocabulary // step) * step)


def scratch_columns(size: int, width: int, columns: int, gradient: int) -> int:
    """Columns, in whole blocks, that can use the last ``size`` of ``gradient`` entries of the weight's gradient.

    Those whose own entries come before. 0 if the gradient is not SCRATCH_RATIO times as large as ``size``.

    Example:
        >>> scratch_columns(16384 * 6144, 6144, 128256, 128256 * 8192)
        110592
    """
    if SCRATCH_RATIO * size > gradient:
        return 0
    return (columns - -(-columns * size // gradient)) // width * width


def last_block_width(width: int, variant: Variant) -> int:
    """Columns of the last blocks, whose logit gradients need memory of their own."""
    return max(variant.score.columns, width // 4 // variant.score.columns * variant.score.columns)
