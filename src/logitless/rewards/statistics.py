"""Statistics of many verdicts, for logs: statuses, scores, constraints, and how often a reward failed."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from logitless.types import Verdict, VerdictStatus

HISTOGRAM_BINS = 10


def failed_shares(verdicts: Sequence[Mapping[str, Verdict]]) -> dict[str, float]:
    """By reward name, the share of completions with status ``error`` or ``timeout``: the reward failed.

    ``missing`` and ``ungradable`` do not count: the one is deliberate, the other the completion's doing.

    Example:
        >>> failed_shares([{"a": Verdict(None, "error")}, {"a": Verdict.graded(1.0)}])
        {'a': 0.5}
    """
    counts, failed = Counter[str](), Counter[str]()
    for row in verdicts:
        counts.update(row.keys())
        failed.update(name for name, verdict in row.items() if verdict.failed)
    return {name: failed[name] / count for name, count in counts.items()}


def by_reward(verdicts: Iterable[Mapping[str, Verdict]]) -> dict[str, list[Verdict]]:
    """The verdicts of many completions, by the reward's name.

    Example:
        >>> {name: len(of) for name, of in by_reward([{"a": Verdict.graded(1.0)}, {"a": Verdict.graded(0.0)}]).items()}
        {'a': 2}
    """
    found: dict[str, list[Verdict]] = {}
    for name, verdict in (pair for row in verdicts for pair in row.items()):
        found.setdefault(name, []).append(verdict)
    return found


def reward_statistics(verdicts: Sequence[Mapping[str, Verdict]]) -> dict[str, dict[str, Any]]:
    """Statistics of many completions, by reward. Take them before zero-signal groups are filtered.

    Args:
        verdicts: one mapping (reward name -> verdict) a completion.

    Returns:
        By reward name, values that JSON can hold: ``count`` and one number a status; ``mean``, ``std`` (of the
        population) and ``histogram`` of the graded scores, None without any (``edges`` of 10 equal bins over [0, 1],
        extended to the range of the scores, and ``counts``); ``constraints`` by id and ``families`` (the part of the id
        before the colon), each with ``count``, ``passed`` and ``pass_rate``.

    Example:
        >>> graded = Verdict.graded(0.5, [("punctuation:no_comma", True), ("startend:quotation", False)])
        >>> found = reward_statistics([{"ifeval": graded}, {"ifeval": Verdict(score=None, status="error")}])["ifeval"]
        >>> found["graded"], found["error"], found["mean"], found["families"]["startend"]["pass_rate"]
        (1, 1, 0.5, 0.0)
    """
    return {name: _statistics(of_reward) for name, of_reward in by_reward(verdicts).items()}


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
