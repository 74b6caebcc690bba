"""Scoring: log-probabilities of a block's tokens before it is trained on, in passes without gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor

from logitless.train.block import PackedBlock, ScoredBlock
from logitless.train.config import Backend
from logitless.train.policy import Scorer
from logitless.types import PackedBatch, TokenScores


def score(
    block: PackedBlock,
    policy: Scorer,
    reference: Scorer | None,
    micro_batches: Sequence[Sequence[int]],
    *,
    temperature: float,
    backend: Backend,
) -> ScoredBlock:
    """The block with what the policy and the reference say of its tokens.

    Args:
        block: packed.
        policy: gives ``logp_old``, ``entropy_old`` and, with a value head, ``value_old``.
        reference: gives ``logp_ref``; or None.
        micro_batches: see ``scores_of``.
        temperature: of sampling.
        backend: of the head.
    """
    old = scores_of(policy, block.packed, micro_batches, temperature=temperature, backend=backend)
    ref = None
    if reference is not None:
        ref = scores_of(reference, block.packed, micro_batches, temperature=temperature, backend=backend).logp
    return ScoredBlock(
        packed=block.packed,
        groups=block.groups,
        truncated=block.truncated,
        logp_old=old.logp,
        entropy_old=old.entropy,
        logp_ref=ref,
        value_old=old.value,
    )


def scores_of(
    scorer: Scorer, batch: PackedBatch, micro_batches: Sequence[Sequence[int]], *, temperature: float, backend: Backend
) -> TokenScores:
    """Scores under one policy, without gradient, in the packing it is given.

    The packing is that of the first epoch, so the first optimizer step meets the very same numbers: its ratio is 1.

    Args:
        scorer: policy or reference.
        batch: on the CPU.
        micro_batches: the sequences of each packed row; together every sequence with a scored token, once.
        temperature: of sampling.
        backend: of the head.

    Returns:
        CPU tensors, float32, in the batch's order; ``value`` where the scorer has a value head.
    """
    scored: dict[str, Tensor] = {}
    with torch.no_grad():
        for sequences in micro_batches:
            scores = scorer.scores(batch.take(sequences), temperature=temperature, backend=backend)
            where = batch.tokens_of(sequences)
            found = {name: v for name in ("logp", "entropy", "value") if (v := getattr(scores, name)) is not None}
            on_host = torch.stack([values.float() for values in found.values()]).cpu()
            for name, values in zip(found, on_host, strict=True):
                scored.setdefault(name, torch.empty(batch.num_tokens))[where] = values
    return TokenScores(**scored)
