"""Scores by row chunks in pure torch, on any device: nothing of size N x V ever exists.

Equal to ``reference`` to rounding. Forward and backward each form the logits once (four matrix products where the
bare minimum is three); what this gives up is the speed of the fused kernels, which keep the exponentials.
"""

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from logitless.head import vocab_parallel
from logitless.head.contract import logits_dtype, refuse_second_derivative, require, without_autocast
from logitless.head.vocab_parallel import Partial
from logitless.types import LMHead, TokenScores

logger = logging.getLogger("logitless")

CPU_BUDGET = 256 * 2**20
"""Default memory budget off CUDA, in bytes."""

CUDA_SHARE = 32
"""The default budget on CUDA is this fraction of the device's memory: 4.4 GiB of 140, 0.75 GiB of 24."""

MIN_ROWS = 16
"""Chunks are not made smaller than this, however small the budget."""

FLOOR = -1e4
"""Stands for -inf in differences of logits: exp of it is exactly 0, and so is 0 times it."""


def token_scores(
    hidden: Float[Tensor, "N D"],
    head: LMHead,
    target: Int[Tensor, "N"],
    *,
    temperature: float | Float[Tensor, "N"] = 1.0,
    memory_budget: int | None = None,
    anchor: Float[Tensor, "N"] | None = None,  # noqa: ARG001 - hints change nothing: rows are anchored at their maximum,
    live: Bool[Tensor, "N"] | None = None,  # noqa: ARG001 - and rows without gradient are seen when it arrives
    group: ProcessGroup | None = None,
) -> TokenScores:
    """Log-probability of each target and entropy of each distribution, a chunk of rows at a time.

        S = sum_{v != y} exp(z_v - max z);   d = z_y - max z
        logp = d - log(S + e^d), written d - log1p(S + expm1(d)) so that it is exact when p_y is nearly 1

    Gradient: through both results to hidden, weight, bias and LoRA factors; formed only for inputs that require
    grad and only for rows whose incoming gradient is not zero (finding them waits for the device once). It cannot be
    differentiated again.

    Args:
        hidden: [N, D].
        head: the weights; shapes as checked by ``contract.checked``.
        target: [N] int64.
        temperature: divides the logits; a number or [N].
        memory_budget: bytes for temporaries of size chunk x V; the default is 256 MiB off CUDA and a 32nd of the
            device's memory on CUDA (of all of it, not of what is free: chunk sizes, and with them last bits, then
            depend on nothing that changes during a run).
        anchor, live: hints for other backends.
        group: the process group over which the vocabulary is sharded (see ``vocab_parallel``).

    Returns:
        float32 (float64 for float64). Row by row they do not depend on whether grad is enabled.

    Equals: ``reference.token_scores``.
    Memory: at most ``max(memory_budget, 16 rows)`` for chunks; ``4 V D`` bytes to accumulate the weight's gradient if
        it is trained (for float32 weights this becomes the result); a rounded copy of the weight if its dtype
        differs from the product's.
    Accumulation: float32 or wider, everywhere. Off CUDA, float16 and bfloat16 operands are multiplied in float32.
    Determinism: bitwise repeatable. A NaN stays in its row of scores and hidden gradient; the weight's gradient sums
        over rows and is NaN if a row with a gradient is.

    Example:
        >>> scores = token_scores(torch.zeros(1, 3), LMHead(weight=torch.zeros(4, 3)), torch.tensor([2]))
        >>> scores.logp, scores.entropy
        (tensor([-1.3863]), tensor([1.3863]))
    """
    call = _Call(
        scale=head.scale,
        softcap=head.softcap,
        lora_scale=head.lora_scale,
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        chunk=chunk_rows(
            len(target), head.weight.shape[0], logits_dtype(hidden.dtype), memory_budget, device=hidden.device
        ),
        group=group,
    )
    per_row = temperature if isinstance(temperature, Tensor) else None
    logp, entropy = _TokenScores.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, head.lora_a, head.lora_b, target, per_row, call
    )
    return TokenScores(logp=logp, entropy=entropy)


def chunk_rows(
    num_rows: int, vocabulary: int, dtype: torch.dtype, memory_budget: int | None, *, device: torch.device
) -> int:
    """Rows a chunk: as many as three temporaries of chunk x V leave room for, the chunks of about equal size.

    Example:
        >>> chunk_rows(1000, 1000, torch.float32, 12_000 * 600, device=torch.device("cpu"))
        512
    """
    if memory_budget is None:
        memory_budget = default_budget(device)
    most = max(MIN_ROWS, memory_budget // (3 * dtype.itemsize * vocabulary))
    chunks = max(1, -(-num_rows // most))
    balanced = -(-num_rows // chunks)
    return max(1, min(most, -(-balanced // 64) * 64, num_rows))


def default_budget(device: torch.device) -> int:
    """Bytes for temporaries when the caller names none.

    Example:
        >>> default_budget(torch.device("cpu")) // 2**20
        256
    """
    if device.type != "cuda":
        return CPU_BUDGET
    return torch.cuda.get_device_properties(device).total_memory // CUDA_SHARE


@dataclass(frozen=True)
class _Call:
    """What a call fixes besides tensors."""

    scale: float
    softcap: float | None
    lora_scale: float
    temperature: float
    chunk: int
    group: ProcessGroup | None


@dataclass(frozen=True)
class _Operands:
    """The head in the dtypes it is multiplied in: ``weight`` for the wide products, the rest in the logits' dtype."""

    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None
    call: _Call

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
        call: _Call,
    ) -> "_Operands":
        product, wide = hidden.dtype, logits_dtype(hidden.dtype)
        return cls(
            weight=weight.to(product).to(_multiplied_in(hidden)),
            bias=None if bias is None else bias.to(wide),
            lora_a=None if lora_a is None else lora_a.to(product).to(wide),
            lora_b=None if lora_b is None else lora_b.to(product).to(wide),
            call=call,
        )

    def capped(self, rows: Tensor) -> Tensor:
        """[n, V] logits before temperature; with a softcap, their tanh, which is the logits over the softcap."""
        call = self.call
        z = _product(rows, self.weight.T)
        if self.lora_a is not None and self.lora_b is not None:
            z.addmm_(rows.to(z.dtype) @ self.lora_a.T, self.lora_b.T, alpha=call.lora_scale)
        if self.bias is not None:
            z += self.bias
        if call.scale != 1:
            z *= call.scale
        return z if call.softcap is None else z.div_(call.softcap).tanh_()

    def relative(self, z: Tensor, temperature: Tensor | None) -> Tensor:
        """``capped`` logits made into logits, in place."""
        if self.call.softcap is not None:
            z *= self.call.softcap
        if temperature is not None:
            z /= temperature[:, None]
        elif self.call.temperature != 1:
            z /= self.call.temperature
        return z


class _TokenScores(torch.autograd.Function):
    """(logp [N], entropy [N]) of (hidden, weight, bias, lora_a, lora_b, target, temperature [N] or None, call)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
        target: Tensor,
        temperature: Tensor | None,
        call: _Call,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        with without_autocast(hidden.device):
            if call.group is not None:
                place = vocab_parallel.shard(weight.shape[0], call.group, hidden.device)
                require(
                    (target >= 0) & (target < place.vocabulary),
                    needed="targets within the vocabulary that the group shares",
                    given="one outside of it",
                    remedy="Give rows of scored tokens only, ids counted over the whole vocabulary.",
                )
                target = target - place.offset
            operands = _Operands.of(hidden, weight, bias, lora_a, lora_b, call)
            parts = [
                _partial(operands, hidden[rows], target[rows], None if temperature is None else temperature[rows])
                for rows in _slices(len(target), call.chunk)
            ]
            partial = Partial(*(torch.cat(column) for column in zip(*parts, strict=True)))
            if call.group is not None:
                partial = vocab_parallel.combined(partial, call.group)
            below = partial.target_logit - partial.top
            log_normaliser = torch.log1p(partial.others + torch.expm1(below))
            normaliser = partial.others + below.exp()
            weighted = partial.weighted + below.exp() * below.clamp(min=FLOOR)
            logp, entropy = below - log_normaliser, log_normaliser - weighted / normaliser
        ctx.call = call
        ctx.save_for_backward(
            hidden, weight, bias, lora_a, lora_b, target, temperature, *partial[:2], normaliser, logp, entropy
        )
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("chunked")
        arriving = [gradient for gradient in (grad_logp, grad_entropy) if gradient is not None]
        if not arriving:
            return (None,) * 8
        hidden, weight, bias, lora_a, lora_b, target, temperature, top, others, normaliser, logp, entropy = (
            ctx.saved_tensors
        )
        inputs = (hidden, weight, bias, lora_a, lora_b)
        live = torch.stack([gradient != 0 for gradient in arriving]).any(0).nonzero().squeeze(1)
        with without_autocast(hidden.device):
            rows = _rows(
                target[live],
                None if temperature is None else temperature[live],
                top[live],
                others[live],
                normaliser[live],
                logp[live],
                entropy[live],
                None if grad_logp is None else grad_logp[live],
                None if grad_entropy is None else grad_entropy[live],
                ctx.call,
            )
            gradients = _Gradients(_Operands.of(*inputs, ctx.call), hidden, rows, ctx.needs_input_grad[:5])
            for chunk in _slices(len(live), ctx.call.chunk):
                gradients.add(live[chunk], hidden[live[chunk]], rows.chunk(chunk))
        cast = [None if g is None else g.to(x.dtype) for g, x in zip(gradients.total(), inputs, strict=True)]
        return (*cast, None, None, None)


def _partial(operands: _Operands, hidden: Tensor, target: Tensor, temperature: Tensor | None) -> Partial:
    """The sums of one chunk of rows; two buffers of its logits' size."""
    z = operands.relative(operands.capped(hidden), temperature)
    # A shard may hold nothing but padding, masked with -inf; its maximum must be a number all the same.
    top = z.amax(1).clamp(min=torch.finfo(z.dtype).min)
    owned, column = _column(target, z.shape[1])
    target_logit = torch.where(owned, z.gather(1, column).squeeze(1), 0)
    z -= top[:, None]
    if operands.bias is not None:
        z.clamp_(min=FLOOR)
    _write_target(z, target, torch.full_like(top, FLOOR))
    exponential = z.exp()
    others = exponential.sum(1)
    return Partial(top, others, exponential.mul_(z).sum(1), target_logit)


class _Rows(NamedTuple):
    """What the backward knows of each live row.

    The gradient of the products' output is ``factor * u``, with u of the order of a probability:

        u_v = (grad_logp + grad_entropy (z_v - top + offset)) exp(z_v - top) over   (v != y),   u_y = at_target

    Args:
        target: column within this shard; outside of it if another shard owns it.
        temperature: [n] or None.
        top: the maximum that exponentials are relative to.
        over: -1 / sum_v exp(z_v - top).
        offset: entropy - log sum_v exp(z_v - top).
        at_target: u_y, made of the other columns' sum so that it is exact when p_y is nearly 1.
        grad_logp, grad_entropy: the incoming gradients, scaled so that the larger one is 1 in size; None for none.
        factor: what was taken out, with the derivative of scale and temperature.
    """

    target: Tensor
    temperature: Tensor | None
    top: Tensor
    over: Tensor
    offset: Tensor
    at_target: Tensor
    grad_logp: Tensor | None
    grad_entropy: Tensor | None
    factor: Tensor

    def chunk(self, rows: slice) -> "_Rows":
        return _Rows(*(None if column is None else column[rows] for column in self))  # type: ignore[arg-type]


def _rows(
    target: Tensor,
    temperature: Tensor | None,
    top: Tensor,
    others: Tensor,
    normaliser: Tensor,
    logp: Tensor,
    entropy: Tensor,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    call: _Call,
) -> _Rows:
    sizes = [gradient.abs() for gradient in (grad_logp, grad_entropy) if gradient is not None]
    size = functools.reduce(torch.maximum, sizes)
    at_target = torch.zeros_like(top)
    if grad_logp is not None:
        grad_logp = grad_logp / size
        at_target += grad_logp * others / normaliser
    if grad_entropy is not None:
        grad_entropy = grad_entropy / size
        at_target -= grad_entropy * logp.exp() * (logp.clamp(min=FLOOR) + entropy)
    return _Rows(
        target=target,
        temperature=temperature,
        top=top,
        over=-1 / normaliser,
        offset=entropy - normaliser.log(),
        at_target=at_target,
        grad_logp=grad_logp,
        grad_entropy=grad_entropy,
        factor=size * call.scale / (call.temperature if temperature is None else temperature),
    )


class _Gradients:
    """Sums of the gradients of (hidden, weight, bias, lora_a, lora_b) over chunks of live rows; None where not needed.

    Sums over rows are in the logits' dtype. In float16, where small factors would be lost, the weight's is in units of
    the largest factor.
    """

    def __init__(self, operands: _Operands, hidden: Tensor, rows: _Rows, needed: tuple[bool, ...]) -> None:
        self.operands, self.wide = operands, rows.top.dtype
        self.for_hidden, self.for_weight, self.for_bias, self.for_lora_a, self.for_lora_b = needed
        self.unit = rows.factor.abs().amax() if operands.weight.dtype == torch.float16 and len(rows.factor) else None
        # Ranks sum their shares of the hidden gradient before it is rounded.
        dtype = hidden.dtype if operands.call.group is None else self.wide
        self.hidden = torch.zeros_like(hidden, dtype=dtype) if self.for_hidden else None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.lora_a: Tensor | None = None
        self.lora_b: Tensor | None = None

    def add(self, index: Tensor, hidden: Tensor, rows: _Rows) -> None:
        """Add the chunk of hidden states ``hidden``, which are rows ``index`` of all."""
        head, factor = self.operands, rows.factor[:, None]
        u = _logit_gradient(head, hidden, rows)
        narrow = u.to(head.weight.dtype)
        if self.for_weight:
            scaled = hidden.to(self.wide) * (factor if self.unit is None else factor / self.unit)
            self.weight = _plus(self.weight, narrow.T, scaled.to(narrow.dtype))
        if self.for_bias:
            self.bias = _plus(self.bias, u.T, factor)
        if self.for_lora_b and head.lora_a is not None:
            low = hidden.to(self.wide) @ head.lora_a.T
            self.lora_b = _plus(self.lora_b, u.T, head.call.lora_scale * factor * low)
        through_b = None if head.lora_b is None else head.call.lora_scale * (u @ head.lora_b)
        if self.for_lora_a and through_b is not None:
            self.lora_a = _plus(self.lora_a, (through_b * factor).T, hidden.to(self.wide))
        if self.hidden is not None:
            gradient = _product(narrow, head.weight)
            if through_b is not None and head.lora_a is not None:
                gradient.addmm_(through_b, head.lora_a)
            self.hidden[index] = (gradient * factor).to(self.hidden.dtype)

    def total(self) -> tuple[Tensor | None, ...]:
        """The gradients, those of replicated inputs summed over the group."""
        if self.weight is not None and self.unit is not None:
            self.weight *= self.unit
        bias = None if self.bias is None else self.bias.squeeze(1)
        if self.operands.call.group is not None:
            for replicated in (self.hidden, self.lora_a):
                if replicated is not None:
                    vocab_parallel.summed(replicated, self.operands.call.group)
        return self.hidden, self.weight, bias, self.lora_a, self.lora_b


def _logit_gradient(operands: _Operands, hidden: Tensor, rows: _Rows) -> Tensor:
    """u [n, V] of ``_Rows``; three buffers of its size at most."""
    z = operands.capped(hidden)
    tanh = None if operands.call.softcap is None else z.clone()
    z = operands.relative(z, rows.temperature)
    z -= rows.top[:, None]
    if operands.bias is not None:
        z.clamp_(min=FLOOR)
    if rows.grad_entropy is None:
        u = z.exp_()
        weight = rows.over if rows.grad_logp is None else rows.over * rows.grad_logp
    else:
        u = z.exp()
        z += rows.offset[:, None]
        z *= rows.grad_entropy[:, None]
        if rows.grad_logp is not None:
            z += rows.grad_logp[:, None]
        u *= z
        weight = rows.over
    u *= weight[:, None]
    _write_target(u, rows.target, rows.at_target)
    return u if tanh is None else u.mul_(tanh.square_().neg_().add_(1))


def _column(target: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Whether this shard owns each row's target, and the column [n, 1] of it (0 where it does not)."""
    owned = (target >= 0) & (target < vocabulary)
    return owned, torch.where(owned, target, 0)[:, None]


def _write_target(matrix: Tensor, target: Tensor, value: Tensor) -> None:
    """Set each row's target column, where this shard owns it."""
    owned, column = _column(target, matrix.shape[1])
    matrix.scatter_(1, column, torch.where(owned, value, matrix.gather(1, column).squeeze(1))[:, None])


def _slices(length: int, step: int) -> Iterator[slice]:
    """At least one slice: products over no rows are the zeros that empty inputs call for."""
    return (slice(start, start + step) for start in range(0, max(length, 1), step))


def _multiplied_in(hidden: Tensor) -> torch.dtype:
    """The dtype of the operands of wide products: hidden's own where its products can be kept in float32."""
    if hidden.dtype in (torch.float32, torch.float64) or _float32_output(hidden.device, hidden.dtype):
        return hidden.dtype
    return torch.float32


@functools.cache
def _float32_output(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch multiplies half-precision matrices into float32 on this device; says so where it cannot."""
    if device.type != "cuda":
        return False
    operand = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.mm(operand, operand, out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        logger.warning(
            "torch %s cannot multiply %s into float32 on %s (%s); the chunked head multiplies in float32, several "
            "times slower. Use a newer torch.",
            torch.__version__,
            dtype,
            device,
            error,
        )
        return False
    return True


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, never narrower than float32."""
    a = a.to(b.dtype)
    return a @ b if b.dtype in (torch.float32, torch.float64) else torch.mm(a, b, out_dtype=torch.float32)


def _plus(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b, in place where there is a total; the total is never narrower than float32."""
    if total is None:
        return _product(a, b)
    if a.dtype == total.dtype:
        return total.addmm_(a, b)
    return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
