"""What backends of two streams are given, and what they give."""

from typing import Literal, NamedTuple

from torch import Tensor

from logitless.types import LMHead

Kind = Literal["forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "centering"]


class Measure(NamedTuple):
    """What is measured between the two distributions of a token.

    Args:
        kind: the divergence, or ``centering``.
        beta: the teacher's share of the mixture, strictly between 0 and 1; of ``jensen_shannon`` alone.
    """

    kind: Kind
    beta: float = 0.5


class Stream(NamedTuple):
    """Checked arguments of one model: hidden states [N, D], its head, and a number or [N] that divides its logits."""

    hidden: Tensor
    head: LMHead
    temperature: float | Tensor


class Measured(NamedTuple):
    """What a backend gives: [N] each; the log-probs are None without targets."""

    value: Tensor
    logp: Tensor | None
    entropy: Tensor
    logp_teacher: Tensor | None
    entropy_teacher: Tensor
