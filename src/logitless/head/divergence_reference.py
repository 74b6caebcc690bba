"""The reference of two streams: full logits of both and plain autograd, at the price of several [N, V] tensors."""

import math

import torch
from torch import Tensor

from logitless.head.blockwise import FLOOR
from logitless.head.measure import Measure, Measured, Stream
from logitless.head.reference import logits, scores_of


def measured(student: Stream, teacher: Stream, target: Tensor | None, vocabulary: int, measure: Measure) -> Measured:
    """The measure over the first ``vocabulary`` tokens, and the scores of both streams."""
    z = logits(*student)[:, :vocabulary]
    with torch.no_grad():
        z_teacher = logits(*teacher)[:, :vocabulary]
    scores, scores_teacher = (scores_of(each, _top(each) if target is None else target) for each in (z, z_teacher))
    return Measured(
        value=value_of(z.log_softmax(1), z_teacher.log_softmax(1), measure),
        logp=None if target is None else scores.logp,
        entropy=scores.entropy,
        logp_teacher=None if target is None else scores_teacher.logp,
        entropy_teacher=scores_teacher.entropy,
    )


def value_of(log_p: Tensor, log_q: Tensor, measure: Measure) -> Tensor:
    """The measure of the student's log-probs p and the teacher's q, [N, V] each.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
        >>> value_of(p, q, Measure("total_variation"))
        tensor([0.2500])
    """
    p, q, beta = log_p.exp(), log_q.exp(), measure.beta
    if measure.kind == "forward_kl":
        return (q * (log_q - log_p).masked_fill(q == 0, 0)).sum(1)
    if measure.kind == "reverse_kl":
        return (p * (log_p - log_q).masked_fill(p == 0, 0)).sum(1)
    if measure.kind == "total_variation":
        return (p - q).abs().sum(1) / 2
    if measure.kind == "centering":
        change = (q - p).detach()
        return (change * log_p.masked_fill(change == 0, 0)).sum(1)
    log_p, log_q = log_p.clamp(min=FLOOR), log_q.clamp(min=FLOOR)  # -inf has no difference to -inf
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    return (beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)).sum(1)


def _top(z: Tensor) -> Tensor:
    """A target where none is given: any gives the entropy."""
    return z.argmax(1)
