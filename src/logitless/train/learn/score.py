"""Scoring: log-probabilities of a block's tokens before it is trained on, in passes without gradient."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from logitless.distributed.ranks import Ranks
from logitless.train.block import PackedBlock, ScoredBlock
from logitless.train.learn.policy import Scorer
from logitless.train.recipe.training import Backend
from logitless.types import PackedBatch, TokenScores

_COLUMNS = ("logp", "entropy", "value")


@dataclass(frozen=True)
class ScoringRows:
    """What is read to score a block: packed rows of this rank.

    Args:
        policy: for ``logp_old``.
        reference: for ``logp_ref``.
        left_to_training: whether ``policy`` leaves out what the only step of the block reads.
    """

    policy: Sequence[Sequence[int]]
    reference: Sequence[Sequence[int]]
    left_to_training: bool = False


def score(
    block: PackedBlock,
    policy: Scorer,
    reference: Scorer | None,
    rows: ScoringRows,
    *,
    temperature: float,
    backend: Backend,
    ranks: Ranks = Ranks.alone(),
    sampled: TokenScores | None = None,
    live: Sequence[bool] | None = None,
) -> ScoredBlock:
    """The block with what the policy and the reference say of its tokens.

    Args:
        block: packed.
        policy: gives ``logp_old``, ``entropy_old`` and, with a value head, ``value_old``.
        reference: gives ``logp_ref``; or None.
        rows: that each of them reads.
        temperature: of sampling.
        backend: of the head.
        ranks: that share the rows.
        sampled: what an engine that is bitwise identical said of the tokens; the policy makes no pass then.
        live: one flag a sequence, those that are trained on; None: all.
    """

    def under(scorer: Scorer, micro_batches: Sequence[Sequence[int]]) -> TokenScores:
        return scores_of(scorer, block.packed, micro_batches, temperature=temperature, backend=backend, ranks=ranks)

    old = under(policy, rows.policy) if sampled is None else sampled
    ref = None if reference is None else under(reference, rows.reference).logp
    return ScoredBlock(
        packed=block.packed,
        groups=block.groups,
        truncated=block.truncated,
        logp_old=old.logp,
        entropy_old=old.entropy,
        logp_ref=ref,
        value_old=old.value,
        live=None if live is None else tuple(live),
        scores_itself=rows.left_to_training and sampled is None,
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
            sequence that is to be scored, once.
        temperature: of sampling.
        backend: of the head.
        ranks: whose rows these are not all of.

    Returns:
        CPU tensors, float32, in the batch's order, of all tokens on every rank, NaN for those of sequences that are in
        no row; ``value`` where the scorer has a value head.
    """
    has_value = False
    places, scored = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, len(_COLUMNS))]
    with torch.no_grad():
        for sequences in micro_batches:
            scores = scorer.scores(batch.take(sequences), temperature=temperature, backend=backend)
            found = [getattr(scores, name) for name in _COLUMNS]
            has_value |= scores.value is not None
            absent = torch.full_like(scores.logp, torch.nan, dtype=torch.float32)
            scored.append(torch.stack([absent if v is None else v.float() for v in found], dim=1))
            places.append(batch.tokens_of(sequences))
    values = torch.full((batch.num_tokens, len(_COLUMNS)), torch.nan)
    on_host = torch.cat([each.cpu() for each in scored])  # once all rows are launched
    values[ranks.gather(torch.cat(places))] = ranks.gather(on_host)
    logp, entropy, value = (column.contiguous() for column in values.unbind(1))
    return TokenScores(logp, entropy, value if ranks.any(has_value) else None)  # a rank without a row saw none
