"""Problems for the head, the same for every backend, with their float64 truth.

A ``Case`` says what to build, ``Problem`` holds the tensors, and ``run`` gives a backend's answer: scores and every
gradient by name. The truth is written independently of the package: ``log_softmax`` of full float64 logits.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from logitless.head import api, fused
from logitless.types import LMHead, TokenScores
from tests.head.interpreter import complete_interpreter, interpreted
from tests.rounding import of_roundings, of_sum

HALVES = (torch.bfloat16, torch.float16)
DTYPES = {
    "reference": (torch.float64, torch.float32, *HALVES),
    "chunked": (torch.float64, torch.float32, *HALVES),
    "fused": (torch.float32, *HALVES),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


BACKENDS = ["reference", "chunked", "fused"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}
ANCHORS = {
    "normaliser": torch.linspace(-3, 3, 21),
    "far off": torch.where(torch.arange(21) % 2 == 0, 500.0, -500.0),
    "not finite": torch.where(torch.arange(21) % 2 == 0, torch.inf, torch.nan),
}
"""Hints for 21 rows, near and nowhere near what they stand for."""

TF32X3 = 1e-4
"""What float32 operands lose on a GPU, multiplied as three tf32 products."""


def token_scores(hidden: Tensor, head: LMHead | Tensor, target: Tensor, *, backend: str, **options: Any) -> TokenScores:
    """The head's public function; off CUDA the fused backend runs under the interpreter."""
    if backend != "fused" or hidden.device.type == "cuda":
        return api.token_scores(hidden, head, target, backend=backend, **options)
    if not interpreted() or fused._unsupported(hidden) is not None:
        pytest.skip("needs Triton's interpreter (TRITON_INTERPRET=1) and a dtype that the kernels take")
    complete_interpreter()
    with mock.patch.object(fused, "why_not", fused._unsupported):
        return api.token_scores(hidden, head, target, backend=backend, **options)


@dataclass(frozen=True)
class Case:
    """What to build; ``spread`` is the standard deviation of the logits."""

    rows: int = 7
    vocabulary: int = 11
    width: int = 5
    bias: bool = False
    softcap: float | None = None
    scale: float = 1.0
    temperature: float | str = 1.0
    lora: int = 0
    trained: bool = True
    spread: float = 2.0
    dtype: torch.dtype = torch.float64
    weight_dtype: torch.dtype | None = None
    seed: int = 0

    def __str__(self) -> str:
        plain = Case()
        names = ("rows", "vocabulary", "width", "bias", "softcap", "scale", "temperature", "lora", "trained", "spread")
        changed = [f"{n}={getattr(self, n)}" for n in names if getattr(self, n) != getattr(plain, n)]
        return "-".join(changed) or "plain"


@dataclass(frozen=True)
class Problem:
    """Inputs and incoming gradients; some rows have none, some only one of the two."""

    hidden: Tensor
    head: LMHead
    target: Tensor
    temperature: float | Tensor
    grad_logp: Tensor
    grad_entropy: Tensor
    leaves: dict[str, Tensor] = field(default_factory=dict)

    def leaf_copy(self, dtype: torch.dtype | None = None, device: str | None = None) -> "Problem":
        """The same numbers as fresh leaves, of another ``dtype`` or on another ``device`` where given."""

        def copied(value: Any, to: torch.dtype | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            moved = value.detach().to(device=device, dtype=to or value.dtype)
            return moved.clone().requires_grad_(value.requires_grad)

        names = ("weight", "bias", "lora_a", "lora_b")
        hidden = copied(self.hidden, dtype)
        head = replace(self.head, **{name: copied(getattr(self.head, name), dtype) for name in names})
        wide = dtype if dtype is None or dtype == torch.float64 else torch.float32
        leaves = {"hidden": hidden} | {name: getattr(head, name) for name in names}
        return Problem(
            hidden=hidden,
            head=head,
            target=copied(self.target, torch.int64),
            temperature=copied(self.temperature, wide),
            grad_logp=copied(self.grad_logp, wide),
            grad_entropy=copied(self.grad_entropy, wide),
            leaves={name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad},
        )


def sized(case: Case, backend: str, device: str) -> Case:
    """The case, cut down to two or three tiles a side where it would run under the interpreter."""
    if backend != "fused" or device != "cpu":
        return case
    return replace(case, rows=min(case.rows, 21), vocabulary=min(case.vocabulary, 37), width=min(case.width, 24))


def problem(case: Case, device: str = "cpu") -> Problem:
    """Deterministic inputs for a case, drawn in float64 on the CPU and rounded to its dtype."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    def leaf(value: Tensor, dtype: torch.dtype, trained: bool = True) -> Tensor:
        return value.to(device=device, dtype=dtype).requires_grad_(trained)

    n, v, d = case.rows, case.vocabulary, case.width
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    weight_dtype = case.weight_dtype or case.dtype
    head = LMHead(
        weight=leaf(normal(v, d, scale=case.spread / d**0.5), weight_dtype, case.trained),
        bias=leaf(normal(v), weight_dtype, case.trained) if case.bias else None,
        scale=case.scale,
        softcap=case.softcap,
        lora_a=leaf(normal(case.lora, d, scale=d**-0.5), weight_dtype) if case.lora else None,
        lora_b=leaf(normal(v, case.lora), weight_dtype) if case.lora else None,
        lora_scale=0.5 if case.lora else 1.0,
    )
    hidden = leaf(normal(n, d), case.dtype)
    target = torch.randint(0, v, (n,), generator=generator)
    temperature: float | Tensor
    if case.temperature == "per token":
        temperature = (0.5 + torch.rand(n, generator=generator, dtype=torch.float64)).to(device=device, dtype=wide)
    else:
        temperature = float(case.temperature)
    grads = normal(2, n).to(device=device, dtype=wide)
    grads[0, 1::3] = 0
    grads[1, 1::2] = 0
    return Problem(hidden, head, target.to(device), temperature, grads[0], grads[1]).leaf_copy()


def run(problem: Problem, backend: str, **options: Any) -> dict[str, Tensor]:
    """A backend's scores and gradients by name."""
    problem = problem.leaf_copy()
    options = {"temperature": problem.temperature, "backend": backend} | options
    scores = token_scores(problem.hidden, problem.head, problem.target, **options)
    return _with_gradients(problem, scores.logp, scores.entropy)


def truth(problem: Problem) -> dict[str, Tensor]:
    """The same in float64, from the operands as they are multiplied: rounded to hidden's dtype."""
    exact = exact_copy(problem)
    return _with_gradients(exact, *plain_scores(exact))


def exact_copy(problem: Problem) -> Problem:
    """The problem in float64, its operands rounded to hidden's dtype."""
    product = problem.hidden.dtype
    exact = problem.leaf_copy(torch.float64)
    with torch.no_grad():
        for name in ("weight", "lora_a", "lora_b"):
            leaf = getattr(exact.head, name)
            if leaf is not None:
                leaf.copy_(leaf.to(product).double())
    return exact


def plain(problem: Problem) -> dict[str, Tensor]:
    """What everyone writes first: logits in hidden's dtype, then ``log_softmax`` in float32."""
    problem = problem.leaf_copy(problem.hidden.dtype)
    return _with_gradients(problem, *plain_scores(problem))


def plain_scores(problem: Problem) -> tuple[Tensor, Tensor]:
    """logp and entropy by ``log_softmax``, in the dtype of the operands."""
    p = torch.log_softmax(plain_logits(problem), dim=1)
    return p.gather(1, problem.target[:, None]).squeeze(1), -(p.exp() * p).sum(1)


def plain_logits(problem: Problem) -> Tensor:
    """Full logits [N, V] in plain PyTorch."""
    head = problem.head
    z = problem.hidden @ head.weight.T
    if head.lora_a is not None and head.lora_b is not None:
        z = z + head.lora_scale * (problem.hidden @ head.lora_a.T) @ head.lora_b.T
    z = head.scale * (z if head.bias is None else z + head.bias)
    if z.dtype != torch.float64:
        z = z.float()
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    temperature = problem.temperature
    return z / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)


def assert_same(given: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """Every entry within ``tolerance`` of the largest entry of what is wanted (at least 1)."""
    assert given.keys() == wanted.keys()
    for name, value in wanted.items():
        assert given[name].shape == value.shape, name
        size = max(1.0, float(value.abs().max())) if value.numel() else 1.0
        torch.testing.assert_close(
            given[name].double(), value.double(), atol=tolerance * size, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def error(given: Tensor, exact: Tensor) -> float:
    """Relative error, Frobenius."""
    return float((given.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def score_error(problem: Problem) -> float:
    """Bound of the error of logp and entropy whose products are summed in float32.

    A logit is a sum of D products (and what LoRA and the bias add), then scaled, capped and brought to powers of 2; the
    normaliser is a sum over V. The entropy weighs the logits' errors by log p.
    """
    head, hidden = problem.head, problem.hidden.detach().double().abs()
    size = hidden @ head.weight.detach().double().abs().T
    terms = head.weight.shape[1] + 4
    if head.lora_a is not None and head.lora_b is not None:
        size = size + head.lora_scale * (hidden @ head.lora_a.detach().double().abs().T) @ (
            head.lora_b.detach().double().abs().T
        )
        terms += len(head.lora_a)
    if head.bias is not None:
        size = size + head.bias.detach().double().abs().nan_to_num(posinf=0.0)
    temperature = problem.temperature
    largest = head.scale * float(
        (size / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)).max()
    )
    vocabulary = len(head.weight)
    of_logp = 2 * of_sum(torch.float32, terms, largest) + of_sum(torch.float32, vocabulary)
    return of_logp * (1 + math.log(vocabulary))


def gradient_error(problem: Problem) -> float:
    """Bound of the relative error of gradients: of sums over V or N in float32, and of what is stored in between.

    In a half precision those are three roundings: the exponential, the scaled row that it multiplies, the result.
    """
    longest = max(len(problem.hidden), len(problem.head.weight), problem.hidden.shape[1])
    return of_sum(torch.float32, longest) + stored_error(problem.hidden.dtype)


def stored_error(dtype: torch.dtype) -> float:
    """Bound of what the three roundings of a gradient in this dtype lose."""
    return of_roundings(dtype, 3)


def widest(backend: str) -> torch.dtype:
    """The most exact dtype a backend takes."""
    return DTYPES[backend][0]


def tolerance(backend: str, device: str = "cpu", given: Problem | None = None) -> float:
    """How far a backend may be off in its widest dtype, on this problem."""
    if backend == "fused" and device == "cuda":
        return TF32X3
    if given is not None and widest(backend) == torch.float32:
        return max(TOLERANCE[torch.float32], score_error(given))
    return TOLERANCE[widest(backend)]


def _with_gradients(problem: Problem, logp: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(
        [logp, entropy],
        list(problem.leaves.values()),
        [problem.grad_logp.to(logp.dtype), problem.grad_entropy.to(logp.dtype)],
    )
    return {"logp": logp.detach(), "entropy": entropy.detach()} | {
        f"grad_{name}": gradient for name, gradient in zip(problem.leaves, gradients, strict=True)
    }
