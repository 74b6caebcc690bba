"""Parts of a report's page as HTML: plots with tables of their values, grids of cards, tables, the whole document."""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitless.train.report.plots import Line, Number, line_plot
from logitless.train.store.atomic import write_atomically

_TABLE_ROWS = 25
_BEFORE, _AFTER = Path(__file__).with_name("page.html").read_text("utf-8").split("BODY")


def write_document(path: Path, title: str, sections: Iterable[str]) -> None:
    """Write a page of sections, each of them HTML."""
    text = f"{_BEFORE.replace('TITLE', html.escape(title))}{''.join(sections)}{_AFTER}"
    write_atomically(path, text.encode("utf-8", errors="replace"))


@dataclass(frozen=True)
class Curves:
    """One plot over the optimizer steps.

    Args:
        title, caption, y_label: of the plot.
        labels: what each metric is called in it.
        kinds: ``whole``: y from 0 to 1; ``exact``: not smoothed, because it has no sampling noise; ``log``.
    """

    title: str
    caption: str
    y_label: str
    labels: Mapping[str, str]
    kinds: frozenset[str] = frozenset()

    @classmethod
    def listed(cls, table: str) -> "list[Curves]":
        """Parse a table with lines of title | y label, kinds | metric label, metric label | caption.

        An indented line continues the last.

        Example:
            >>> Curves.listed("Rate | rate, exact | optimizer/learning_rate of AdamW | Of each step.")[0].labels
            {'optimizer/learning_rate': 'of AdamW'}
        """
        found = []
        for line in table.strip().replace("\n    ", " ").splitlines():
            title, y, metrics, caption = line.split(" | ", maxsplit=3)
            y_label, *kinds = y.split(", ")
            labels = {metric: label for metric, _, label in (each.partition(" ") for each in metrics.split(", "))}
            found.append(cls(title, caption, y_label, labels, frozenset(kinds)))
        return found

    def card(self, lines: Sequence[Line], **options: Any) -> str:
        """A plot of lines with a table of values; empty without lines."""
        if not lines:
            return ""
        options |= {"unit_interval": "whole" in self.kinds, "log": "log" in self.kinds}
        smooth = "exact" not in self.kinds
        plot = line_plot(lines, x_label="optimizer step", y_label=self.y_label, smooth=smooth, **options)
        return card_of(self.title, self.caption, plot, _values(lines))


def _values(lines: Sequence[Line]) -> str:
    """A folded table of the lines' values, at no more than ``_TABLE_ROWS`` steps."""
    by_line = [dict(zip(line.x, line.y, strict=True)) for line in lines]
    steps = sorted({step for values in by_line for step in values})
    if len(steps) > _TABLE_ROWS:
        last = len(steps) - 1
        steps = [steps[round(last * row / (_TABLE_ROWS - 1))] for row in range(_TABLE_ROWS)]
    rows = [[f"{step:g}", *(short(values.get(step)) for values in by_line)] for step in steps]
    table = table_of(["step", *(line.label for line in lines)], rows)
    return f"<details class=values><summary>values</summary>{table}</details>"


def card_of(title: str, caption: str, plot: str | None, below: str = "") -> str:
    """A plot with its title and caption; empty without a plot."""
    if plot is None:
        return ""
    source = base64.b64encode(plot.encode()).decode()
    title, caption = html.escape(title), html.escape(caption)
    return (
        f"<figure><h3>{title}</h3><figcaption>{caption}</figcaption>"
        f'<img alt="{title}" src="data:image/svg+xml;base64,{source}">{below}</figure>'
    )


def grid_of(title: str, cards: Iterable[str]) -> str:
    """A section of cards; empty without any."""
    drawn = "".join(cards)
    return f"<section><h2>{html.escape(title)}</h2><div class=grid>{drawn}</div></section>" if drawn else ""


def table_of(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of plain texts."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td><div>{html.escape(cell)}</div></td>' for cell in row)}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def short(value: Number | None) -> str:
    """A number in three digits."""
    return "–" if value is None else f"{value:.3g}"
