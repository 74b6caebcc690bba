"""What is said of a block's tokens before it is trained on: their scores under each policy, and their advantages.

Scores come from passes without gradient, or as an engine gave them. An engine that is bitwise identical to the policy
spares the policy's pass. Its promise is about this machine, so it is checked: every few blocks the pass is made all the
same, and one token with another bit ends the run. Advantages come from the rewards of groups, and with them the returns
that values are fitted to.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from logitless.distributed.ranks import Ranks
from logitless.errors import ConfigurationError, EngineError, TrainingError
from logitless.objective.advantage import AdvantageInputs, AdvantageOutput, Estimator, turn_index
from logitless.objective.divergence import kl_in_reward
from logitless.objective.inputs import required
from logitless.rollout.engine import Engine, ExactEngine
from logitless.rollout.sampling import SamplingOptions
from logitless.train.block import PackedBlock, reward_or_nan, rewards_of_groups
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


def advantages(
    block: PackedBlock,
    groups: Sequence[Group],
    estimator: Estimator | None,
    *,
    weights: Mapping[str, float],
    kl_beta: float = 0.0,
    old: TokenScores | None = None,
    logp_ref: Float[Tensor, "N"] | None = None,
) -> AdvantageOutput:
    """What each token is worth, and what a value head is fitted to, from the groups' rewards.

    A KL in the reward, and what an environment paid at the turns, is paid token by token by estimators of token
    returns, and summed over the completion before group statistics by the others. A completion without a reward has
    advantage 0 and no value target (NaN).

    Args:
        block: packed.
        groups: of every rank, in the order they were packed.
        estimator: of the algorithm; None (a loss that reads no advantage) gives 0.
        weights: of the reward functions, for estimators that take them apart.
        kl_beta: coefficient of the KL in the reward; 0 for none.
        old: scores under the policy, for the KL and for estimators that need values; None where nothing reads them.
        logp_ref: [N] for the KL.

    Raises:
        ConfigurationError: rewards of turns beside an estimator that reads the functions and not their sum.
    """
    if estimator is None:
        return AdvantageOutput(torch.zeros(block.packed.num_tokens))
    kl = None
    if kl_beta:
        logp_old = required(None if old is None else old.logp, "logp_old")
        kl = kl_beta * kl_in_reward(logp_old, required(logp_ref, "logp_ref"))
    turn_rewards = rewards_of_turns(block, groups)
    if turn_rewards is not None and estimator.reads_functions:
        raise ConfigurationError(
            needed=f"rewards of functions, which {estimator.name!r} takes apart",
            given="rewards that an environment paid at the turns",
            remedy="Choose another advantage.",
        )
    rewards, group = rewards_of_groups(groups)
    if turn_rewards is not None:  # what is left for the end
        rewards = rewards - torch.tensor([sum(paid) for g in groups for paid in _paid(g)], dtype=rewards.dtype)
    scores = [
        [reward_or_nan(v[name].score if name in v else None) for name in weights] for g in groups for v in g.verdicts
    ]  # a reward that does not judge the prompt's source has said nothing
    inputs = AdvantageInputs(
        rewards=rewards,
        group=group,
        sequence=block.packed.sequence,
        kl=kl,
        turn_rewards=turn_rewards,
        turn=block.packed.turn,
        scores=torch.tensor(scores),
        weights=torch.tensor(list(weights.values())),
        values=None if old is None else old.value,
    )
    return estimator.checked(inputs)


def rewards_of_turns(block: PackedBlock, groups: Sequence[Group]) -> Float[Tensor, "K"] | None:
    """What the environment paid for each turn that has a scored token, in the order of the tokens; None if nothing.

    Args:
        block: packed.
        groups: in the order they were packed.
    """
    paid = [turns for g in groups for turns in _paid(g)]
    if not any(paid):
        return None
    sequence, turn = block.packed.sequence, block.packed.turn
    owner = turn_index(sequence, turn)
    first = torch.cat([torch.ones(1, dtype=torch.bool), owner.diff() > 0])
    turns = zip(sequence[first].tolist(), turn[first].tolist(), strict=True)
    return torch.tensor([paid[s][t] if paid[s] else 0.0 for s, t in turns])


def _paid(group: Group) -> tuple[tuple[float, ...], ...]:
    return group.turn_rewards or ((),) * len(group.completions)
