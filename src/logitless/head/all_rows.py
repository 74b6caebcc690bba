"""The rows of all ranks scored together, each rank against its shard of the vocabulary.

The alternative to ``sharded``: hidden states are gathered (``N D`` numbers) instead of shards broadcast (``V D``). Work
and result are the same. A backward's collectives have a fixed order: gather the incoming gradients, then sum the
gradient of the hidden states, of which every rank keeps its rows.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from logitless.distributed.collectives import gather_over_group
from logitless.distributed.sharding import is_sharded
from logitless.errors import InputError
from logitless.head.api import token_scores
from logitless.head.contract import Backend
from logitless.types import LMHead, TokenScores


def token_scores_of_all(
    hidden: Float[Tensor, "n D"],
    head: LMHead,
    target: Int[Tensor, "n"],
    *,
    temperature: float = 1.0,
    backend: Backend | Literal["auto"] = "auto",
    memory_budget: int | None = None,
) -> TokenScores:
    """Log-probabilities and entropies of this rank's targets; all ranks call this, also those without rows.

    Args:
        hidden: this rank's.
        head: its weight is a DTensor sharded by rows over a mesh of one dimension; bias and LoRA factors are sharded
            alike, or replicated.
        target: this rank's.
        temperature, backend, memory_budget: as for ``token_scores``.

    Raises:
        InputError: the weight is sharded otherwise.
    """
    weight: Any = head.weight
    if not is_sharded(weight) or weight.device_mesh.ndim != 1 or not weight.placements[0].is_shard(0):
        raise InputError(
            needed="a weight sharded by rows over a mesh of one dimension",
            given=f"placements {tuple(getattr(weight, 'placements', ()))}",
            remedy="Call token_scores: each rank then scores its own rows.",
        )
    group: ProcessGroup = weight.device_mesh.get_group()
    mine = gather_over_group(group)(torch.tensor([len(hidden)], device=hidden.device)).tolist()
    first = sum(mine[: dist.get_rank(group)])
    own = slice(first, first + len(hidden))
    shard = replace(
        head,
        weight=_rows(head.weight),
        bias=None if head.bias is None else _rows(head.bias),
        lora_b=None if head.lora_b is None else _rows(head.lora_b),
        lora_a=None if head.lora_a is None else _whole(head.lora_a),
    )
    scores = token_scores(
        _GatherRows.apply(hidden, own, group),  # type: ignore[no-untyped-call]
        shard,
        gather_over_group(group)(target),
        temperature=temperature,
        backend=backend,
        memory_budget=memory_budget,
        group=group,
    )
    logp, entropy = _OwnRows.apply(torch.stack([scores.logp, scores.entropy], 1), own, group).unbind(1)  # type: ignore[no-untyped-call]
    return TokenScores(logp, entropy)


def _rows(tensor: Any) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor


def _whole(tensor: Any) -> Tensor:
    """The gathered tensor; the head sums its gradient, so that it is the same on every rank."""
    if not is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.full_tensor(grad_placements=[Replicate()])


class _GatherRows(Function):
    """All-gather of rows; backward keeps this rank's rows of the summed gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, own: slice, group: ProcessGroup) -> Tensor:
        ctx.own = own
        return gather_over_group(group)(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return gradient[ctx.own], None, None


class _OwnRows(Function):
    """This rank's rows; backward gathers the gradients of all."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, own: slice, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return rows[own].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return gather_over_group(ctx.group)(gradient.contiguous()), None, None
