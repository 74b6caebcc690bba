"""Log-probs and advantages of a block before it is trained on.

Log-probs come from scoring passes (without gradient), or from the engine if it is bitwise identical to the policy. The
latter holds for this machine only and is therefore checked: every few blocks the scoring pass is made as well, and one
token with another bit ends the run. Advantages, and the returns that values are fitted to, come from the rewards.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from logitless.distributed.ranks import Ranks
from logitless.errors import ConfigurationError, EngineError, TrainingError
from logitless.objective.advantage import AdvantageInputs, AdvantageOutput, Estimator, turn_index
from logitless.objective.divergence import kl_in_reward
from logitless.objective.inputs import required
from logitless.rollout.sampling import SamplingOptions
from logitless.train.block import PackedBlock, reward_or_nan, rewards_of_groups
from logitless.train.learn.policy import Scorer
from logitless.train.recipe.training import Backend
from logitless.types import Completion, Group, PackedBatch, TokenScores

_FURTHER = ("value", "sum_squares")
_COLUMNS = ("logp", "entropy", *_FURTHER)


def scores_of(
    scorer: Scorer,
    batch: PackedBatch,
    micro_batches: Sequence[Sequence[int]],
    *,
    temperature: float,
    backend: Backend,
    ranks: Ranks = Ranks.alone(),
    **more: bool,
) -> TokenScores:
    """A scoring pass.

    Its rows are those of the first epoch, so that the first optimizer step computes the same numbers: its ratio is 1.

    Args:
        scorer: policy or reference.
        batch: on the CPU.
        micro_batches: the sequences of each packed row of this rank. The rows of all ranks together hold each sequence
            that is to be scored once.

    Returns:
        CPU tensors, float32, of all tokens in the batch's order, on every rank; NaN for sequences that are in no row.
        ``value`` and ``sum_squares`` if the scorer gives them.
    """
    given = set[str]()
    places, scored = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, len(_COLUMNS))]
    with torch.no_grad():
        for sequences in micro_batches:
            scores = scorer.scores(batch.take(sequences), temperature=temperature, backend=backend, **more)
            found = {name: each for name in _COLUMNS if (each := getattr(scores, name)) is not None}
            given |= found.keys()
            absent = torch.full_like(scores.logp, torch.nan)
            scored.append(torch.stack([found.get(name, absent).float() for name in _COLUMNS], dim=1))
            places.append(batch.tokens_of(sequences))
    values = torch.full((batch.num_tokens, len(_COLUMNS)), torch.nan)
    on_host = torch.cat([each.cpu() for each in scored])  # waits for the device, after all rows were launched
    values[ranks.gather(torch.cat(places))] = ranks.gather(on_host)
    logp, entropy, *further = (column.contiguous() for column in values.unbind(1))
    # This rank may have no row.
    known = {name: each for name, each in zip(_FURTHER, further, strict=True) if ranks.any(name in given)}
    return TokenScores(logp, entropy, **known)


def sampled_scores(
    groups: Sequence[Group], options: SamplingOptions, version: int, *, exact: bool
) -> TokenScores | None:
    """logp and entropy [N] of the groups' trained tokens by the engine; None if a scoring pass is needed.

    Args:
        options: of sampling; with top-p and the like, ``logp_policy`` is taken.
        version: of the policy's weights, which must have sampled all completions.
        exact: of the block.
    """
    if not exact or options.temperature == 0:
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
    """Refuse completions without any ``logp_sampler``, for an algorithm that needs it.

    Raises:
        EngineError: no completion has it.
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
    """Number of tokens whose log-prob or entropy differs in any bit.

    Example:
        >>> a = TokenScores(torch.zeros(2), torch.ones(2))
        >>> mismatched(a, a), mismatched(a, TokenScores(torch.tensor([0.0, 1e-40]), torch.ones(2)))
        (0, 1)
    """
    return int((_differ(sampled.logp, scored.logp) | _differ(sampled.entropy, scored.entropy)).sum())


def check_same(sampled: TokenScores, scored: TokenScores) -> int:
    """Check that sampled scores are bitwise those of a scoring pass; returns 0, the number of differing tokens.

    Raises:
        TrainingError: some tokens differ.
    """
    count = mismatched(sampled, scored)
    if count:
        largest = float((sampled.logp - scored.logp).abs().max())
        raise TrainingError(
            needed="log-probs of the sampler, bitwise identical to training",
            given=f"{count} of {len(sampled.logp)} tokens that differ, by at most {largest:.3g} nats",
            remedy="Run `python benchmarks/bits.py` of the repository on this machine; sample with rollout.engine: "
            "{name: transformers}, which promises no such thing.",
        )
    return count


def _differ(a: Tensor, b: Tensor) -> Tensor:
    return a.view(torch.int32) != b.view(torch.int32)


def _end_to_end(completions: Sequence[Completion], values: Sequence[np.ndarray | None]) -> Tensor:
    """The values of trained tokens of all completions, concatenated, float32."""
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
    state: Mapping[str, float] = MappingProxyType({}),
) -> AdvantageOutput:
    """Advantages of all tokens, and value targets, from the groups' rewards.

    Estimators of token returns count a KL in the reward at its token, and rewards of turns at their turn; the others
    sum them over the completion before group statistics. A completion without a reward has advantage 0 and value
    target NaN.

    Args:
        estimator: of the algorithm; None, for a loss that reads no advantage, gives 0.
        kl_beta: coefficient of the KL in the reward; 0 for none.
        old: scores under the policy, for the KL and for estimators that need values; else None.
        logp_ref: [N] for the KL.
        state: of an estimator that reads several blocks.

    Raises:
        ConfigurationError: the environment gives rewards of turns, and the estimator reads reward functions alone.
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
    if turn_rewards is not None:  # the rest of the reward counts at the end
        rewards = rewards - torch.tensor([sum(paid) for g in groups for paid in _paid(g)], dtype=rewards.dtype)
    scores = [
        [reward_or_nan(v[name].score if name in v else None) for name in weights] for g in groups for v in g.verdicts
    ]  # a reward has no verdict on prompts of sources that it is not for
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
        logp_old=None if old is None else old.logp,
        sum_squares=None if old is None else old.sum_squares,
        baseline=torch.tensor([reward_or_nan(g.baseline) for g in groups for _ in g.completions], dtype=rewards.dtype),
        columns={
            name: [g.prompt.columns.get(name) for g in groups for _ in g.completions]
            for name in estimator.reads_columns
        },
        state=state,
    )
    return estimator.checked(inputs)


def rewards_of_turns(block: PackedBlock, groups: Sequence[Group]) -> Float[Tensor, "K"] | None:
    """The environment's reward for each turn with a scored token, in the order of the tokens; None if there is none."""
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
