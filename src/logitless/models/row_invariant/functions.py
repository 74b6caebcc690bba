"""Embedding, norms, rotary positions and gate of row-invariant layers, as autograd functions around their kernels."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from logitless.float32_sums import add_rows, gradient_dtype, sums_in_float32
from logitless.models.activations import can_be_recomputed, recipes_are_kept
from logitless.models.kernels.gate import gated, gated_backward
from logitless.models.kernels.norm import norm, norm_backward
from logitless.models.kernels.rotary import HeadNorms, Heads, PositionTable, rotate, rotate_backward
from logitless.models.kernels.sinks import with_sinks, with_sinks_backward
from logitless.models.one_node import apply, refuse_twice


def embedded(layer: nn.Module, ids: Tensor) -> Tensor:
    """Embeddings [T, D] of token ids."""
    if type(layer) is nn.Embedding and layer.max_norm is None and not torch.is_grad_enabled():
        return layer.weight[ids]  # one kernel for any number of rows; nn.Embedding's is slow for few
    if type(layer) is nn.Embedding and layer.padding_idx is None and sums_in_float32(layer.weight):
        return _Embedded.apply(layer.weight, ids)  # type: ignore[no-untyped-call, no-any-return]
    return cast(Tensor, layer(ids))


class _Embedded(torch.autograd.Function):
    """Rows of a weight that sums its gradient in float32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return weight.detach()[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        refuse_twice()
        add_rows(ctx.weight, grad, *ctx.saved_tensors)
        return None, None


def add_and_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, gemma: bool, once: bool = False
) -> tuple[Tensor, Tensor]:
    """(residual + delta, its norm)."""
    return apply(_Norm, residual, delta, weight, eps, gemma, once)


def norm_and_add(residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``residual + norm(delta)`` (Gemma)."""
    return apply(_NormAfter, residual, delta, weight, eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, gemma: bool, once: bool
    ) -> tuple[Tensor, Tensor]:
        total, out = norm(x, weight, eps, delta=delta, gemma=gemma, once=once)
        assert out is not None
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.gemma, ctx.weight_dtype = eps, gemma, gradient_dtype(weight)
        if recipes_are_kept():
            kept, scale = total.detach(), weight.detach()
            can_be_recomputed(out, lambda: cast(Tensor, norm(kept, scale, eps, gemma=gemma, once=once)[1]))
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad_out: Tensor | None) -> tuple[Any, ...]:
        refuse_twice()
        total, weight = ctx.saved_tensors
        grad, grad_weight = grad_total, None
        if grad_out is not None:
            grad, grad_weight = norm_backward(
                total, weight, ctx.eps, grad_out.contiguous(), grad_total,
                gemma=ctx.gemma, weight_dtype=ctx.weight_dtype if ctx.needs_input_grad[2] else None,
            )  # fmt: skip
        return grad, grad if ctx.needs_input_grad[1] else None, grad_weight, None, None, None


class _NormAfter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(delta, weight)
        ctx.eps, ctx.weight_dtype = eps, gradient_dtype(weight)
        return norm(x, weight, eps, delta=delta, gemma=True, after=True)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_twice()
        delta, weight = ctx.saved_tensors
        weight_dtype = ctx.weight_dtype if ctx.needs_input_grad[2] else None
        grad_delta, grad_weight = norm_backward(
            delta, weight, ctx.eps, grad.contiguous(), None, gemma=True, weight_dtype=weight_dtype
        )
        return grad, grad_delta, grad_weight, None


def can_be_recomputed_together(outs: tuple[Tensor, ...], make: Callable[[], tuple[Tensor, ...]]) -> None:
    """``can_be_recomputed`` for all results of one kernel, which runs again when the first of them is requested.

    Args:
        outs: the results; each is requested once a backward pass.
        make: recomputes them.
    """
    made: dict[int, Tensor] = {}

    def again(number: int) -> Tensor:
        if number not in made:
            made.update(enumerate(make()))
        return made.pop(number)

    for number, out in enumerate(outs):
        can_be_recomputed(out, partial(again, number))


class Rotary(torch.autograd.Function):
    """Rotary positions for queries and keys (after their norms, if any); returns query, key and value as heads."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, query_norm: Tensor | None, key_norm: Tensor | None,
        norms: HeadNorms | None, heads: Heads, position: Tensor, table: PositionTable,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        raw = () if norms is None else (query, key, query_norm, key_norm)
        ctx.save_for_backward(position, *raw)
        ctx.table = table
        ctx.heads, ctx.norms = heads, norms
        ctx.norm_dtypes = None if norms is None else (gradient_dtype(norms.query), gradient_dtype(norms.key))
        turned = rotate(query, key, value, heads, position, table.cos, table.sin, norms, factor=table.factor)
        if norms is not None and recipes_are_kept():  # norms keep queries and keys as they were
            raw_heads = query.detach(), key.detach(), value.detach()
            again = partial(rotate, *raw_heads, heads, position, table.cos, table.sin, norms, factor=table.factor)
            can_be_recomputed_together(turned, again)
        return turned

    @staticmethod
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> tuple[Any, ...]:
        refuse_twice()
        (position, *raw), table = ctx.saved_tensors, ctx.table
        heads = ctx.heads
        grads = [grad.contiguous() for grad in (grad_query, grad_key, grad_value)]
        query, key = raw[:2] if raw else (grads[0].flatten(1), grads[1].flatten(1))
        grad, grad_query_norm, grad_key_norm = rotate_backward(
            query, key, heads, position, table.cos, table.sin, ctx.norms, *grads, factor=table.factor,
            norm_dtypes=ctx.norm_dtypes if any(ctx.needs_input_grad[3:5]) else None,
        )  # fmt: skip
        columns = (heads.query * heads.width, heads.key * heads.width, heads.key * heads.width)
        return *grad.split(columns, 1), grad_query_norm, grad_key_norm, *(None,) * 4  # type: ignore[no-untyped-call]


class Sinks(torch.autograd.Function):
    """Attention with sinks [T, H * E], from its output [T, H, E] and log-sum-exp without them."""

    @staticmethod
    def forward(ctx: Any, attended: Tensor, log_sum_exp: Tensor, sinks: Tensor) -> Tensor:
        ctx.save_for_backward(attended, log_sum_exp, sinks)
        ctx.sinks_dtype = gradient_dtype(sinks)
        out = with_sinks(attended, log_sum_exp, sinks)
        if recipes_are_kept():
            kept = [each.detach() for each in (attended, log_sum_exp, sinks)]
            can_be_recomputed(out, lambda: with_sinks(*kept))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_twice()
        attended, log_sum_exp, sinks = ctx.saved_tensors
        sinks_dtype = ctx.sinks_dtype if ctx.needs_input_grad[2] else None
        return with_sinks_backward(attended, log_sum_exp, sinks, grad.contiguous(), sinks_dtype=sinks_dtype)


class HeadsAsRows(torch.autograd.Function):
    """[T, H, E] as [T, H * E]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view(ctx.shape)


class QueryAndGate(torch.autograd.Function):
    """Queries and gates [T, H * E] of rows [T, H * 2 E], in which each head's query is followed by its gate."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        ctx.heads = heads
        query, gate = both.view(len(both), heads, 2, -1).unbind(2)
        return query.flatten(1), gate.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        refuse_twice()
        return torch.stack([grad.view(len(grad), ctx.heads, -1) for grad in grads], 2).flatten(1), None


class GateOfToken(torch.autograd.Function):
    """``sigmoid(gate) * up`` [T, D], with one gate a token [T, 1]."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gated(gate.expand(up.shape).contiguous(), up, gelu=False, sigmoid=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        refuse_twice()
        gate, up = ctx.saved_tensors
        wide = gate.expand(up.shape).contiguous()
        of_gate, of_up = gated_backward(wide, up, grad.contiguous(), gelu=False, sigmoid=True)
        return of_gate.sum(1, keepdim=True, dtype=torch.float32).to(gate.dtype), of_up


class Gate(torch.autograd.Function):
    """``act(gate) * up``; SiLU, GELU or the sigmoid."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool, sigmoid: bool = False) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = {"gelu": gelu, "sigmoid": sigmoid}
        out = gated(gate, up, **ctx.act)
        if recipes_are_kept():
            can_be_recomputed(out, partial(gated, gate.detach(), up.detach(), **ctx.act))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_twice()
        gate, up = ctx.saved_tensors
        return *gated_backward(gate, up, grad.contiguous(), **ctx.act), *(None,) * (len(ctx.needs_input_grad) - 2)
