"""The fused backend: Triton kernels that keep exponentials from the forward, so that a step takes three products.

Equal to ``reference`` to rounding. The forward keeps E_v = exp(z_v - anchor) in the operands' dtype, with E_y = -S.
With ``c_n = -dloss/dlogp_n / Z_n`` the gradients are then two products, ``c * (E W)`` and ``E^T (c * hidden)``. Rows
beyond ``memory_budget`` are recomputed in the backward, with one more product. See docs/head.md for construction,
memory and times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from logitless.distributed.sharding import is_sharded
from logitless.errors import UnavailableError
from logitless.float32_sums import sums_in_float32
from logitless.head.blockwise import HeadBlock
from logitless.head.columns import Columns
from logitless.head.contract import on_device, without_autocast
from logitless.head.sharded import summed_like, whole
from logitless.installed import too_old, without_triton
from logitless.second_derivative import refuse_second_derivative
from logitless.types import LMHead, TokenScores

SHARE = 6
"""By default kept exponentials take at most 1/SHARE of the device's memory: on a GPU of 24 GB those of 13 thousand
tokens of a vocabulary of 152 thousand, beside weights and moments of a 0.5B model and the sampler's pages."""


def why_not(hidden: Tensor) -> str | None:
    """Why the kernels cannot score these hidden states on this machine, or None when they can.

    Example:
        >>> why_not(torch.zeros(2, 4))
        'tensors are on cpu, the kernels need a CUDA device'
    """
    if hidden.device.type != "cuda":
        return f"tensors are on {hidden.device.type}, the kernels need a CUDA device"
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    return too_old(hidden.device) or _unsupported(hidden)


def _unsupported(hidden: Tensor) -> str | None:
    """``why_not``, for reasons that hold on any device."""
    if hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"hidden states are {str(hidden.dtype).removeprefix('torch.')}, the kernels take 16 and 32 bit floats"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    return without_triton() or None


@dataclass(frozen=True)
class MemoryPlan:
    """How many rows keep their exponentials, and in how many bytes.

    Example:
        >>> MemoryPlan.of(1000, 1000, torch.bfloat16, memory_budget=10**6)
        MemoryPlan(kept_rows=500, kept_bytes=1000000)
    """

    kept_rows: int
    kept_bytes: int

    @classmethod
    def of(cls, num_rows: int, vocabulary: int, kept: torch.dtype, *, memory_budget: int) -> "MemoryPlan":
        """As many rows as the budget holds; a multiple of 4 if not all fit, for alignment."""
        row = -(-vocabulary // 8) * 8 * kept.itemsize
        rows = min(num_rows, memory_budget // row)
        if rows < num_rows:
            rows -= rows % 4
        return cls(kept_rows=rows, kept_bytes=rows * row)


def default_budget(device: torch.device) -> int:
    """Default bytes for kept exponentials: a sixth of the device's memory, whether it is free or not.

    Kept and recomputed rows round their gradients differently. What is free changes from run to run; the size does not.
    """
    if device.type != "cuda":
        return 2**30
    return torch.cuda.get_device_properties(device).total_memory // SHARE


@torch.compiler.disable
def token_scores(
    hidden: Float[Tensor, "N D"],
    head: LMHead,
    target: Int[Tensor, "N"],
    *,
    temperature: float | Float[Tensor, "N"] = 1.0,
    memory_budget: int | None = None,
    anchor: Float[Tensor, "N"] | None = None,
    nonzero: Bool[Tensor, "N"] | None = None,
    group: ProcessGroup | None = None,
) -> TokenScores:
    """Log-probability of each target and entropy of each distribution, at three matrix products with gradients.

        E_v = exp(z_v - a);   S = sum_{v != y} E_v;   logp = -log1p(S exp(a - z_y));   a = z_y, or the given anchor

    Gradient: to hidden, weight, bias and LoRA factors that require grad, for rows whose incoming gradient is not zero,
    without synchronization; that of a bfloat16 parameter with a float32 gradient is added to ``weight.grad`` by the
    product. An entropy gradient costs one pass over the kept exponentials (with a softcap the rows are recomputed). It
    cannot be differentiated again; a second backward through the same graph recomputes the exponentials.

    Args:
        hidden: [N, D] bfloat16, float16 or float32.
        head: the weights; shapes as checked by ``contract.checked``.
        target: [N] int64.
        temperature: divides the logits; a number or [N].
        memory_budget: bytes for kept exponentials, 2 V a row (4 V for float16 and float32); None takes
            ``default_budget``. 0 keeps nothing.
        anchor: [N] near each row's log-sum-exp; None anchors at the target's logit. A bad anchor costs time only.
        nonzero: [N] False where the gradient is known to be zero: such rows keep exponentials last.
        group: the process group over which the vocabulary is sharded (see ``vocab_parallel``).

    Returns:
        float32. A row is bitwise identical whatever the other rows are, with and without grad.

    Raises:
        UnavailableError: the kernels cannot take these tensors; triton is missing; the backward runs under
            ``create_graph=True``.
        torch.OutOfMemoryError: too little is free for the exponentials; it names the budget.

    Equals: ``reference.token_scores``.
    Ranks: with ``group`` a step sends six numbers a row in five small collectives, and the gradients of hidden and
        lora_a are summed over the ranks in float32. The shards of an FSDP2 weight are broadcast one after the other,
        once in the forward and once in the backward, beside the products; rows are then anchored at their largest logit
        in the first tile of the first shard, and again when a later shard has a logit far above that.
    Memory: docs/head.md, "Memory"; beyond kept exponentials, about ``8 N V / 256`` bytes of partial sums in the forward
        and ``2 N D`` in the backward (``6 N D`` and a block of logit gradients when rows are recomputed).
    Accumulation: float32; every gradient is rounded once.
    Determinism: bitwise repeatable.
    Supports: CUDA devices from compute capability 8.0; measured on Hopper. bias, scale, softcap, LoRA, float32 master
        weights, a vocabulary that a process group shares, FSDP2 shards.
    """
    reason = _unsupported(hidden)
    if reason is not None:
        raise UnavailableError(
            needed="tensors the fused head can take", given=reason, remedy="Use backend='auto' or backend='chunked'."
        )
    tensors = hidden, *HeadBlock.of(head)
    call = _Call(
        scale=head.scale,
        softcap=head.softcap,
        lora_scale=head.lora_scale,
        temperature=1.0 if isinstance(temperature, Tensor) else temperature,
        memory_budget=memory_budget,
        group=group,
        trained=torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors),
    )
    per_row = temperature if isinstance(temperature, Tensor) else None
    logp, entropy = _TokenScores.apply(*tensors, target, per_row, anchor, nonzero, call)  # type: ignore[no-untyped-call]
    return TokenScores(logp=logp, entropy=entropy)


@dataclass(frozen=True)
class _Call:
    """The arguments of a call that are no tensors."""

    scale: float
    softcap: float | None
    lora_scale: float
    temperature: float
    memory_budget: int | None
    group: ProcessGroup | None
    trained: bool

    def columns(self, weight: Tensor) -> Columns:
        """The columns of this weight."""
        return Columns(weight.detach(), self.group, summed_into=weight if sums_in_float32(weight) else None)

    def head(self, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None) -> LMHead:
        """The head of these tensors, detached."""
        tensors = [None if x is None else x.detach() for x in (weight, bias, lora_a, lora_b)]
        assert tensors[0] is not None
        return LMHead(tensors[0], tensors[1], self.scale, self.softcap, tensors[2], tensors[3], self.lora_scale)


class _TokenScores(torch.autograd.Function):
    """(logp [N], entropy [N]) of the head's tensors, target, temperature [N], anchor, nonzero and the call."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None,
        target: Tensor, temperature: Tensor | None, anchor: Tensor | None, nonzero: Tensor | None, call: _Call,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        from logitless.head import passes
        from logitless.head.kernels import variants

        ctx.set_materialize_grads(False)
        ctx.call, ctx.kept = call, None
        columns = ctx.columns = call.columns(weight)
        small = [whole(x) for x in (bias, lora_a, lora_b)]
        given = (hidden, weight, bias, lora_a, lora_b, *small)
        if not len(hidden):
            columns.without_rows(hidden.dtype, trained=False)
            ctx.save_for_backward(*given)
            return hidden.new_zeros(0, dtype=torch.float32), hidden.new_zeros(0, dtype=torch.float32)
        head = call.head(weight, *small)
        order = None
        with on_device(hidden.device), without_autocast(hidden.device):
            rows = hidden.detach().contiguous()
            target = columns.from_first(target).contiguous()
            budget = 0
            if call.trained:
                budget = default_budget(hidden.device) if call.memory_budget is None else call.memory_budget
            kept_dtype = variants.kept_dtype(hidden.dtype)
            plan = MemoryPlan.of(len(hidden), columns.kept_width, kept_dtype, memory_budget=budget)
            # ranks that share the vocabulary may keep different numbers of rows, and need the same order
            if nonzero is not None and (columns.shared or 0 < plan.kept_rows < len(hidden)):
                order = torch.sort(nonzero, descending=True, stable=True).indices
                rows = rows[order]
                target = target[order]
                temperature, anchor = (None if x is None else x[order] for x in (temperature, anchor))
            state, kept = passes.scored(
                columns,
                head,
                rows,
                target,
                temperature=call.temperature if temperature is None else temperature,
                anchor=anchor,
                kept_rows=plan.kept_rows,
            )
            logp, entropy = state.logp, state.entropy
            if order is not None:
                place = torch.argsort(order)
                logp, entropy = logp[place], entropy[place]
        if call.trained:
            ctx.kept = kept
            ctx.save_for_backward(*given, order, rows, *state)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        from logitless.head import passes

        refuse_second_derivative("a head", given="backend='fused'", remedy="Use backend='reference'.")

        hidden, weight, bias, lora_a, lora_b, *saved = ctx.saved_tensors
        small, saved = saved[:3], saved[3:]
        needed = passes.Needed(*ctx.needs_input_grad[:5])
        if grad_logp is None and grad_entropy is None:
            if not is_sharded(weight):
                return (None,) * 10
            grad_logp = hidden.new_zeros(len(hidden), dtype=torch.float32)  # the other ranks wait in collectives
        columns = ctx.columns
        of_small: Sequence[Tensor | None]
        if not len(hidden):
            of_hidden = torch.zeros_like(hidden) if needed.hidden else None
            of_weight = columns.without_rows(hidden.dtype, trained=needed.weight)
            of_small = [torch.zeros_like(x) if wanted else None for x, wanted in zip(small, needed[2:], strict=True)]
        else:
            order, rows, *fields = saved
            kept, ctx.kept = ctx.kept, None
            if grad_entropy is not None and ctx.call.softcap is not None:
                kept = None  # E times the softcap's slope, from which log p cannot be computed
            with on_device(hidden.device), without_autocast(hidden.device):
                of_hidden, of_weight, *of_small = passes.gradients(
                    passes.State(*fields),
                    columns,
                    ctx.call.head(weight, *small),
                    rows,
                    kept,
                    order,
                    *(g if g is None or order is None else g[order] for g in (grad_logp, grad_entropy)),
                    needed=needed,
                )
        summed = [summed_like(g, x) for g, x in zip(of_small, (bias, lora_a, lora_b), strict=True)]
        return (of_hidden, of_weight, *summed, *(None,) * 5)
