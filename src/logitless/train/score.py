"""Scoring: log-probabilities of a block's tokens before it is trained on, in passes without gradient."""

from collections.abc import Sequence

import torch

from logitless.distributed.ranks import Ranks
from logitless.train.block import PackedBlock, ScoredBlock
from logitless.train.config import Backend
from logitless.train.policy import Scorer
from logitless.types import PackedBatch, TokenScores

_COLUMNS = ("logp", "entropy", "value")


def score(
    block: PackedBlock,
    policy: Scorer,
    reference: Scorer | None,
    micro_batches: Sequence[Sequence[int]],
    *,
    temperature: float,
    backend: Backend,
    ranks: Ranks = Ranks.alone(),
    sampled: TokenScores | None = None,
) -> ScoredBlock:
    """The block with what the policy and the reference say of its tokens.

    Args:
        block: packed.
        policy: gives ``logp_old``, ``entropy_old`` and, with a value head, ``value_old``.
        reference: gives ``logp_ref``; or None.
        micro_batches: see ``scores_of``.
        temperature: of sampling.
        backend: of the head.
        ranks: that share the rows.
        sampled: what an engine with the policy's bits said of the tokens; the policy makes no pass then.
    """

    def under(scorer: Scorer) -> TokenScores:
        return scores_of(scorer, block.packed, micro_batches, temperature=temperature, backend=backend, ranks=ranks)

    old = under(policy) if sampled is None else sampled
    ref = None if reference is None else under(reference).logp
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
    scorer: Scorer,
    batch: PackedBatch,
    micro_batches: Sequence[Sequence[int]],
    *,
    temperature: float,
    backend: Backend,
    ranks: Ranks = Ranks.alone(),
) -> TokenScores:
    """Scores under one policy, without gradient, in the packing it is given.

    The packing is that of the first epoch, so the first optimizer step meets the very same numbers: its ratio is 1.

    Args:
        scorer: policy or reference.
        batch: on the CPU.
        micro_batches: the sequences of each packed row of this rank; the rows of all ranks together have every
            sequence with a scored token, once.
        temperature: of sampling.
        backend: of the head.
        ranks: whose rows these are not all of.

    Returns:
        CPU tensors, float32, in the batch's order, of all tokens on every rank; ``value`` where the scorer has a value
        head.
    """
    has_value = False
    places, scored = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, len(_COLUMNS))]
    with torch.no_grad():
        for sequences in micro_batches:
            scores = scorer.scores(batch.take(sequences), temperature=temperature, backend=backend)
            found = [getattr(scores, name) for name in _COLUMNS]
            has_value = scores.value is not None
            absent = torch.full_like(scores.logp, torch.nan, dtype=torch.float32)
            scored.append(torch.stack([absent if v is None else v.float() for v in found], dim=1).cpu())
            places.append(batch.tokens_of(sequences))
    values = torch.empty(batch.num_tokens, len(_COLUMNS))
    values[ranks.gather(torch.cat(places))] = ranks.gather(torch.cat(scored))
    logp, entropy, value = (column.contiguous() for column in values.unbind(1))
    return TokenScores(logp, entropy, value if ranks.any(has_value) else None)  # a rank without a row saw none
