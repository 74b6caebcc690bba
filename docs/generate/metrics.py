"""The list of ``docs/metrics.md``; metrics with one description share a line."""

from collections.abc import Sequence

from docs.generate import linked, renewed
from logitless.train.record.metrics import METRICS, Metric


def page(text: str) -> str:
    """The page with its list, which follows the example of writers."""
    return renewed(text, "```\n\n", rows())


def rows() -> str:
    """The list.

    Example:
        >>> rows().splitlines()[0][:8]
        '- `step`'
    """
    told: list[tuple[str, list[Metric]]] = []
    for metric in (each for each in METRICS if not each.name.startswith(_LIKE_EVALUATION)):
        first = told[-1][1][0] if told else metric
        alike = (metric.unit, metric.over) == (first.unit, first.over)
        if told and alike and metric.description in ("the same", told[-1][0]):
            told[-1][1].append(metric)
        else:
            told.append((metric.description, [metric]))
    return "".join(
        f"- {', '.join(f'`{metric.name}`' for metric in alike)} ({_made(alike)}): {linked(description)}\n"
        for description, alike in told
    )


_LIKE_EVALUATION = "held_out/{set}/"


def _made(alike: Sequence[Metric]) -> str:
    """Unit, aggregations and what they are taken over; what is obvious is left out."""
    made = ", ".join(dict.fromkeys(metric.aggregation for metric in alike))
    unit, over = alike[0].unit, alike[0].over
    if over not in ("run", "evaluation"):
        made += f" of the {over}" if over in ("step", "block") else f" over {over}s"
    return made if unit in ("1", over) else f"{unit}, {made}"
