"""Scores of a block's tokens before it is trained on: from passes without gradient, or as an engine gave them.

An engine that is bitwise identical to the policy spares the policy's pass. Its promise is about this machine, so it is
checked: every few blocks the pass is made all the same, and one token with another bit ends the run.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from logitless.distributed.ranks import Ranks
from logitless.errors import EngineError, TrainingError
from logitless.rollout.engine import Engine, ExactEngine
from logitless.rollout.sampling import SamplingOptions
from logitless.train.learn.policy import Scorer
from logitless.train.recipe.training import Backend
from logitless.types import Completion, Group, PackedBatch, TokenScores

_COLUMNS = ("logp", "entropy", "value")


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


def sampled_scores(
    groups: Sequence[Group], engine: Engine, options: SamplingOptions, version: int
) -> TokenScores | None:
    """logp and entropy [N] of the groups' trained tokens as they were sampled; None where a pass has to say.

    Args:
        groups: that are trained on, in order.
        engine: that sampled them.
        options: of sampling; where they filter, ``logp_policy`` counts, and at temperature 0 there is none.
        version: of the policy's weights. Completions of others are scored anew.
    """
    if not isinstance(engine, ExactEngine) or not engine.exact or options.temperature == 0:
        return None
    completions = [completion for group in groups for completion in group.completions]
    logps = [c.logp_policy if options.filters_distribution else c.logp_sampler for c in completions]
    known = all(c.weights_version == version and c.entropy_sampler is not None for c in completions)
    if not known or any(each is None for each in logps):
        return None
    return TokenScores(
        logp=_end_to_end(completions, logps), entropy=_end_to_end(completions, [c.entropy_sampler for c in completions])
    )


def check_sampler_logp(completions: Iterable[Completion]) -> None:
    """Refuse completions none of which has ``logp_sampler``, where the algorithm reads it.

    Raises:
        EngineError: the engine gave none.

    Example:
        >>> check_sampler_logp([Completion("7", (4,), "4", "stop", logp_sampler=(-0.5,))])
    """
    sampled = [each for each in completions if each.length]
    if sampled and all(each.logp_sampler is None for each in sampled):
        raise EngineError(
            needed="logp_sampler of sampled tokens, which algorithm.correction or algorithm.filters read",
            given=f"None in all {len(sampled)} completions of the engine",
            remedy="Let the engine give the log-probability of each token that it sampled, or leave that part of the "
            "algorithm out.",
        )


def mismatched(sampled: TokenScores, scored: TokenScores) -> int:
    """Tokens whose log-prob or entropy has another bit.

    Example:
        >>> a = TokenScores(torch.zeros(2), torch.ones(2))
        >>> mismatched(a, a), mismatched(a, TokenScores(torch.tensor([0.0, 1e-40]), torch.ones(2)))
        (0, 1)
    """
    return int((_differ(sampled.logp, scored.logp) | _differ(sampled.entropy, scored.entropy)).sum())


def check_same(sampled: TokenScores, scored: TokenScores) -> int:
    """0, the tokens of a rescore that differ.

    Raises:
        TrainingError: there are some.
    """
    count = mismatched(sampled, scored)
    if count:
        largest = float((sampled.logp - scored.logp).abs().max())
        raise TrainingError(
            needed="log-probs of the sampler that are the trainer's in every bit",
            given=f"{count} of {len(sampled.logp)} tokens that differ, by at most {largest:.3g} nats",
            remedy="Run `python benchmarks/bits.py` of the repository on this machine; sample with rollout.engine: "
            "{name: transformers}, which promises no such thing.",
        )
    return count


def _differ(a: Tensor, b: Tensor) -> Tensor:
    return a.view(torch.int32) != b.view(torch.int32)


def _end_to_end(completions: Sequence[Completion], values: Sequence[np.ndarray | None]) -> Tensor:
    """Of the trained tokens, float32."""
    parts = [np.zeros(0, np.float32)]
    for completion, of_completion in zip(completions, values, strict=True):
        assert of_completion is not None
        parts.append(of_completion if completion.trained is None else of_completion[completion.trained])
    return torch.from_numpy(np.concatenate(parts))
