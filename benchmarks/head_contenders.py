"""Contenders of ``benchmarks/head.py``, each a function of the same problem."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from logitless.head import token_scores
from logitless.types import LMHead

CHUNK = 4096

TRL_COLUMNS = 32768
"""Columns of a tile as TRL's own trainer asks for them."""


@dataclass(frozen=True)
class Problem:
    """Inputs of the head and the gradient that comes in; leaves require grad as a case needs them to.

    ``upstream`` is constant over runs of rows, like a GRPO advantage over the tokens of a completion, so that losses
    that take one advantage a sequence can do the same work. Logits have a standard deviation of about 4.
    """

    hidden: Tensor
    weight: Tensor
    lora_a: Tensor
    lora_b: Tensor
    target: Tensor
    upstream: Tensor
    run: int

    @classmethod
    def draw(cls, rows: int, width: int, vocabulary: int, *, rank: int, device: str, run: int) -> "Problem":
        """Random inputs in bfloat16, the same for every contender."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, scale: float) -> Tensor:
            return (torch.randn(*shape, device=device, generator=generator) * scale).bfloat16()

        advantage = torch.randn(-(-rows // run), device=device, generator=generator)
        return cls(
            hidden=normal(rows, width, scale=1.0),
            weight=normal(vocabulary, width, scale=4 / math.sqrt(width)),
            lora_a=normal(rank, width, scale=1 / math.sqrt(width)),
            lora_b=normal(vocabulary, rank, scale=0.1),
            target=torch.randint(0, vocabulary, (rows,), device=device, generator=generator),
            upstream=advantage.repeat_interleave(run)[:rows] / rows,
            run=run,
        )

    @property
    def device(self) -> str:
        return self.hidden.device.type

    def with_live(self, fraction: float) -> "Problem":
        """The same with gradient on this fraction of the runs only, spread over the batch."""
        runs = -(-len(self.target) // self.run)
        place = torch.arange(runs, device=self.hidden.device)
        live = ((place + 1) * fraction).floor() > (place * fraction).floor()
        rows = live.repeat_interleave(self.run)[: len(self.target)]
        return replace(self, upstream=torch.where(rows, self.upstream, 0.0))

    def leaves(self, trained: str) -> tuple[Tensor, LMHead]:
        """Hidden states and head, requiring grad as ``trained`` says; gradients are dropped."""
        self.clear()
        training = trained != "none"
        self.hidden.requires_grad_(training)
        self.weight.requires_grad_(trained == "weight")
        if trained != "lora":
            return self.hidden, LMHead(self.weight)
        self.lora_a.requires_grad_(True)
        self.lora_b.requires_grad_(True)
        return self.hidden, LMHead(self.weight, lora_a=self.lora_a, lora_b=self.lora_b)

    def gradient_bytes(self) -> int:
        """Bytes of the gradients that the last run returned."""
        leaves = (self.hidden, self.weight, self.lora_a, self.lora_b)
        return sum(x.grad.numel() * x.grad.element_size() for x in leaves if x.grad is not None)

    def clear(self) -> None:
        """Drops gradients."""
        for leaf in (self.hidden, self.weight, self.lora_a, self.lora_b):
            leaf.grad = None


@dataclass(frozen=True)
class Contender:
    """A way to do it: what it can train, and a function from (hidden, head, problem, budget) to log-probs or a loss."""

    trained: tuple[str, ...]
    scores: Callable[[Tensor, LMHead, Problem, int | None], Tensor]
    gives_loss: bool = False
    skips: bool = True  # whether rows without gradient may matter to its time

    def run(self, problem: Problem, trained: str, budget: int | None) -> Tensor | None:
        """Scores and, where something is trained, gradients; returns the log-probs if it has any."""
        hidden, head = problem.leaves(trained)
        with torch.set_grad_enabled(trained != "none"):
            result = self.scores(hidden, head, problem, budget)
        if trained != "none":
            torch.autograd.backward([result], [None if self.gives_loss else problem.upstream.to(result.dtype)])
        return None if self.gives_loss else result.detach()


def bare(problem: Problem, trained: str) -> Callable[[], None]:
    """The matrix products alone; buffers are made here, outside of the clock."""
    x, w = problem.hidden.detach(), problem.weight.detach()
    rows = min(CHUNK, len(x))
    logits = torch.empty(rows, len(w), dtype=x.dtype, device=x.device)
    gradient = torch.randn(rows, len(w), device=x.device).to(x.dtype) if trained != "none" else logits
    grad_hidden = torch.empty(rows, x.shape[1], dtype=x.dtype, device=x.device)
    grad_weight = torch.empty_like(w) if trained == "weight" else w

    def products() -> None:
        for start in range(0, len(x), rows):
            part = x[start : start + rows]
            n = len(part)
            torch.mm(part, w.T, out=logits[:n])
            if trained != "none":
                torch.mm(gradient[:n], w, out=grad_hidden[:n])
            if trained == "weight":
                torch.mm(gradient[:n].T, part, out=grad_weight)

    return products


def _logitless(backend: str) -> Callable[[Tensor, LMHead, Problem, int | None], Tensor]:
    def scores(hidden: Tensor, head: LMHead, problem: Problem, budget: int | None) -> Tensor:
        return token_scores(hidden, head, problem.target, backend=backend, memory_budget=budget).logp  # type: ignore[arg-type]

    return scores


def _trl(hidden: Tensor, head: LMHead, problem: Problem, budget: int | None) -> Tensor:  # noqa: ARG001
    from trl.kernels import ChunkedLogProbFunction

    outputs = ChunkedLogProbFunction.apply(
        hidden, head.weight, None, problem.target, 1.0, TRL_COLUMNS, None, 1.0, ("entropy",)
    )
    return outputs[0]


def _liger(hidden: Tensor, head: LMHead, problem: Problem, budget: int | None) -> Tensor:  # noqa: ARG001
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    length = min(problem.run, len(hidden))
    sequences = len(hidden) // length
    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, chunk_size=max(1, CHUNK // length), loss_type="dapo"
    )
    return loss(
        hidden.view(sequences, length, -1),
        head.weight,
        problem.target.view(sequences, length),
        torch.ones(sequences, length, device=hidden.device),
        -problem.upstream.view(sequences, length)[:, 0] * len(hidden),
    )[0]


def _cce(hidden: Tensor, head: LMHead, problem: Problem, budget: int | None) -> Tensor:  # noqa: ARG001
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, head.weight, problem.target, reduction="none")


CONTENDERS = {
    "logitless-reference": Contender(("weight", "frozen", "lora", "none"), _logitless("reference"), skips=False),
    "logitless-chunked": Contender(("weight", "frozen", "lora", "none"), _logitless("chunked")),
    "logitless-fused": Contender(("weight", "frozen", "lora", "none"), _logitless("fused")),
    "trl": Contender(("weight", "frozen", "none"), _trl),
    "liger": Contender(("weight", "frozen", "none"), _liger, gives_loss=True),
    "cce": Contender(("weight", "frozen", "none"), _cce),
}
