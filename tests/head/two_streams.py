"""Problems of two streams, the same for every backend, with their float64 truth.

The truth is written independently of the package: probabilities of full float64 logits, and the definitions in them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from logitless.head import score_centering, token_divergence
from logitless.types import LMHead
from tests.head.cases import Case, Problem, exact_copy, plain_logits, problem

KINDS = ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "centering")
BACKENDS = ("reference", "chunked")
RESULTS = ("value", "logp", "entropy", "logp_teacher", "entropy_teacher")


@dataclass(frozen=True)
class Two:
    """A student, a teacher that scores the same tokens, and what is measured."""

    student: Problem
    teacher: Problem
    kind: str
    beta: float | None
    grad_value: Tensor

    @property
    def vocabulary(self) -> int:
        return min(len(self.student.head.weight), len(self.teacher.head.weight))


def two(case: Case, kind: str, beta: float | None = None, *, near: float | None = None, **teacher: Any) -> Two:
    """A problem and its teacher: of the case but for ``teacher``, or with ``near`` the student and so much noise."""
    student = problem(case)
    if near is None:
        changed = {"width": case.width + 3, "seed": case.seed + 1, "trained": False} | teacher
        other = problem(replace(case, **changed))
    else:
        other = student.leaf_copy()
        generator = torch.Generator().manual_seed(case.seed + 2)
        with torch.no_grad():
            noise = torch.randn(other.head.weight.shape, generator=generator, dtype=torch.float64)
            other.head.weight.add_(near * noise)
    vocabulary = min(len(student.head.weight), len(other.head.weight))
    student = replace(student, target=student.target % vocabulary)
    if kind == "jensen_shannon" and beta is None:
        beta = 0.3
    generator = torch.Generator().manual_seed(case.seed + 3)
    grad_value = torch.randn(case.rows, generator=generator, dtype=torch.float64).to(student.grad_logp)
    grad_value[2::4] = 0
    return Two(student, other, kind, beta, grad_value)


def measured(given: Two, backend: str = "chunked", **options: Any) -> dict[str, Tensor]:
    """A backend's five results by name."""
    return scored(given, given.student, backend=backend, **options)


def scored(given: Two, student: Problem, *, with_target: bool = True, **options: Any) -> dict[str, Tensor]:
    other = given.teacher
    streams = (student.hidden, student.head, other.hidden, other.head, student.target if with_target else None)
    options = {"temperature": student.temperature} | options
    if given.kind == "centering":
        found = score_centering(*streams, sampler_temperature=other.temperature, **options)
        results = (found.centering, found.logp, found.entropy, found.logp_sampler, found.entropy_sampler)
    else:
        options = {"kind": given.kind, "beta": given.beta, "teacher_temperature": other.temperature} | options
        found = token_divergence(*streams, **options)
        results = (found.divergence, found.logp, found.entropy, found.logp_teacher, found.entropy_teacher)
    return dict(zip(RESULTS, results, strict=True))


def run(given: Two, backend: str = "chunked", **options: Any) -> dict[str, Tensor]:
    """A backend's results and gradients by name."""
    student = given.student.leaf_copy()
    return with_gradients(given, student, scored(given, student, backend=backend, **options))


def truth(given: Two) -> dict[str, Tensor]:
    """The same in float64, from the operands as they are multiplied."""
    return _by_definition(given, exact_copy(given.student), exact_copy(given.teacher))


def plain(given: Two) -> dict[str, Tensor]:
    """What everyone writes first: logits in hidden's dtype, then softmax in float32."""
    return _by_definition(
        given,
        given.student.leaf_copy(given.student.hidden.dtype),
        given.teacher.leaf_copy(given.teacher.hidden.dtype),
    )


def _by_definition(given: Two, student: Problem, teacher: Problem) -> dict[str, Tensor]:
    log_p = plain_logits(student)[:, : given.vocabulary].log_softmax(1)
    log_q = plain_logits(teacher).detach()[:, : given.vocabulary].log_softmax(1)
    results = (defined(log_p, log_q, given.kind, given.beta), *_scores(log_p, student), *_scores(log_q, student))
    return with_gradients(given, student, dict(zip(RESULTS, results, strict=True)))


def defined(log_p: Tensor, log_q: Tensor, kind: str, beta: float | None) -> Tensor:
    """The measures as papers write them."""
    p, q = log_p.exp(), log_q.exp()
    if kind == "jensen_shannon":
        kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, kind)
    if kind == "forward_kl":
        return (q * (log_q - log_p)).sum(1)
    if kind == "reverse_kl":
        return (p * (log_p - log_q)).sum(1)
    if kind == "total_variation":
        return (p - q).abs().sum(1) / 2
    if kind == "centering":
        return ((q - p).detach() * log_p).sum(1)
    m = (1 - beta) * p + beta * q
    return (beta * q * (log_q - m.log()) + (1 - beta) * p * (log_p - m.log())).sum(1)


def _scores(log_p: Tensor, given: Problem) -> tuple[Tensor, Tensor]:
    return log_p.gather(1, given.target[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


def with_gradients(given: Two, student: Problem, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results and the gradients of a weighted sum of the three that have one."""
    upstream = (given.grad_value, student.grad_logp, student.grad_entropy)
    gradients = torch.autograd.grad(
        [results[name] for name in RESULTS[:3]],
        list(student.leaves.values()),
        [gradient.to(results["value"].dtype) for gradient in upstream],
    )
    named = zip(student.leaves, gradients, strict=True)
    return {name: value.detach() for name, value in results.items()} | {f"grad_{name}": g for name, g in named}


def corner(log_p: list[float], log_q: list[float]) -> tuple[Tensor, LMHead, Tensor, LMHead]:
    """Two streams of one row with these logits, the student's as its trained weight."""
    weight = torch.tensor(log_p, dtype=torch.float64)[:, None].requires_grad_()
    one = torch.ones(1, 1, dtype=torch.float64)
    return one, LMHead(weight), one, LMHead(torch.tensor(log_q, dtype=torch.float64)[:, None])
