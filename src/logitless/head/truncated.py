"""The divergence from a teacher of which only the largest log-probs of each token are known, as a server gives them.

Both distributions are compared over the given tokens and one bucket for all others. The student's part of it is exact
and needs no logits [N, V]: of each tile the given tokens' logits are kept, and the others' exponentials are summed.
The probability of the others is never 1 minus that of the given tokens, which would lose it in rounding.
"""

from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logitless.errors import InputError, UnavailableError
from logitless.head import reference, sharded
from logitless.head.blockwise import (
    Call,
    HeadBlock,
    Rows,
    at,
    blocks,
    call_of,
    gradients,
    in_all_rows,
    logits_and_tanh,
    logits_of,
    of_product,
    product,
    rows_of,
    scales,
    slices,
    tile,
)
from logitless.head.contract import checked, logits_dtype, refuse_budget, require, without_autocast
from logitless.head.divergence import measure_of
from logitless.head.divergence_reference import value_of
from logitless.second_derivative import refuse_second_derivative
from logitless.types import Divergence, LMHead, TruncatedDivergence

LEAST_TAIL = 2.0**-20
"""The teacher's tail counts as at least this. It is 1 minus a sum of probabilities whose log-probs, of up to some ten
nats, were rounded to float32: what is smaller is rounding."""


def truncated_divergence(
    hidden: Float[Tensor, "N D"],
    head: LMHead | Float[Tensor, "V D"],
    ids: Int[Tensor, "N K"],
    logp_teacher: Float[Tensor, "N K"],
    *,
    kind: Divergence,
    beta: float | None = None,
    temperature: float | Float[Tensor, "N"] = 1.0,
    backend: Literal["auto", "reference", "chunked", "fused"] = "auto",
    memory_budget: int | None = None,
) -> TruncatedDivergence:
    """The divergence of each token's next-token distribution from a teacher's, over K tokens and the tail.

    The tail is all other tokens together. With p and q the student's and the teacher's probabilities of these K + 1
    events, the kinds are those of ``token_divergence``. Each is a lower bound of the exact one over the vocabulary
    (data processing: no f-divergence grows when events are merged), and equal to it if the tail is one token.

    Gradient: of ``divergence``, to the student's hidden, weight, bias and LoRA factors that require grad; exactly 0
    from rows whose incoming gradient is 0. In the tail it keeps the ratios of the student's probabilities. None to
    the teacher and the temperature.

    Sharded weights (FSDP2): as for ``token_scores``; all ranks call it and run backward together.

    Args:
        hidden, head, temperature: as for ``token_divergence``.
        ids: [N, K] different tokens in each row, in range(V), with K < V.
        logp_teacher: [N, K] nats, of the teacher at its own temperature.
        kind, beta: as for ``token_divergence``.
        backend: ``reference`` or ``chunked``, which ``auto`` takes on every device; ``fused`` has no kernel for it.
        memory_budget: bytes for values of size rows x V; None takes the backend's default.

    Returns:
        float32 vectors of length N (float64 for float64 hidden states).

    Raises:
        InputError: arguments that do not fit together; a token out of range or twice in a row (on CUDA: a device-side
            assertion).
        UnavailableError: a named backend that cannot run here; a second derivative, but of ``reference``.

    Equals: with all logits, ``value_of`` of their log-softmax at ``ids`` and the log of the rest.
    Memory: as ``token_scores`` with ``chunked``, and ``N (K + 1)`` numbers.
    Products, of 2 N V D operations: one in the forward; in the backward one, and one each for hidden and weight.
    Determinism: bitwise repeatable.

    Example:
        >>> weight = torch.zeros(4, 1)  # p = 1/4 each; q = 1/2, and 1/2 for the others
        >>> found = truncated_divergence(
        ...     torch.ones(1, 1), weight, torch.tensor([[2]]), torch.tensor([[0.5]]).log(), kind="total_variation")
        >>> found.divergence, found.tail, found.tail_teacher
        (tensor([0.2500]), tensor([0.7500]), tensor([0.5000]))
    """
    measure = measure_of(kind, beta)
    if backend == "fused" or backend not in ("auto", "reference", "chunked"):
        raise UnavailableError(
            needed="a backend 'auto', 'reference' or 'chunked' of a truncated divergence",
            given=repr(backend),
            remedy="Leave it at 'auto'.",
        )
    lm_head, temperature = _checked(hidden, head, ids, logp_teacher, temperature, memory_budget)
    ids = ids.long()
    wide = logits_dtype(hidden.dtype)
    log_q = with_tail(logp_teacher.detach().to(wide))
    with without_autocast(hidden.device):
        entries = _entries(hidden, lm_head, ids, temperature, backend, memory_budget)
        log_p = entries.log_softmax(1)
        value = value_of(log_p, log_q, measure)
    return TruncatedDivergence(value, log_p[:, -1].detach().exp(), log_q[:, -1].exp())


def _checked(
    hidden: Tensor,
    head: LMHead | Tensor,
    ids: Tensor,
    logp_teacher: Tensor,
    temperature: float | Tensor,
    memory_budget: int | None,
) -> tuple[LMHead, float | Tensor]:
    if ids.dim() != 2 or ids.shape[-1] < 1 or logp_teacher.shape != ids.shape:
        raise InputError(
            needed="ids and logp_teacher [N, K] of the same K tokens a row",
            given=f"{list(ids.shape)} and {list(logp_teacher.shape)}",
            remedy="Give the K largest log-probs of the teacher for each token.",
        )
    lm_head, _, own_temperature = checked(hidden, head, ids[:, 0], temperature=temperature, memory_budget=memory_budget)
    vocabulary = len(lm_head.weight)
    if ids.shape[1] >= vocabulary:
        raise InputError(
            needed=f"fewer than {vocabulary} tokens a row, so that others are left for the tail",
            given=str(ids.shape[1]),
            remedy="Ask the teacher for fewer log-probs.",
        )
    in_order = ids.sort(1).values
    require(
        (in_order[:, 0] >= 0) & (in_order[:, -1] < vocabulary) & (in_order.diff() > 0).all(1),
        needed=f"different tokens in range({vocabulary}) in each row of ids",
        given="one outside of it, or one twice",
        remedy="Compare the tokenizers: what pads the teacher's vocabulary is never among its likely tokens.",
    )
    return lm_head, own_temperature


def with_tail(logp: Float[Tensor, "N K"]) -> Float[Tensor, "N L"]:
    """Log-probs of some tokens with that of all others as a last column; at least the log of ``LEAST_TAIL``.

    Example:
        >>> with_tail(torch.tensor([[0.5, 0.25]]).log()).exp()
        tensor([[0.5000, 0.2500, 0.2500]])
    """
    tail = (1 - logp.double().exp().sum(1, keepdim=True)).clamp(min=LEAST_TAIL)
    return torch.cat([logp, tail.log().to(logp)], 1)


def _entries(
    hidden: Tensor,
    head: LMHead,
    ids: Tensor,
    temperature: float | Tensor,
    backend: str,
    memory_budget: int | None,
) -> Tensor:
    """[N, K + 1] the given tokens' logits, and the logsumexp of all others."""
    if backend == "reference":
        refuse_budget(memory_budget)
        z = reference.logits(hidden, head, temperature)
        return torch.cat([z.gather(1, ids), z.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)], 1)
    call, outside = call_of(hidden, head, temperature, memory_budget, one_pass=False)
    found: Tensor = _Entries.apply(hidden, *HeadBlock.of(head), ids, outside, call)  # type: ignore[no-untyped-call]
    return found


class _Entries(torch.autograd.Function):
    """[N, K + 1] of (hidden, weight, bias, lora_a, lora_b, ids, outside, call)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None,
        ids: Tensor, outside: Tensor | None, call: Call,
    ) -> Tensor:  # fmt: skip
        head = HeadBlock(weight, *map(sharded.whole, (bias, lora_a, lora_b)))
        with without_autocast(hidden.device):
            rows = rows_of(hidden, head, ids, outside, call)
            given = torch.empty(ids.shape, dtype=call.wide, device=hidden.device)
            tails = list[Tensor]()  # of each block of columns
            size = tile(len(ids), len(weight), call.wide, call.memory_budget)
            for first, block in blocks(head, size.columns, call):
                tails.append(given.new_empty(len(ids)))
                for some in slices(len(ids), size.rows):
                    cut = rows.cut(some, first)
                    z = logits_of(product(cut, block, call), cut, call)
                    places = _places(cut.target, z.shape[1])
                    given[some][places.row, places.slot] = z[places.row, places.column]
                    z[places.row, places.column] = -torch.inf
                    torch.logsumexp(z, 1, out=tails[-1][some])
            tail = torch.stack(tails).logsumexp(0)
        ctx.call = call
        ctx.save_for_backward(hidden, bias, lora_a, lora_b, *head, ids, outside, tail)
        return torch.cat([given, tail[:, None]], 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivative("a truncated divergence", given="backend='chunked'", remedy="Use backend='reference'.")
        hidden, bias, lora_a, lora_b, weight, *whole, ids, outside, tail = ctx.saved_tensors
        head, call = HeadBlock(weight, *whole), ctx.call
        nonzero = (gradient != 0).any(1).nonzero().squeeze(1)
        with without_autocast(hidden.device):
            gradient, ids, outside, tail = at(nonzero, gradient, ids, outside, tail)
            rows = rows_of(hidden[nonzero], head, ids, outside, call)
            divisor, factor = scales(gradient.abs().amax(1), outside, call)
            tail = tail.clamp(min=torch.finfo(tail.dtype).min)  # where all tokens of the tail have logits of -inf
            slopes = _Gradient(rows, gradient / divisor[:, None], tail, factor, call)
            of_tiles = tile(len(ids), len(weight), call.wide, call.memory_budget)
            of_rows, *of_head = gradients(head, rows, slopes, ctx.needs_input_grad[:5], call, of_tiles)
            of_hidden = in_all_rows(of_rows, nonzero, hidden)
        of_weight, *small = of_head
        summed = [sharded.summed_like(g, x) for g, x in zip(small, (bias, lora_a, lora_b), strict=True)]
        return (of_hidden, None if of_weight is None else of_weight.to(weight.dtype), *summed, None, None, None)


class _Gradient(NamedTuple):
    """``LogitGradient`` of the entries: that of a given token at the token, that of the tail by its softmax.

    Args:
        rows: with ``target`` [n, K].
        slopes: [n, K + 1] incoming gradients, divided as ``scales`` says.
        tail: [n] the last entry.
        factor: [n] their common factor, times the derivative of scale and temperature.
    """

    rows: Rows
    slopes: Tensor
    tail: Tensor
    factor: Tensor
    call: Call

    def of_tile(self, rows: slice, first_column: int, block: HeadBlock, *, wide: bool) -> tuple[Tensor, Tensor]:
        del wide
        cut, slopes, call = self.rows.cut(rows, first_column), self.slopes[rows], self.call
        z, tanh = logits_and_tanh(product(cut, block, call), cut, call)
        u = z.sub_(self.tail[rows, None]).exp_().mul_(slopes[:, -1:])
        places = _places(cut.target, u.shape[1])
        u[places.row, places.column] = slopes[places.row, places.slot]
        return of_product(u, tanh, call)


class _Places(NamedTuple):
    """Where a tile holds given tokens: rows and columns of the tile, and which of the row's tokens they are."""

    row: Tensor
    column: Tensor
    slot: Tensor


def _places(ids: Tensor, columns: int) -> _Places:
    """Where ids [n, K], relative to the tile's first column, are in the tile; waits for a GPU."""
    row, slot = ((ids >= 0) & (ids < columns)).nonzero(as_tuple=True)
    return _Places(row, ids[row, slot], slot)
