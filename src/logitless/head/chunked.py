"""The chunked backend: blocks of the vocabulary, on any device, within a memory budget.

Equal to ``reference`` to rounding. Slower than ``fused``: forward and backward each compute the logits (four matrix
products). A tile of logits is processed in torch, or on a GPU with Triton by one kernel (``kernels/tiles.py``).
"""

import functools
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from logitless.distributed.sharding import is_sharded
from logitless.head import sharded, vocab_parallel
from logitless.head.blockwise import (
    FLOOR,
    Call,
    HeadBlock,
    Rows,
    Scored,
    anchor,
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
    scored,
    slices,
    tile,
    write_target,
)
from logitless.head.contract import without_autocast
from logitless.head.vocab_parallel import Partial, merged
from logitless.installed import without_triton
from logitless.second_derivative import refuse_second_derivative
from logitless.types import LMHead, TokenScores


def token_scores(
    hidden: Float[Tensor, "N D"],
    head: LMHead,
    target: Int[Tensor, "N"],
    *,
    temperature: float | Float[Tensor, "N"] = 1.0,
    memory_budget: int | None = None,
    group: ProcessGroup | None = None,
) -> TokenScores:
    """Log-probability of each target and entropy of each distribution, a block of the vocabulary at a time.

        S = sum_{v != y} exp(z_v - max z);   d = z_y - max z
        logp = d - log(S + e^d), written d - log1p(S + expm1(d)) so that it is exact when p_y is nearly 1

    Gradient: to hidden, weight, bias and LoRA factors that require grad, for rows whose incoming gradient is not zero
    (finding them synchronizes once). It cannot be differentiated again.

    Args:
        hidden, target, temperature: as for ``api.token_scores``, checked.
        head: the weights; shapes as checked by ``contract.checked``.
        memory_budget: bytes for temporaries of size rows x columns; by default 256 MiB off CUDA and a 32nd of the
            device's memory on CUDA. Tile sizes depend on it, and with them the last bits of results.
        group: the process group over which the vocabulary is sharded (see ``vocab_parallel``).

    Raises:
        UnavailableError: the backward runs under ``create_graph=True``.

    Equals: ``reference.token_scores``.
    Memory: ``memory_budget``, but no less than three tiles of 16 x 512; in the backward ``4 N D`` bytes for hidden's
        gradient, and a scaled copy of hidden if the weight is trained.
    Accumulation: float32 or wider. Off CUDA, float16 and bfloat16 operands are multiplied in float32.
    Determinism: bitwise repeatable. A NaN stays in its row, except in the weight's gradient.
    """
    call, outside = call_of(hidden, head, temperature, memory_budget, one_pass=_has_kernels(hidden.device), group=group)
    logp, entropy = _TokenScores.apply(hidden, *HeadBlock.of(head), target, outside, call)  # type: ignore[no-untyped-call]
    return TokenScores(logp=logp, entropy=entropy)


class _Slopes(NamedTuple):
    """Values of each row with a gradient, for the backward.

    The gradient of the products' output is ``factor * u``:

        u_v = (grad_logp + grad_entropy (z_v - top + offset)) exp(z_v - top) over   (v != y),   u_y = at_target

    Args:
        top: the maximum that exponentials are relative to.
        over: -1 / sum_v exp(z_v - top).
        offset: entropy - log sum_v exp(z_v - top).
        at_target: u_y, computed from the other columns' sum so that it is exact when p_y is nearly 1.
        grad_logp, grad_entropy, factor: the incoming gradients, None for none, divided as ``scales`` says, and what u
            lacks then.
    """

    top: Tensor
    over: Tensor
    offset: Tensor
    at_target: Tensor
    grad_logp: Tensor | None
    grad_entropy: Tensor | None
    factor: Tensor

    def cut(self, rows: slice) -> "_Slopes":
        return _Slopes(*at(rows, *self))


class _Gradient(NamedTuple):
    """``LogitGradient`` of log-probs and entropies."""

    rows: Rows
    slopes: _Slopes
    call: Call

    @property
    def factor(self) -> Tensor:
        return self.slopes.factor

    def of_tile(self, rows: slice, first_column: int, block: HeadBlock, *, wide: bool) -> tuple[Tensor, Tensor]:
        return _logit_gradient(self.rows.cut(rows, first_column), block, self.slopes.cut(rows), self.call, wide=wide)


class _TokenScores(torch.autograd.Function):
    """(logp [N], entropy [N]) of (hidden, weight, bias, lora_a, lora_b, target, outside, call)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None,
        target: Tensor, outside: Tensor | None, call: Call,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        head = HeadBlock(weight, *map(sharded.whole, (bias, lora_a, lora_b)))
        with without_autocast(hidden.device):
            if call.group is not None:
                target = vocab_parallel.within_shard(target, len(weight), call.group)
            partial = _partial(head, rows_of(hidden, head, target, outside, call), call)
            if call.group is not None:
                partial = vocab_parallel.gathered(partial, call.group)
            result = scored(partial)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, bias, lora_a, lora_b, *head, target, outside, *result)
        return result.logp, result.entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a head", given="backend='chunked'", remedy="Use backend='reference'.")
        saved = ctx.saved_tensors  # read once: activation checkpointing recomputes them for one reading
        hidden, bias, lora_a, lora_b, weight, *whole, target, outside = saved[:10]
        head, result = HeadBlock(weight, *whole), saved[10:]
        if grad_logp is None and grad_entropy is None:
            if not is_sharded(weight):
                return (None,) * 8
            grad_logp = torch.zeros_like(result[-2])  # the other ranks wait for this one's collectives
        arriving = [gradient for gradient in (grad_logp, grad_entropy) if gradient is not None]
        nonzero = torch.stack([gradient != 0 for gradient in arriving]).any(0).nonzero().squeeze(1)
        with without_autocast(hidden.device):
            target, outside = at(nonzero, target, outside)
            rows = rows_of(hidden if len(nonzero) == len(hidden) else hidden[nonzero], head, target, outside, ctx.call)
            grad_logp, grad_entropy = at(nonzero, grad_logp, grad_entropy)
            slopes = _slopes(Scored(*at(nonzero, *result)), outside, grad_logp, grad_entropy, ctx.call)
            size = tile(len(rows.target), len(weight), ctx.call.wide, ctx.call.memory_budget)
            gradient = _Gradient(rows, slopes, ctx.call)
            of_rows, *of_head = gradients(head, rows, gradient, ctx.needs_input_grad[:5], ctx.call, size)
            of_hidden = in_all_rows(of_rows, nonzero, hidden)
        of_weight, *small = of_head
        summed = [sharded.summed_like(g, x) for g, x in zip(small, (bias, lora_a, lora_b), strict=True)]
        return (of_hidden, None if of_weight is None else of_weight.to(weight.dtype), *summed, None, None, None)


def _partial(head: HeadBlock, rows: Rows, call: Call) -> Partial:
    """The sums over all columns of this rank's head."""
    size = tile(len(rows.target), len(head.weight), call.wide, call.memory_budget)
    total: Partial | None = None
    for first, block in blocks(head, size.columns, call):
        sums = rows.hidden.new_empty(4, len(rows.target), dtype=call.wide)
        for some in slices(len(rows.target), size.rows):
            sums[:, some] = _tile_sums(rows.cut(some, first), block, call)
        total = Partial(*sums) if total is None else merged([total, Partial(*sums)])
    assert total is not None
    return total


def _tile_sums(rows: Rows, block: HeadBlock, call: Call) -> Tensor:
    """``Partial`` of one tile as [4, n]; two buffers of its size."""
    z = product(rows, block, call)
    if call.one_pass:
        from logitless.head.kernels import launch

        return launch.tile_sums(z, rows.outside, rows.target, call.inside)
    top, target_logit = anchor(logits_of(z, rows, call), rows.target, masked=block.bias is not None)
    exponential = z.exp()
    others = exponential.sum(1)
    return torch.stack([top, others, exponential.mul_(z).sum(1), target_logit])


def _slopes(
    result: Scored, outside: Tensor | None, grad_logp: Tensor | None, grad_entropy: Tensor | None, call: Call
) -> _Slopes:
    size = functools.reduce(torch.maximum, [g.abs() for g in (grad_logp, grad_entropy) if g is not None])
    divisor, factor = scales(size, outside, call)
    at_target = torch.zeros_like(size)
    if grad_logp is not None:
        grad_logp = grad_logp / divisor
        at_target += grad_logp * result.others / result.normaliser
    if grad_entropy is not None:
        grad_entropy = grad_entropy / divisor
        at_target -= grad_entropy * result.logp.exp() * (result.logp.clamp(min=FLOOR) + result.entropy)
    return _Slopes(
        top=result.top,
        over=-1 / result.normaliser,
        offset=result.entropy - result.normaliser.log(),
        at_target=at_target,
        grad_logp=grad_logp,
        grad_entropy=grad_entropy,
        factor=factor,
    )


def _logit_gradient(rows: Rows, block: HeadBlock, slopes: _Slopes, call: Call, *, wide: bool) -> tuple[Tensor, Tensor]:
    """u of ``_Slopes`` for one tile: in the logits' dtype (if ``wide``), and as operand. At most three tile buffers."""
    z = product(rows, block, call)
    if call.one_pass:
        from logitless.head.kernels import launch

        return z, launch.tile_gradient(z, rows.outside, rows.target, call.inside, slopes[:-1], call.narrow, wide=wide)
    z, tanh = logits_and_tanh(z, rows, call)
    z -= slopes.top[:, None]
    if block.bias is not None:
        z.clamp_(min=FLOOR)
    if slopes.grad_entropy is None:
        u = z.exp_()
        weight = slopes.over if slopes.grad_logp is None else slopes.over * slopes.grad_logp
    else:
        u = z.exp()
        z += slopes.offset[:, None]
        z *= slopes.grad_entropy[:, None]
        if slopes.grad_logp is not None:
            z += slopes.grad_logp[:, None]
        u *= z
        weight = slopes.over
    u *= weight[:, None]
    write_target(u, rows.target, slopes.at_target)
    return of_product(u, tanh, call)


def _has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on this device."""
    return device.type == "cuda" and torch.version.cuda is not None and not without_triton()
