"""A block: one round of generation, judged, packed, scored and given advantages, ready to be trained on.

Everything random is drawn from ``derived_seed(seed, ...)`` of the block's number, so a block that was interrupted is
drawn again exactly as it was.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logitless.data.packing import StepPlan, pack
from logitless.objective.advantage import (
    Advantage,
    AdvantageInputs,
    has_signal,
    num_clipped,
)
from logitless.objective.divergence import kl_in_reward
from logitless.objective.value import explained_variance
from logitless.rewards.combine import Unscored, reward_statistics, score_batch, total_reward
from logitless.rewards.contract import WeightedReward
from logitless.rollout.engine import Engine
from logitless.rollout.sampling import SamplingOptions
from logitless.train.config import Backend
from logitless.train.metrics import Numbers
from logitless.train.policy import Scorer
from logitless.types import Group, Prompt, TokenBatch, TokenScores, VerdictStatus


@dataclass(frozen=True)
class Block:
    """What optimizer steps train on.

    Args:
        batch: every sequence of the block, on the CPU, scored; ``token_weight`` is set by each step.
        groups: the sequence indices of each group.
        truncated: whether each completion was cut at its limit.
        metrics: of the block as a whole.
    """

    batch: TokenBatch
    groups: tuple[tuple[int, ...], ...]
    truncated: tuple[bool, ...]
    metrics: Mapping[str, float | int]


def derived_seed(*labels: int | str) -> int:
    """A seed of 63 bits for one purpose, from the run's seed and what it is for.

    Example:
        >>> derived_seed(0, "rollout", 3) == derived_seed(0, "rollout", 3) != derived_seed(0, "rollout", 4)
        True
    """
    digest = hashlib.sha256(repr(labels).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def roll_out(
    engine: Engine,
    prompts: Sequence[Prompt],
    rewards: Sequence[WeightedReward],
    *,
    num_samples: int,
    sampling: SamplingOptions,
    unscored: Unscored,
    seed: int,
) -> list[Group]:
    """Sample ``num_samples`` completions for each prompt and have them judged.

    Args:
        engine: samples.
        prompts: may repeat.
        rewards: judge.
        num_samples: G.
        sampling: settings.
        unscored: what a completion is worth that some of the functions could not score, see ``total_reward``.
        seed: of this round.
    """
    sampled = engine.sample(prompts, num_samples, sampling, seed=seed)
    pairs = [(p, c) for p, completions in zip(prompts, sampled, strict=True) for c in completions]
    names = {name for prompt in prompts for name in prompt.columns}
    verdicts = score_batch(
        rewards,
        [p.messages if p.messages is not None else p.text for p, _ in pairs],
        [c.text for _, c in pairs],
        {name: [p.columns.get(name) for p, _ in pairs] for name in names},
        completion_ids=[c.token_ids for _, c in pairs],
    )
    totals = [total_reward(v, rewards, unscored) for v in verdicts]
    groups = []
    for prompt, completions in zip(prompts, sampled, strict=True):
        n = len(completions)
        groups.append(Group(prompt, tuple(completions), tuple(verdicts[:n]), tuple(totals[:n])))
        verdicts, totals = verdicts[n:], totals[n:]
    return groups


def signal(groups: Sequence[Group]) -> list[bool]:
    """Whether the rewards inside each group differ.

    Example:
        >>> signal([])
        []
    """
    if not groups:
        return []
    rewards, group = _rewards(groups)
    return has_signal(rewards, group).tolist()


def score(
    scorer: Scorer, batch: TokenBatch, micro_batches: Sequence[Sequence[int]], *, temperature: float, backend: Backend
) -> TokenScores:
    """Scores of a block under a policy, without gradient, in the packing it is given.

    The packing is that of the first epoch, so the first optimizer step meets the very same numbers: its ratio is 1.

    Args:
        scorer: policy or reference.
        batch: the block, on the CPU.
        micro_batches: the sequences of each packed row; together every sequence with a scored token, once.
        temperature: of sampling.
        backend: of the head.

    Returns:
        CPU tensors, float32, in the block's order; ``value`` where the scorer has a value head.
    """
    assert batch.inputs is not None
    counts = torch.tensor(batch.inputs.source_counts)
    starts = torch.cumsum(counts, 0) - counts
    scored: dict[str, Tensor] = {}
    with torch.no_grad():
        for sequences in micro_batches:
            scores = scorer.scores(batch.take(sequences), temperature=temperature, backend=backend)
            where = torch.cat([torch.arange(int(starts[s]), int(starts[s] + counts[s])) for s in sequences])
            found = {name: v for name in ("logp", "entropy", "value") if (v := getattr(scores, name)) is not None}
            on_host = torch.stack([values.float() for values in found.values()]).cpu()
            for name, values in zip(found, on_host, strict=True):
                scored.setdefault(name, torch.empty(batch.num_tokens))[where] = values
    return TokenScores(**scored)


def packed(groups: Sequence[Group]) -> tuple[TokenBatch, tuple[tuple[int, ...], ...]]:
    """The groups' completions end to end, and the sequence indices of each group."""
    batch = pack([(g.prompt, c) for g in groups for c in g.completions])
    members: list[tuple[int, ...]] = []
    for g in groups:
        first = sum(len(m) for m in members)
        members.append(tuple(range(first, first + len(g.completions))))
    return batch, tuple(members)


def micro_batches_of(plan: Sequence[StepPlan]) -> list[tuple[int, ...]]:
    """The packed rows of all steps of an epoch.

    Example:
        >>> micro_batches_of([StepPlan((0, 1), ((0,), (1,)))])
        [(0,), (1,)]
    """
    return [row for step in plan for row in step.micro_batches]


def with_advantages(
    batch: TokenBatch,
    groups: Sequence[Group],
    estimator: Advantage | None,
    *,
    weights: Mapping[str, float],
    kl_beta: float = 0.0,
) -> TokenBatch:
    """The block with ``advantage`` (and ``value_target``) set from the groups' rewards.

    A KL in the reward is paid per token by estimators of token returns, and subtracted as its sum over the sequence
    before group statistics by the others. A completion without a reward has advantage 0 and no value target (NaN).

    Args:
        batch: scored (``logp_old``, with ``kl_beta`` also ``logp_ref``; ``value_old`` for GAE).
        groups: in the order they were packed.
        estimator: of the algorithm; None (a loss that reads no advantage) gives 0.
        weights: of the reward functions, for estimators that take them apart.
        kl_beta: coefficient of the KL in the reward; 0 for none.

    Raises:
        ConfigurationError: a KL in the reward beside an estimator that reads the functions and not their sum.
    """
    if estimator is None:
        return replace(batch, advantage=torch.zeros(batch.num_tokens))
    rewards, group = _rewards(groups)
    kl = None
    if kl_beta:
        assert batch.logp_old is not None
        assert batch.logp_ref is not None
        kl = kl_beta * kl_in_reward(batch.logp_old, batch.logp_ref)
    scores = [[_number(v[name].score) for name in weights] for g in groups for v in g.verdicts]
    found = estimator(
        AdvantageInputs(
            rewards=rewards,
            group=group,
            sequence=batch.sequence,
            kl=kl,
            turn=batch.turn,
            scores=torch.tensor(scores),
            weights=torch.tensor(list(weights.values())),
            values=batch.value_old,
        )
    )
    return replace(batch, advantage=found.advantage, value_target=found.value_target)


def block_metrics(drawn: Sequence[Group], *, num_trained: int, rounds: int) -> Numbers:
    """Rewards, verdicts, groups and lengths of everything that was drawn, before any group is left out.

    Args:
        drawn: all groups of the block, those of refills included.
        num_trained: how many of them are trained on.
        rounds: of generation.
    """
    rewards = torch.tensor([_number(r) for g in drawn for r in g.rewards], dtype=torch.float64)
    scored = rewards[~rewards.isnan()]
    completions = [c for g in drawn for c in g.completions]
    lengths = [c.length for c in completions]
    spreads = [_spread(g) for g in drawn]
    metrics: Numbers = {
        "reward/mean": float(scored.mean()),
        "reward/std": float(scored.std()) if len(scored) > 1 else 0.0,
        "reward/std_in_group": sum(spreads) / len(spreads),
        "reward/unscored": len(rewards) - len(scored),
        "group/zero_signal_fraction": 1 - sum(signal(drawn)) / len(drawn),
        "group/trained": num_trained,
        "group/dropped": len(drawn) - num_trained,
        "group/refill_rounds": rounds - 1,
        "length/mean": sum(lengths) / len(lengths),
        "length/min": min(lengths),
        "length/max": max(lengths),
        "length/truncated_fraction": sum(c.finish_reason == "length" for c in completions) / len(completions),
        "length/empty": sum(not c.text for c in completions),
        "length/prompt_mean": sum(len(g.prompt.token_ids) for g in drawn) / len(drawn),
    }
    return metrics | verdict_metrics(drawn)


def verdict_metrics(groups: Sequence[Group]) -> Numbers:
    """Scores and statuses by reward function; pass rates by constraint and family, over all functions that check it."""
    metrics: Numbers = {}
    checks: dict[str, Counter[str]] = {"passed": Counter(), "count": Counter()}
    for name, found in reward_statistics([v for g in groups for v in g.verdicts]).items():
        if found["mean"] is not None:
            metrics[f"reward/{name}/mean"], metrics[f"reward/{name}/std"] = found["mean"], found["std"]
        for status in get_args(VerdictStatus):
            metrics[f"verdict/{name}/{status}"] = found[status]
        for kind, by_id in (("constraint", found["constraints"]), ("constraint_family", found["families"])):
            for identifier, numbers in by_id.items():
                for what, counter in checks.items():
                    counter[f"{kind}/{identifier}"] += numbers[what]
    for identifier, count in checks["count"].items():
        metrics[f"{identifier}/pass_rate"] = checks["passed"][identifier] / count
        metrics[f"{identifier}/count"] = count
    return metrics


def advantages_of(batch: TokenBatch, drawn: Sequence[Group], kept: Sequence[bool]) -> list[list[float | None]]:
    """The advantage of each drawn completion, its first token's; None where it has no token that is trained on.

    Args:
        batch: the kept groups, packed in order.
        drawn: groups of the block.
        kept: which of them are in the batch.
    """
    assert batch.inputs is not None
    counts = torch.tensor(batch.inputs.source_counts)
    first = (torch.cumsum(counts, 0) - counts).tolist()
    values = iter([float(batch.advantage[f]) if n else None for f, n in zip(first, counts.tolist(), strict=True)])
    return [[next(values) if k else None for _ in g.completions] for g, k in zip(drawn, kept, strict=True)]


def advantage_metrics(advantages: Sequence[Sequence[float | None]], limit: float | None) -> Numbers:
    """Mean and spread of the advantages that there are, and how many were held at the estimator's clip.

    Example:
        >>> advantage_metrics([[0.5, -0.5, None]], limit=0.5)
        {'advantage/mean': 0.0, 'advantage/std': 0.7071067690849304, 'advantage/clipped': 2}
    """
    known = torch.tensor([a for group in advantages for a in group if a is not None])
    spread = float(known.std()) if len(known) > 1 else 0.0
    metrics: Numbers = {"advantage/mean": float(known.mean()), "advantage/std": spread}
    if limit is not None:
        metrics["advantage/clipped"] = int(num_clipped(known, limit))
    return metrics


def value_metrics(batch: TokenBatch) -> Numbers:
    """What the value head said in the scoring pass, against the returns; nothing where there is no value head.

    Example:
        >>> value_metrics(TokenBatch(
        ...     sequence=torch.tensor([0, 0]), num_sequences=1, advantage=torch.zeros(2), token_weight=torch.ones(2),
        ...     value_old=torch.tensor([0.0, 1.0]), value_target=torch.tensor([0.0, 2.0])))
        {'value/mean': 0.5, 'value/return_mean': 1.0, 'value/explained_variance': 0.75}
    """
    if batch.value_old is None or batch.value_target is None:
        return {}
    return {
        "value/mean": float(batch.value_old.mean()),
        "value/return_mean": float(batch.value_target.nanmean()),
        "value/explained_variance": float(explained_variance(batch.value_old, batch.value_target)),
    }


def _spread(group: Group) -> float:
    known = torch.tensor([r for r in group.rewards if r is not None], dtype=torch.float64)
    return float(known.std()) if len(known) > 1 else 0.0


def _rewards(groups: Sequence[Group]) -> tuple[Float[Tensor, "B"], Int[Tensor, "B"]]:
    rewards = torch.tensor([_number(r) for g in groups for r in g.rewards])
    return rewards, torch.tensor([i for i, g in enumerate(groups) for _ in g.completions])


def _number(score: float | None) -> float:
    return math.nan if score is None else score
