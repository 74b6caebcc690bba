"""The router's choice of experts, and its backward: one program a token, so that no row depends on another.

    choice = score + correction, outside the chosen groups -inf;  experts = the K largest, ties to the lower number
    weight = score of the chosen experts, divided by their sum if ``normalized``, times ``scale``

``score`` is a softmax over all experts, a sigmoid of each, or the logit itself with a softmax over the chosen ones or
a sigmoid of each of them.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from logitless.models.kernels.gate import sigmoid
from logitless.models.kernels.rows import power_of_two

Score = Literal["softmax", "sigmoid", "softmax of the chosen", "sigmoid of the chosen"]
_NUMBER: dict[Score, int] = {"softmax": 0, "sigmoid": 1, "softmax of the chosen": 2, "sigmoid of the chosen": 3}


@dataclass(frozen=True)
class Routing:
    """How a router chooses.

    Args:
        experts_per_token: K.
        score: of a logit.
        normalized: divide the weights by their sum.
        scale: factor of the weights.
        groups: into which the experts are divided; a group counts by the sum of its two largest scores.
        chosen_groups: of which experts are chosen.
    """

    experts_per_token: int
    score: Score = "softmax"
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1


@triton.jit
def scores_of(logits, expert, num_experts, SCORE: tl.constexpr):
    """The scores of all experts, float32; lanes beyond the last expert hold 0, or -inf for logits."""
    z = tl.load(logits + expert, mask=expert < num_experts, other=-float("inf")).to(tl.float32)
    if SCORE == 0:
        e = tl.exp(z - tl.max(z, 0))
        return e / tl.sum(e, 0)
    if SCORE == 1:
        return sigmoid(z)
    return z


@triton.jit
def route_kernel(
    logits,  # [T, E] contiguous
    correction,  # [E] float32, or None
    weights,  # [T, K] float32
    chosen,  # [T, K] int32
    num_experts,  # E
    scale,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,  # E, K and the groups rounded up to powers of two
    CHOSEN: tl.constexpr, SCORE: tl.constexpr, NORMALIZED: tl.constexpr, GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """The choice of one token."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    place = tl.arange(0, CHOSEN)
    score = scores_of(logits + token * num_experts, expert, num_experts, SCORE)
    choice = score
    if correction is not None:
        choice += tl.load(correction + expert, mask=expert < num_experts, other=0.0)
    choice = tl.where(expert < num_experts, choice, -float("inf"))
    choice = tl.where(choice == choice, choice, -float("inf"))  # NaN, so that the choice stays inside
    if GROUPS > 1:
        group = expert // GROUP_SIZE
        of_group = tl.full((EXPERTS,), -float("inf"), tl.float32)
        for g in tl.static_range(GROUPS):
            own = tl.where(group == g, choice, -float("inf"))
            first = tl.max(own, 0)
            rest = tl.where(expert == tl.argmax(own, 0, tie_break_left=True), -float("inf"), own)
            of_group = tl.where(group == g, first + tl.max(rest, 0), of_group)
        taken = expert < 0
        for _ in tl.static_range(CHOSEN_GROUPS):
            best = tl.argmax(tl.where(taken, -float("inf"), of_group), 0, tie_break_left=True) // GROUP_SIZE
            taken = taken | (group == best)
        choice = tl.where(taken, choice, -float("inf"))
    weight = tl.zeros((CHOSEN,), tl.float32)
    for k in tl.static_range(K):
        best = tl.minimum(tl.argmax(choice, 0, tie_break_left=True), num_experts - 1)
        weight = tl.where(place == k, tl.sum(tl.where(expert == best, score, 0.0), 0), weight)
        choice = tl.where(expert == best, -float("inf"), choice)
        tl.store(chosen + token * K + k, best)
    if SCORE == 2:
        weight = tl.where(place < K, weight, -float("inf"))
        weight = tl.exp(weight - tl.max(weight, 0))
        weight = weight / tl.sum(weight, 0)
    elif SCORE == 3:
        weight = sigmoid(weight)
    elif NORMALIZED:
        weight = weight / (tl.sum(weight, 0) + (1e-20 if SCORE == 1 else 0.0))
    tl.store(weights + token * K + place, weight * scale, mask=place < K)


@triton.jit
def route_backward_kernel(
    logits,  # [T, E] contiguous
    weights,  # [T, K] float32
    chosen,  # [T, K] int32
    grad_weights,  # [T, K] float32
    grad_logits,  # [T, E]
    num_experts,  # E
    scale,
    K: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, SCORE: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    """The gradient of one token's logits."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    place = tl.arange(0, CHOSEN)
    score = scores_of(logits + token * num_experts, expert, num_experts, SCORE)
    weight = tl.load(weights + token * K + place, mask=place < K, other=0.0)
    grad = tl.load(grad_weights + token * K + place, mask=place < K, other=0.0)
    inner = tl.sum(grad * weight, 0)
    total = 0.0
    own = tl.zeros((EXPERTS,), tl.float32)  # the gradient with respect to each expert's score
    for k in tl.static_range(K):
        best = tl.load(chosen + token * K + k)
        g = tl.load(grad_weights + token * K + k)
        if SCORE == 2:
            g = tl.load(weights + token * K + k) * (g - inner / scale)
        elif SCORE == 3:
            w = tl.load(weights + token * K + k)
            g = g * w * (1.0 - w / scale)
        elif NORMALIZED:
            total += tl.sum(tl.where(expert == best, score, 0.0), 0)
            g = scale * g - inner
        else:
            g = scale * g
        own = tl.where(expert == best, g, own)
    if SCORE < 2 and NORMALIZED:
        own = own / (total + (1e-20 if SCORE == 1 else 0.0))
    if SCORE == 1:
        own = own * score * (1.0 - score)
    if SCORE == 0:  # where nothing is chosen the score's gradient is 0, not the logit's
        own = score * (own - tl.sum(own * score, 0))
    tl.store(grad_logits + token * num_experts + expert, own, mask=expert < num_experts)


def route(
    logits: Float[Tensor, "T E"], routing: Routing, correction: Float[Tensor, "E"] | None = None
) -> tuple[Float[Tensor, "T K"], Int[Tensor, "T K"]]:
    """Weights, in float32, and numbers, in int32, of the experts that each token is sent to.

    Args:
        logits: contiguous, any float dtype.
        routing: how to choose.
        correction: float32, added to the scores for the choice only.

    Example:
        >>> weights, chosen = route(torch.tensor([[1.0, 3.0, 3.0]]), Routing(experts_per_token=2))
        >>> weights.tolist(), chosen.tolist()
        ([[0.5, 0.5]], [[1, 2]])
    """
    num_tokens, num_experts = logits.shape
    shape = num_tokens, routing.experts_per_token
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(shape, dtype=torch.int32, device=logits.device)
    if num_tokens:
        route_kernel[(num_tokens,)](
            logits, correction, weights, chosen, num_experts, routing.scale, **_constants(routing, num_experts),
            GROUPS=routing.groups, CHOSEN_GROUPS=routing.chosen_groups, GROUP_SIZE=num_experts // routing.groups,
            num_warps=1,
        )  # fmt: skip
    return weights, chosen


def route_backward(
    logits: Float[Tensor, "T E"], routing: Routing, weights: Float[Tensor, "T K"], chosen: Int[Tensor, "T K"],
    grad_weights: Float[Tensor, "T K"],
) -> Float[Tensor, "T E"]:  # fmt: skip
    """Gradient of the logits, in their dtype; which experts are chosen has none."""
    num_tokens, num_experts = logits.shape
    grad = torch.empty_like(logits)
    if num_tokens:
        route_backward_kernel[(num_tokens,)](
            logits, weights, chosen, grad_weights, grad, num_experts, routing.scale,
            **_constants(routing, num_experts), num_warps=1,
        )  # fmt: skip
    return grad


def _constants(routing: Routing, num_experts: int) -> dict[str, int | bool]:
    return {
        "K": routing.experts_per_token,
        "EXPERTS": power_of_two(num_experts),
        "CHOSEN": power_of_two(routing.experts_per_token),
        "SCORE": _NUMBER[routing.score],
        "NORMALIZED": routing.normalized,
    }
