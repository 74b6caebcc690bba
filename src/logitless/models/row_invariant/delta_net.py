"""Gated delta nets over packed rows and in decoding, bitwise identical: convolution, gated delta rule and gated norm.

The rule runs in chunks of ``CHUNK`` positions of a sequence (``kernels/delta_forward.py``). A completion that shares
its prompt begins inside a chunk. It starts with the state at that chunk's beginning and with copies of the prompt's
rows since then, whose results have the same bits. ``DeltaRows`` arranges these copies. Gradients of copied rows, and of
the states that sequences share, are summed in a fixed order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logitless.errors import InputError
from logitless.float32_sums import gradient_dtype
from logitless.models.activations import recipes_are_kept
from logitless.models.attention import AttentionLayout
from logitless.models.kernels.convolution import convolution, convolution_backward, convolution_step
from logitless.models.kernels.delta_gates import (
    decay_and_beta,
    decay_and_beta_backward,
    gated_norm,
    gated_norm_backward,
)
from logitless.models.kernels.delta_launch import (
    Chunks,
    DeltaCache,
    DeltaTiles,
    Inner,
    Segment,
    backward,
    delta_step,
    forward,
    tiles_of,
)
from logitless.models.one_node import refuse_twice
from logitless.models.repeated_rows import RepeatedRows
from logitless.models.row_invariant.functions import can_be_recomputed_together
from logitless.transfer import sent

CHUNK = 64


@dataclass(frozen=True)
class DeltaForm:
    """The configuration of a gated delta net.

    Args:
        key_heads, heads: H and HV, which H divides.
        key_width, width: K and V, powers of two from 16 on.
        taps: of the convolution.
        eps: of the gated norm.
    """

    key_heads: int
    heads: int
    key_width: int
    width: int
    taps: int
    eps: float

    @classmethod
    def of(cls, mixer: Any) -> "DeltaForm":
        return cls(
            mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim, mixer.conv_kernel_size,
            float(mixer.norm.variance_epsilon),
        )  # fmt: skip

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """Widths of the layer's products: convolved rows, gate, b and a."""
        return self.channels, self.heads * self.width, self.heads, self.heads

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_width + self.heads * self.width

    def split(self, rows: Float[Tensor, "T D"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [T, H, K] and values [T, HV, V]."""
        keys = self.key_heads * self.key_width
        query, key, value = rows.split((keys, keys, self.heads * self.width), 1)  # type: ignore[no-untyped-call]
        return (
            query.unflatten(1, (self.key_heads, -1)),
            key.unflatten(1, (self.key_heads, -1)),
            value.unflatten(1, (self.heads, -1)),
        )


class DeltaWeights(NamedTuple):
    """Weights of a gated delta net beside its products.

    Args:
        convolution: [D, 1, taps].
        a_log, dt_bias: [HV].
        norm: [V].
    """

    convolution: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor

    @classmethod
    def of(cls, mixer: Any) -> "DeltaWeights":
        return cls(mixer.conv1d.weight, mixer.A_log, mixer.dt_bias, mixer.norm.weight)


@dataclass(frozen=True)
class DeltaRows:
    """A packed row with copies of shared rows. Build it with ``of``.

    Args:
        chunks: of the rows with copies.
        age: [U] int32: rows of its piece before each row.
        repeated: for each row, the row of the pass; None: the same rows.
        own: [T] for each row of the pass, its place among the rows with copies.
    """

    chunks: Chunks
    age: Int[Tensor, "U"]
    repeated: RepeatedRows | None = None
    own: Int[Tensor, "T"] | None = None

    @classmethod
    def of(cls, layout: AttentionLayout, taps: int) -> "DeltaRows":
        """The rows of a layout, cached in it for all layers and passes."""
        found: DeltaRows = layout.kept(("delta", taps), lambda: _Laying(taps).rows(layout))
        return found

    def taken(self, x: Float[Tensor, "T *rest"]) -> Float[Tensor, "U *rest"]:
        """``x`` with copies of shared rows."""
        return x if self.repeated is None else x.index_select(0, self.repeated.index)

    def summed(self, grad: Float[Tensor, "U *rest"]) -> Float[Tensor, "T *rest"]:
        """The gradient of ``taken``."""
        if self.repeated is None or self.own is None:
            return grad
        return self.repeated.summed(grad, len(self.own))


class _Laying:
    """Arranges the pieces of prefix trees as segments that begin with a chunk."""

    def __init__(self, taps: int) -> None:
        self.taps = taps
        self.segments: list[Segment] = []
        self.index: list[Tensor] = []  # rows of the pass
        self.age: list[Tensor] = []
        self.own: list[Tensor] = []
        self.length = 0
        self.every_row = True
        self.num_states = 0

    def rows(self, layout: AttentionLayout) -> DeltaRows:
        behind = {-1: -1}  # by first row of a piece: the state with which its children begin
        for piece in layout.pieces:
            prefix = sum(length for _, length in piece.sees)
            rest = prefix % CHUNK
            copies = min(prefix, rest + self.taps - 1)
            self.every_row &= copies == rest
            start = self._add(piece.seen_rows[prefix - copies :], piece.row, piece.length)
            before = behind[piece.sees[-1][0] if piece.sees else -1]
            behind[piece.row] = self._lay(
                start + copies - rest, prefix - rest, prefix + piece.length, before, piece.is_prompt
            )
        used = sum(len(own) for own in self.own)
        if layout.num_tokens > used:
            start = self._add(torch.arange(0), used, layout.num_tokens - used)
            self._lay(start, 0, layout.num_tokens - used, -1, False)
        chunks = Chunks.laid(self._with_gradients(), CHUNK, layout.device, every_row=self.every_row)
        age, index = torch.cat(self.age).int(), torch.cat(self.index)
        if len(index) == layout.num_tokens:
            return DeltaRows(chunks, sent(age, layout.device))
        return DeltaRows(
            chunks, sent(age, layout.device), RepeatedRows.of(index).to(layout.device),
            sent(torch.cat(self.own), layout.device),
        )  # fmt: skip

    def _add(self, copies: Tensor, row: int, length: int) -> int:
        """Append copies of rows, then new rows; returns where they start."""
        start = self.length
        self.index += [copies, torch.arange(row, row + length)]
        self.length += len(copies) + length
        self.own.append(torch.arange(self.length - length, self.length))
        self.age.append(torch.arange(self.length - start))
        return start

    def _lay(self, token: int, start: int, stop: int, before: int, followed: bool) -> int:
        """Append the segments of a piece; returns the state with which later pieces begin."""
        whole = stop // CHUNK * CHUNK
        if followed and whole > start:
            after, self.num_states = self.num_states, self.num_states + 1
            self.segments.append(Segment(token, start, whole, before, after=after))
            token, start, before = token + whole - start, whole, after
        if stop > start:
            self.segments.append(Segment(token, start, stop, before))
        return before

    def _with_gradients(self) -> list[Segment]:
        """The segments with levels and places of gradients; those of one state are adjacent."""
        makers = {each.after: n for n, each in enumerate(self.segments) if each.after >= 0}
        followers: dict[int, list[int]] = {state: [] for state in makers}
        for n, each in enumerate(self.segments):
            if each.before >= 0:
                followers[each.before].append(n)
        found, count = list(self.segments), 0
        for state, maker in makers.items():
            found[maker] = found[maker]._replace(following=count, num_following=len(followers[state]))
            for n in followers[state]:
                found[n] = found[n]._replace(gradient=count)
                count += 1
        for n, each in enumerate(found):  # a state is made by a segment before those that begin with it
            if each.before >= 0:
                found[n] = each._replace(level=found[makers[each.before]].level + 1)
        return found


class HeadsApart(torch.autograd.Function):
    """Qwen3.5's order of columns from the products of Qwen3-Next, which groups them by key head."""

    @staticmethod
    def forward(ctx: Any, qkvz: Tensor, ba: Tensor, form: DeltaForm) -> tuple[Tensor, ...]:
        ctx.form = form
        values = form.heads // form.key_heads * form.width
        widths, of_heads = [form.key_width, form.key_width, values, values], (len(ba), form.key_heads, -1)
        heads = torch.split(qkvz.view(of_heads), widths, 2)  # type: ignore[no-untyped-call]
        query, key, value, gate = (each.flatten(1) for each in heads)
        b, a = (each.flatten(1) for each in ba.view(of_heads).chunk(2, 2))
        return torch.cat((query, key, value), 1), gate, b, a

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        refuse_twice()
        mixed, *rest = grads
        by_head = [x.reshape(len(x), ctx.form.key_heads, -1) for x in (*ctx.form.split(mixed), *rest)]
        return torch.cat(by_head[:4], 2).flatten(1), torch.cat(by_head[4:], 2).flatten(1), None


class Convolved(torch.autograd.Function):
    """Queries, keys and values with copies, from the products of the layer's input."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, weight: Tensor, rows: DeltaRows, form: DeltaForm
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(mixed, weight)
        ctx.rows, ctx.weight_dtype = rows, gradient_dtype(weight)
        convolved = _convolved(mixed, weight, rows, form)
        if recipes_are_kept():
            can_be_recomputed_together(convolved, partial(_convolved, mixed.detach(), weight.detach(), rows, form))
        return convolved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_twice()
        mixed, weight = ctx.saved_tensors
        rows, grad = ctx.rows, torch.cat([each.flatten(1) for each in grads], 1)
        of_mixed, of_weight = convolution_backward(rows.taken(mixed), weight.flatten(1), rows.age, grad)
        return rows.summed(of_mixed), of_weight.view_as(weight).to(ctx.weight_dtype), None, None


def _convolved(mixed: Tensor, weight: Tensor, rows: DeltaRows, form: DeltaForm) -> tuple[Tensor, Tensor, Tensor]:
    return form.split(convolution(rows.taken(mixed), weight.flatten(1), rows.age))


class DecayAndBeta(torch.autograd.Function):
    """Log-decays and beta [U, HV] float32 with copies, from the products of the layer's input."""

    @staticmethod
    def forward(
        ctx: Any, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, rows: DeltaRows
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(b, a, a_log, dt_bias)
        ctx.rows, ctx.dtypes = rows, (gradient_dtype(a_log), gradient_dtype(dt_bias))
        log_decay, beta = decay_and_beta(a, b, a_log, dt_bias)
        return rows.taken(log_decay), rows.taken(beta)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_twice()
        b, a, a_log, dt_bias = ctx.saved_tensors
        summed = [ctx.rows.summed(grad).contiguous() for grad in grads]
        of_a, of_b, of_rate, of_bias = decay_and_beta_backward(a, b, a_log, dt_bias, *summed)
        return of_b, of_a, of_rate.to(ctx.dtypes[0]), of_bias.to(ctx.dtypes[1]), None


class DeltaRule(torch.autograd.Function):
    """The rule [T, HV, V], from queries and keys that it normalises; states are recomputed in the backward.

    ``own`` selects the wanted rows among those with copies.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, chunks: Chunks,
        own: Tensor | None = None, tiles: DeltaTiles | None = None,
    ) -> Tensor:  # fmt: skip
        ctx.chunks, ctx.own, ctx.tiles = chunks, own, tiles or tiles_of(value.device)
        out, made = forward(query, key, value, log_decay, beta, chunks, ctx.tiles)
        ctx.save_for_backward(query, key, value, beta, *made)
        return out if own is None else out.index_select(0, own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_twice()
        query, key, value, beta, *made = ctx.saved_tensors
        if ctx.own is not None:
            grad = grad.new_zeros(value.shape).index_copy_(0, ctx.own, grad)
        grads = backward(query, key, value, beta, Inner(*made), grad, ctx.chunks, ctx.tiles)
        return *grads, *(None,) * (len(ctx.needs_input_grad) - 5)


class GatedNorm(torch.autograd.Function):
    """``norm(x) * silu(gate)`` for each head."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps, ctx.weight_dtype = eps, gradient_dtype(weight)
        return gated_norm(x, gate, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_twice()
        x, gate, weight = ctx.saved_tensors
        grad_x, grad_gate, of_weight = gated_norm_backward(x, gate, weight, ctx.eps, grad.contiguous())
        return grad_x, grad_gate, of_weight.to(ctx.weight_dtype), None


# --- prefill and decoding ---------------------------------------------------------------------------------------------


class DeltaSlots(NamedTuple):
    """What one layer keeps of each sequence to continue it, by slot.

    Args:
        history: [S, taps - 1, D] the last inputs of the convolution, zeros before a sequence's start.
        cache: of the rule.
    """

    history: Float[Tensor, "S past D"]
    cache: DeltaCache

    @classmethod
    def empty(cls, slots: int, form: DeltaForm, dtype: torch.dtype, device: torch.device | str) -> "DeltaSlots":
        """Slots of sequences without tokens."""
        heads = (form.key_heads, form.heads, form.key_width, form.width)
        return cls(
            torch.zeros(slots, form.taps - 1, form.channels, dtype=dtype, device=device),
            DeltaCache.empty(slots, *heads, size=CHUNK, dtype=dtype, device=device),
        )


class DecodedStates(NamedTuple):
    """The slots of a step's rows. All int32 on the device; contents may change between two replays of a graph.

    Args:
        slot: [R] of each row; -1 for a row without a query.
        row: [R] its token's place in the chunk.
        place: [R] ``slot * CHUNK + row``; -1 for a row without a query.
    """

    slot: Int[Tensor, "R"]
    row: Int[Tensor, "R"]
    place: Int[Tensor, "R"]

    @classmethod
    def of(cls, slot: Int[Tensor, "R"], position: Int[Tensor, "R"]) -> "DecodedStates":
        """The states of rows, from the slot and the position of each; the position is -1 without a query.

        Example:
            >>> DecodedStates.of(torch.tensor([3, 1]), torch.tensor([-1, 65])).place.tolist()
            [-1, 65]
        """
        live, row = position >= 0, position.clamp(min=0) % CHUNK
        slot = torch.where(live, slot, -1).int()
        return cls(slot, row.int(), torch.where(live, slot * CHUNK + row, -1).int())


@dataclass(frozen=True)
class PrefilledStates:
    """Chunks of sequences, end to end, that continue slots. Build it with ``of``.

    Args:
        chunks: of the rule; states before and after are slots.
        slot: [C] slot of each chunk.
        index: [U] for each row after its sequence's last inputs, its number among the T rows and those inputs.
        age: [U] as in ``DeltaRows``.
        last: [C, taps - 1] the rows of U that are the next last inputs; -1 for zeros.
    """

    chunks: Chunks
    slot: Int[Tensor, "C"]
    index: Int[Tensor, "U"]
    age: Int[Tensor, "U"]
    last: Int[Tensor, "C past"]

    @classmethod
    def of(cls, chunks: Sequence[tuple[int, int, int]], taps: int, device: torch.device | str) -> "PrefilledStates":
        """From (first position, length, slot) of each chunk.

        Raises:
            InputError: a chunk starts inside a chunk of ``CHUNK`` positions, or two have the same slot.
        """
        if any(start % CHUNK for start, _, _ in chunks) or len({slot for *_, slot in chunks}) < len(chunks):
            raise InputError(
                needed=f"chunks that start at multiples of {CHUNK}, each of another sequence",
                given=f"first positions {[start for start, _, _ in chunks][:8]}",
                remedy=f"Prefill prompts in multiples of {CHUNK} tokens, but to their end.",
            )
        past, tokens = taps - 1, sum(length for _, length, _ in chunks)
        segments, index, age, last = [], [], [], []
        at = token = 0
        for n, (start, length, slot) in enumerate(chunks):
            have = past if start else 0
            index += [torch.arange(have) + tokens + n * past, torch.arange(token, token + length)]
            age.append(torch.arange(have + length))
            segments.append(Segment(at + have, start, start + length, before=slot if start else -1, after=slot))
            at, token = at + have + length, token + length
            ends = torch.arange(at - past, at)
            last.append(torch.where(ends < at - have - length, -1, ends))
        parts = [torch.tensor([slot for *_, slot in chunks]), torch.cat(index), torch.cat(age), torch.cat(last)]
        slot_of, where, ages, lasts = sent(torch.cat(parts), device).split([len(part) for part in parts])  # type: ignore[no-untyped-call]
        return cls(Chunks.laid(segments, CHUNK, device), slot_of, where, ages.int(), lasts.view(-1, past))


def stepped(
    slots: DeltaSlots,
    states: DecodedStates,
    form: DeltaForm,
    weights: DeltaWeights,
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
) -> Float[Tensor, "R HV V"]:  # fmt: skip
    """One token of each row; bitwise its row of a packed row."""
    convolved = convolution_step(mixed, weights.convolution.flatten(1), slots.history, states.slot)
    log_decay, beta = decay_and_beta(a, b, weights.a_log, weights.dt_bias)
    return delta_step(*form.split(convolved), log_decay, beta, slots.cache, *states)


def prefilled(
    slots: DeltaSlots, states: PrefilledStates, form: DeltaForm, weights: DeltaWeights, mixed: Tensor, b: Tensor,
    a: Tensor,
) -> Float[Tensor, "T HV V"]:  # fmt: skip
    """Chunks of sequences; bitwise their rows of packed rows."""
    before = slots.history[states.slot].flatten(0, 1)
    rows = torch.cat([mixed, before]).index_select(0, states.index)
    convolved = convolution(rows, weights.convolution.flatten(1), states.age)
    own = states.index < len(mixed)
    here = torch.where(own, states.index, 0)
    log_decay, beta = decay_and_beta(a, b, weights.a_log, weights.dt_bias)
    out, _ = forward(
        *form.split(convolved), log_decay.index_select(0, here), beta.index_select(0, here), states.chunks,
        tiles_of(mixed.device), cache=slots.cache,
    )  # fmt: skip
    past = rows[states.last.clamp(min=0)]
    slots.history[states.slot] = torch.where((states.last >= 0)[..., None], past, torch.zeros_like(past))
    back = torch.empty(len(mixed) + len(before), dtype=torch.long, device=mixed.device)
    back[states.index] = torch.arange(len(states.index), device=mixed.device)
    return out.index_select(0, back[: len(mixed)])
