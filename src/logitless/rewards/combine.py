"""Several rewards at once: their verdicts by name, one number a completion, and what to log about them."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from logitless.errors import ConfigurationError, InputError
from logitless.rewards.reward import Columns, Text, TextReward, WeightedReward
from logitless.types import Verdict, VerdictStatus

Unscored: TypeAlias = Literal["leave_out", "drop"]

HISTOGRAM_BINS = 10


def weighted(rewards: Sequence[TextReward]) -> tuple[WeightedReward, ...]:
    """The entries of a recipe's list of rewards, each under its label, with its weight.

    Raises:
        ConfigurationError: two have the same name, or there are gates and nothing beside them.

    Example:
        >>> from logitless.rewards.text.length import Length
        >>> entries = weighted([Length(weight=0.5), Length(unit="words", label="words")])
        >>> [(entry.name, entry.weight) for entry in entries]
        [('length', 0.5), ('words', 1.0)]
    """
    entries = tuple(WeightedReward(r, r.weight, r.metric_name, r.gate, r.sources) for r in rewards)
    check_names(entries)
    if entries and all(entry.gate for entry in entries):
        raise ConfigurationError(
            needed="a reward that is not a gate",
            given=f"{len(entries)} gates only",
            remedy="Add a reward, or set `gate: false` on one.",
        )
    return entries


def check_names(rewards: Sequence[WeightedReward]) -> None:
    """Every reward has a name of its own.

    Raises:
        ConfigurationError: two have the same name.

    Example:
        >>> from logitless.rewards.text.length import Length
        >>> check_names([WeightedReward(Length())])
    """
    twice = [name for name, times in Counter(reward.name for reward in rewards).items() if times > 1]
    if twice:
        raise ConfigurationError(
            needed="a different name for every reward",
            given=f"{', '.join(map(repr, twice))} more than once",
            remedy="Give one of them a `label`.",
        )


def score_batch(
    rewards: Sequence[WeightedReward],
    prompts: Sequence[Text],
    completions: Sequence[Text],
    columns: Columns,
    completion_ids: Sequence[Sequence[int]] | None = None,
) -> list[dict[str, Verdict]]:
    """What every reward says of every completion.

    Args:
        rewards: rewards and gates, with names of their own.
        prompts: one a completion.
        completions: what is scored.
        columns: data rows by column, one value a completion.
        completion_ids: sampled token ids, for rewards that count tokens.

    Returns:
        One mapping (reward name -> verdict) a completion, in order.

    Raises:
        ConfigurationError: two rewards have the same name, or one of them lacks a column.
        InputError: inputs of different lengths, or a reward that gives another number of verdicts.

    Example:
        >>> from logitless.rewards.text.length import Length
        >>> score_batch([WeightedReward(Length(unit="words"))], ["Say hi."], ["hi there"], {})[0]["length"].score
        2.0
    """
    check_names(rewards)
    given: dict[str, list[Verdict]] = {}
    for entry in rewards:
        given[entry.name] = entry.reward.verdicts(prompts, completions, columns, completion_ids)
        if len(given[entry.name]) != len(completions):
            raise InputError(
                needed=f"a verdict for each of {len(completions)} completions",
                given=f"{len(given[entry.name])} from reward {entry.name!r}",
                remedy="Return one Verdict a completion, in order.",
            )
    return [{name: verdicts[row] for name, verdicts in given.items()} for row in range(len(completions))]


def weighted_sum(
    verdicts: Mapping[str, Verdict],
    weights: Mapping[str, float],
    *,
    gates: Sequence[str] = (),
    unscored: Unscored = "leave_out",
) -> float | None:
    """``sum_name weights[name] * verdicts[name].score``, 0 where a gate is shut, None where there is nothing to sum.

    A gate is open where its score is above 0. A gate without a score leaves the reward unknown: None.

    Args:
        verdicts: of one completion, by reward name.
        weights: by reward name; other verdicts do not count.
        gates: names of the gates.
        unscored: ``leave_out`` sums the scored rewards alone and gives None only where there is none; ``drop`` gives
            None as soon as one of them has no score.

    Raises:
        InputError: a weight or a gate without a verdict.

    Example:
        >>> timeout = Verdict(score=None, status="timeout")
        >>> weighted_sum({"exact": Verdict.graded(1.0), "style": timeout}, {"exact": 2.0, "style": 1.0})
        2.0
        >>> weighted_sum({"style": timeout}, {"style": 1.0}) is None
        True
    """
    absent = [name for name in (*weights, *gates) if name not in verdicts]
    if absent:
        raise InputError(
            needed=f"a verdict of each of {[*weights, *gates]}",
            given=f"none of {absent}",
            remedy="Score with the same rewards that the weights are for.",
        )
    openness = [verdicts[name].score for name in gates]
    scores = {name: verdicts[name].score for name in weights}
    scored = {name: score for name, score in scores.items() if score is not None}
    if None in openness or not scored or (unscored == "drop" and len(scored) < len(scores)):
        return None
    if any(score <= 0 for score in openness if score is not None):
        return 0.0
    return math.fsum(weights[name] * score for name, score in scored.items())


def total_reward(
    verdicts: Mapping[str, Verdict], rewards: Sequence[WeightedReward], unscored: Unscored = "leave_out"
) -> float | None:
    """The number a completion is trained on: ``weighted_sum`` with the weights and gates of these rewards.

    Example:
        >>> from logitless.rewards.text.length import Length
        >>> rewards = weighted([Length(unit="words", weight=0.5)])
        >>> total_reward(score_batch(rewards, ["Say hi."], ["hi there"], {})[0], rewards)
        1.0
    """
    return weighted_sum(
        verdicts,
        {entry.name: entry.weight for entry in rewards if not entry.gate},
        gates=[entry.name for entry in rewards if entry.gate],
        unscored=unscored,
    )


def failed_shares(verdicts: Sequence[Mapping[str, Verdict]]) -> dict[str, float]:
    """By reward name, the share of completions at which it failed by no fault of theirs: ``error`` or ``timeout``.

    What is ``missing`` was left out on purpose, and what is ``ungradable`` has a score: neither counts.

    Example:
        >>> failed_shares([{"a": Verdict(None, "error")}, {"a": Verdict.graded(1.0)}])
        {'a': 0.5}
    """
    counts, failed = Counter[str](), Counter[str]()
    for row in verdicts:
        counts.update(row.keys())
        failed.update(name for name, verdict in row.items() if verdict.failed)
    return {name: failed[name] / count for name, count in counts.items()}


def reward_statistics(verdicts: Sequence[Mapping[str, Verdict]]) -> dict[str, dict[str, Any]]:
    """What to log of many completions, for each reward: how many of each status, the scores, and each constraint.

    Take them before groups without a signal are filtered.

    Args:
        verdicts: one mapping (reward name -> verdict) a completion.

    Returns:
        By reward name, values that survive JSON: ``count`` and one number a status; ``mean``, ``std`` (of the
        population) and ``histogram`` (``edges`` of 10 equal bins over [0, 1], or over the range of the scores where
        they leave it, and ``counts``) of the graded scores, None where there are none; ``constraints`` by id and
        ``families`` (the part of the id before the colon), each with ``count``, ``passed`` and ``pass_rate``.

    Example:
        >>> graded = Verdict.graded(0.5, [("punctuation:no_comma", True), ("startend:quotation", False)])
        >>> found = reward_statistics([{"ifeval": graded}, {"ifeval": Verdict(score=None, status="error")}])["ifeval"]
        >>> found["graded"], found["error"], found["mean"], found["families"]["startend"]["pass_rate"]
        (1, 1, 0.5, 0.0)
    """
    names = dict.fromkeys(name for row in verdicts for name in row)
    return {name: _statistics([row[name] for row in verdicts if name in row]) for name in names}


def _statistics(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    statuses = Counter(verdict.status for verdict in verdicts)
    scores = [verdict.score for verdict in verdicts if verdict.score is not None]
    constraints = [pair for verdict in verdicts for pair in verdict.detail]
    mean = math.fsum(scores) / len(scores) if scores else None
    return {
        "count": len(verdicts),
        **{status: statuses[status] for status in get_args(VerdictStatus)},
        "mean": mean,
        "std": None if mean is None else math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / len(scores)),
        "histogram": _histogram(scores),
        "constraints": _pass_rates(constraints),
        "families": _pass_rates([(identifier.partition(":")[0], passed) for identifier, passed in constraints]),
    }


def _histogram(scores: Sequence[float]) -> dict[str, list[float]] | None:
    if not scores:
        return None
    low, high = min(0.0, *scores), max(1.0, *scores)
    width = (high - low) / HISTOGRAM_BINS
    bins = Counter(min(int((score - low) / width), HISTOGRAM_BINS - 1) for score in scores)
    return {
        "edges": [low + i * width for i in range(HISTOGRAM_BINS)] + [high],
        "counts": [bins[i] for i in range(HISTOGRAM_BINS)],
    }


def _pass_rates(constraints: Sequence[tuple[str, bool]]) -> dict[str, dict[str, float]]:
    count = Counter(identifier for identifier, _ in constraints)
    passed = Counter(identifier for identifier, satisfied in constraints if satisfied)
    return {i: {"count": n, "passed": passed[i], "pass_rate": passed[i] / n} for i, n in sorted(count.items())}
