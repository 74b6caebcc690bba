"""Arguments and results of the backends that compare two models' distributions (two streams of hidden states)."""

from typing import Literal, NamedTuple

from torch import Tensor

from logitless.types import LMHead

Kind = Literal["forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "centering"]


class Measure(NamedTuple):
    """What to compute of the two distributions of a token.

    Args:
        kind: the divergence, or ``centering``.
        beta: the teacher's share of the mixture, strictly between 0 and 1; only for ``jensen_shannon``.
    """

    kind: Kind
    beta: float = 0.5


class Stream(NamedTuple):
    """Checked arguments of one model: hidden states [N, D], its LM head, and its temperature (a number or [N])."""

    hidden: Tensor
    head: LMHead
    temperature: float | Tensor


class Measured(NamedTuple):
    """The results of a backend, [N] each; the log-probs are None without targets."""

    value: Tensor
    logp: Tensor | None
    entropy: Tensor
    logp_teacher: Tensor | None
    entropy_teacher: Tensor
