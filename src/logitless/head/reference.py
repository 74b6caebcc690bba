"""The reference backend: full logits and plain autograd, in the memory of several [N, V] tensors."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logitless.head.contract import logits_dtype, refuse_budget
from logitless.types import LMHead, TokenScores


def logits(
    hidden: Float[Tensor, "N D"], head: LMHead, temperature: float | Float[Tensor, "N"] = 1.0
) -> Float[Tensor, "N V"]:
    """Full logits, in float32 at least.

        raw = scale * (hidden @ weight.T + bias + lora_scale * (hidden @ lora_a.T) @ lora_b.T)
        logits = softcap * tanh(raw / softcap) / temperature

    Example:
        >>> logits(torch.tensor([[1.0, 2.0]]), LMHead(weight=torch.eye(2)), temperature=2.0)
        tensor([[0.5000, 1.0000]])
    """
    product, wide = hidden.dtype, logits_dtype(hidden.dtype)
    rows = hidden.to(wide)
    z = rows @ _rounded(head.weight, product).T
    if head.lora_a is not None and head.lora_b is not None:
        low = rows @ _rounded(head.lora_a, product).T
        z = z + head.lora_scale * (low @ _rounded(head.lora_b, product).T)
    if head.bias is not None:
        z = z + head.bias.to(wide)
    z = head.scale * z
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)


def token_scores(
    hidden: Float[Tensor, "N D"],
    head: LMHead,
    target: Int[Tensor, "N"],
    *,
    temperature: float | Float[Tensor, "N"] = 1.0,
    memory_budget: int | None = None,
) -> TokenScores:
    """Log-probability of each target and entropy of each distribution, from full logits.

        delta_v = z_v - z_y;   Z = 1 + sum_{v != y} exp(delta_v)
        logp = -log Z;   entropy = log Z - sum_v exp(delta_v) delta_v / Z

    Differences to the target's logit keep ``logp`` and its gradient exact when p_y is nearly 1. Run the backward
    outside of autocast.

    Raises:
        UnavailableError: a memory budget is given.

    Example:
        >>> scores = token_scores(torch.zeros(1, 3), LMHead(weight=torch.zeros(4, 3)), torch.tensor([2]))
        >>> scores.logp, scores.entropy
        (tensor([-1.3863]), tensor([1.3863]))
    """
    refuse_budget(memory_budget)
    return scores_of(logits(hidden, head, temperature), target)


def scores_of(z: Float[Tensor, "N V"], target: Int[Tensor, "N"]) -> TokenScores:
    """``token_scores`` of full logits.

    Example:
        >>> scores_of(torch.zeros(1, 4), torch.tensor([2])).logp
        tensor([-1.3863])
    """
    y = target[:, None]
    delta = z - z.gather(1, y)
    top = delta.detach().amax(1, keepdim=True)
    # exp of -1e4 is exactly 0: it keeps the target out of the sums, and 0 * -inf out of the entropy.
    shifted = (delta - top).masked_fill(delta == -torch.inf, -1e4).scatter(1, y, -1e4)
    others = shifted.exp()
    top = top.squeeze(1)
    log_normaliser = torch.log1p(others.sum(1) + torch.expm1(-top))
    weighted = (others * shifted).sum(1) - torch.exp(-top) * top
    return TokenScores(logp=-(top + log_normaliser), entropy=log_normaliser - weighted * torch.exp(-log_normaliser))


def _rounded(value: Tensor, product: torch.dtype) -> Tensor:
    return _Rounded.apply(value, product)  # type: ignore[no-untyped-call]


class _Rounded(torch.autograd.Function):
    """Round a tensor to the products' dtype and widen it again; the gradient is not rounded."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, product: torch.dtype) -> Tensor:
        ctx.dtype = value.dtype
        return value.to(product).to(logits_dtype(product))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.to(ctx.dtype), None
