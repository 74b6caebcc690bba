"""Metrics of a block: rewards, verdicts, groups, lengths, advantages and values."""

from collections import Counter
from collections.abc import Sequence
from typing import get_args

import numpy as np
import torch

from logitless.objective.advantage import Estimator, num_clipped
from logitless.objective.value import explained_variance
from logitless.rewards.statistics import reward_statistics
from logitless.train.block import JudgedBlock, ScoredBlock, have_signal, reward_or_nan, sampling_numbers
from logitless.train.record.metrics import Numbers
from logitless.types import Group, VerdictStatus


def block_metrics(block: JudgedBlock, *, seconds: float) -> Numbers:
    """Rewards, verdicts, groups and lengths of all that was sampled, before any group is left out."""
    groups, num_trained = block.sampled, sum(block.kept)
    rewards = torch.tensor([reward_or_nan(r) for g in groups for r in g.rewards], dtype=torch.float64)
    rewarded = rewards[~rewards.isnan()]
    completions = [c for g in groups for c in g.completions]
    lengths = [c.length for c in completions]
    spreads = [_spread(g) for g in groups]
    metrics: Numbers = {
        "reward/mean": float(rewarded.mean()),
        "reward/std": float(rewarded.std()) if len(rewarded) > 1 else 0.0,
        "reward/std_in_group": sum(spreads) / len(spreads),
        "reward/unscored": len(rewards) - len(rewarded),
        "group/zero_signal_fraction": 1 - sum(have_signal(groups)) / len(groups),
        "group/trained": num_trained,
        "group/dropped": len(groups) - num_trained,
        "group/refill_rounds": block.rounds - 1,
        "length/mean": sum(lengths) / len(lengths),
        "length/min": min(lengths),
        "length/max": max(lengths),
        "length/truncated_fraction": sum(c.finish_reason == "length" for c in completions) / len(completions),
        "length/empty": sum(not c.text for c in completions),
        "length/prompt_mean": sum(len(g.prompt.token_ids) for g in groups) / len(groups),
    }
    speed = {"time/rollout_seconds": seconds, "throughput/rollout_tokens_per_second": sum(lengths) / seconds}
    return metrics | turn_metrics(groups) | verdict_metrics(groups) | source_metrics(groups) | speed


def source_metrics(groups: Sequence[Group]) -> Numbers:
    """Metrics of each source of a mixture; none where there is one source."""
    found: Numbers = {}
    for source in dict.fromkeys(g.prompt.source for g in groups):
        if source in ("", "train"):
            continue
        of_source = [g for g in groups if g.prompt.source == source]
        numbers = {
            "prompts": len(of_source),
            "zero_signal_fraction": 1 - sum(have_signal(of_source)) / len(of_source),
            **sampling_numbers(of_source),
        }
        found |= {f"source/{source}/{name}": number for name, number in numbers.items()}
    return found


def turn_metrics(groups: Sequence[Group]) -> Numbers:
    """Turns of completions and tokens of the environment; none where all completions are single turns."""
    completions = [c for g in groups for c in g.completions]
    if not any(c.turn is not None for c in completions):
        return {}
    turns = [c.num_turns for c in completions]
    given = [0 if c.trained is None else int((~c.trained).sum()) for c in completions]
    return {
        "rollout/turns_mean": sum(turns) / len(turns),
        "rollout/turns_max": max(turns),
        "rollout/environment_tokens_mean": sum(given) / len(given),
    }


def lag_metrics(block: JudgedBlock, *, version: int, by_token: bool = False) -> Numbers:
    """Lag of a block: the age of the weights that sampled it; none where the engine gives no versions.

    Args:
        version: of the weights that are about to be trained.
        by_token: whether weights change while completions are under way; then also the mean over tokens, and the share
            of tokens that weights of each age sampled.
    """
    known = [(c.weights_version, c) for g in block.sampled for c in g.completions if c.weights_version is not None]
    lags = [version - oldest for oldest, _ in known]
    if not lags:
        return {}
    mixed = sum(completion.token_versions is not None for _, completion in known)
    of_tokens: Numbers = {}
    if by_token:
        ages = Counter[int]()
        for oldest, completion in known:
            lag = version - (np.full(completion.length, oldest) if (v := completion.token_versions) is None else v)
            ages.update((lag if completion.trained is None else lag[completion.trained]).tolist())
        of_tokens["rollout/token_lag_mean"] = sum(age * count for age, count in ages.items()) / ages.total()
        of_tokens |= {f"rollout/lag_fraction/{age}": ages[age] / ages.total() for age in sorted(ages)}
    return of_tokens | {
        "rollout/lag_mean": sum(lags) / len(lags),
        "rollout/lag_max": max(lags),
        "rollout/mixed_fraction": mixed / len(lags),
    }


def scoring_metrics(block: ScoredBlock, *, passed: bool, seconds: float) -> Numbers:
    """Speed of all scoring passes, and the number of tokens that needed no pass of the policy.

    Args:
        passed: whether the policy made a scoring pass; else the engine gave the log-probs.
    """
    known = int((~block.logp_old.isnan()).sum()) if passed else 0
    others = [each for each in (block.logp_ref, block.logp_teacher) if each is not None]
    num_scored = known + sum(int((~each.isnan()).sum()) for each in others)
    return {
        "time/scoring_seconds": seconds,
        "throughput/scoring_tokens_per_second": num_scored / seconds,
        "saving/scored_tokens": block.packed.num_tokens - known,
    }


def training_metrics(record: Numbers, *, seconds: float) -> Numbers:
    """Duration and speed of a training step."""
    return {
        "time/training_seconds": seconds,
        "throughput/training_tokens_per_second": record["optimizer/tokens"] / seconds,
    }


def verdict_metrics(groups: Sequence[Group]) -> Numbers:
    """Scores and statuses by reward function; pass rates by constraint and by family, over all functions."""
    metrics: Numbers = {}
    checks: dict[str, Counter[str]] = {"passed": Counter(), "count": Counter()}
    for name, found in reward_statistics([v for g in groups for v in g.verdicts]).items():
        if found["mean"] is not None:
            metrics[f"reward/{name}/mean"], metrics[f"reward/{name}/std"] = found["mean"], found["std"]
        for status in get_args(VerdictStatus):
            metrics[f"verdict/{name}/{status}"] = found[status]
        metrics[f"verdict/{name}/failed_fraction"] = (found["error"] + found["timeout"]) / found["count"]
        for kind, by_id in (("constraint", found["constraints"]), ("constraint_family", found["families"])):
            for identifier, numbers in by_id.items():
                for what, counter in checks.items():
                    counter[f"{kind}/{identifier}"] += numbers[what]
    for identifier, count in checks["count"].items():
        metrics[f"{identifier}/pass_rate"] = checks["passed"][identifier] / count
        metrics[f"{identifier}/count"] = count
    return metrics


def advantages_of(block: ScoredBlock, judged: JudgedBlock) -> list[list[float | None]]:
    """The advantage of each judged completion's first token; None for one without a token to train on."""
    counts = torch.tensor(block.packed.inputs.source_counts)
    first = (torch.cumsum(counts, 0) - counts).tolist()
    values = iter([float(block.advantage[f]) if n else None for f, n in zip(first, counts.tolist(), strict=True)])
    return [
        [next(values) if k else None for _ in g.completions] for g, k in zip(judged.sampled, judged.kept, strict=True)
    ]


def advantage_metrics(advantages: Sequence[Sequence[float | None]], estimator: Estimator | None) -> Numbers:
    """Mean and standard deviation of the advantages, and how many were clipped if the estimator clips.

    Example:
        >>> from logitless.objective.advantage import GroupCentered
        >>> advantage_metrics([[0.5, -0.5, None]], GroupCentered(clip=0.5))
        {'advantage/mean': 0.0, 'advantage/std': 0.7071067690849304, 'advantage/clipped': 2}
    """
    limit = None if estimator is None else estimator.clip
    known = torch.tensor([a for group in advantages for a in group if a is not None])
    spread = float(known.std()) if len(known) > 1 else 0.0
    metrics: Numbers = {"advantage/mean": float(known.mean()), "advantage/std": spread}
    if limit is not None:
        metrics["advantage/clipped"] = int(num_clipped(known, limit))
    return metrics


def value_metrics(block: ScoredBlock) -> Numbers:
    """Values of the scoring pass against the returns; none without a value head."""
    if block.value_old is None or block.value_target is None:
        return {}
    return {
        "value/mean": float(block.value_old.mean()),
        "value/return_mean": float(block.value_target.nanmean()),
        "value/explained_variance": float(explained_variance(block.value_old, block.value_target)),
    }


def teacher_metrics(block: ScoredBlock) -> Numbers:
    """The share of tokens that a teacher grades where not all may be, and, for the advantages, their log ratio."""
    found: Numbers = {}
    graded = torch.ones(block.packed.num_tokens, dtype=torch.bool)
    if block.packed.teacher is not None:
        graded = block.packed.teacher >= 0
        found["teacher/graded_fraction"] = float(graded.double().mean())
    if block.logp_teacher is not None and bool(graded.any()):
        found["teacher/log_ratio"] = float((block.logp_teacher - block.packed.logp_sampler)[graded].mean())
    return found


def _spread(group: Group) -> float:
    known = torch.tensor([r for r in group.rewards if r is not None], dtype=torch.float64)
    return float(known.std()) if len(known) > 1 else 0.0
