"""The list of ``docs/metrics.md``, a line for metrics that one description serves together."""

import re
from collections.abc import Sequence

from docs.generate import renewed
from logitless.train.record.metrics import METRICS, Metric


def page(text: str) -> str:
    """The page with its list, which follows the example and ends the page."""
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
        f"- {', '.join(f'`{metric.name}`' for metric in alike)} ({_made(alike)}): {_linked(description)}\n"
        for description, alike in told
    )


_LIKE_EVALUATION = "held_out/{set}/"


def _linked(description: str) -> str:
    return re.sub(r"\bdocs/(\w+)\.md\b", r"[\1](\1.md)", description)


def _made(alike: Sequence[Metric]) -> str:
    """Unit, aggregations and of what, without what goes without saying."""
    made = ", ".join(dict.fromkeys(metric.aggregation for metric in alike))
    unit, over = alike[0].unit, alike[0].over
    if over not in ("run", "evaluation"):
        made += f" of the {over}" if over in ("step", "block") else f" over {over}s"
    return made if unit in ("1", over) else f"{unit}, {made}"
