"""Plots as SVG text: drawn without a display, reproducible byte for byte, with no more points than can be seen."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy

Number = float | int

COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#ca8a04", "#0891b2", "#db2777", "#64748b")
_WIDTH = 4.7
"""Inches. Plots are scaled to the width of their card; on a phone letters still have at least eight pixels."""

_MAX_POINTS = 400
_SMOOTHED_FROM = 40
"""Number of points from which a noisy line is drawn faint, with a smoothed one over it."""

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "logitless",
    "font.family": ["sans-serif"],
    "font.size": 10.5,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#94a3b8",
    "axes.grid": True,
    "grid.color": "#e2e8f0",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.color": "#475569",
    "ytick.color": "#475569",
    "text.color": "#0f172a",
    "axes.labelcolor": "#475569",
    "legend.frameon": False,
    "legend.fontsize": 9.5,
}


@dataclass(frozen=True)
class Line:
    """A curve of a plot: points in the order of x; a y that is None or not finite is a gap."""

    label: str
    x: tuple[Number, ...]
    y: tuple[Number | None, ...]


def line_plot(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    level: tuple[str, Number] | None = None,
    moment: tuple[str, Number] | None = None,
    log: bool = False,
    unit_interval: bool = False,
    smooth: bool = True,
) -> str:
    """Curves over a common axis, as an ``<svg>`` document.

    Args:
        lines: at least one. Long ones are averaged over equal stretches.
        level: a label and the height of a horizontal line.
        moment: a label and the place on the x axis of a vertical line.
        log: logarithmic y axis, if there is a positive value.
        unit_interval: y from 0 to 1.
        smooth: draw long lines faint, with their running mean over them; for noisy metrics.

    Example:
        >>> line_plot([Line("reward", (1, 2), (0.5, 1))], x_label="step", y_label="reward").count("<svg")
        1
    """
    from matplotlib import ticker

    with _figure(2.8) as figure:
        axes = _axes(figure, x_label, y_label)
        for number, line in enumerate(lines):
            x, y = thinned(line)
            style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)]}
            if smooth and len(x) >= _SMOOTHED_FROM:
                axes.plot(x, y, linewidth=0.8, alpha=0.3, **style)
                y = smoothed(y)
            style |= {"marker": "o" if len(x) <= 30 else None, "markersize": 3.0}
            axes.plot(x, y, label=line.label, linewidth=1.6, **style)
        if level is not None:
            axes.axhline(level[1], color="#dc2626", linewidth=1.0, linestyle=":", label=level[0])
        if moment is not None:
            axes.axvline(moment[1], color="#dc2626", linewidth=1.0, linestyle="--", label=moment[0])
        axes.margins(x=0.02)
        if log and any(value is not None and value > 0 for line in lines for value in line.y):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        if unit_interval:
            axes.set_ylim(-0.02, 1.02)
        if len(lines) > 1 or level is not None or moment is not None:
            figure.legend(loc="outside upper left", ncols=3)
        return _svg(figure)


def heat_map(
    rows: Sequence[Sequence[Number | None]],
    *,
    x: Sequence[Number],
    y_label: str,
    y_edges: Sequence[Number] | None = None,
    y_names: Sequence[str] | None = None,
    value_label: str,
) -> str:
    """A heat map over blocks, as an ``<svg>`` document.

    The first row is at the bottom for ``y_edges`` and at the top for ``y_names``.

    Args:
        rows: of ``len(x)`` values in [0, 1]; None is blank.
        x: numbers of blocks, ascending; long ones are averaged over equal stretches.
        y_edges: ``len(rows) + 1`` numbers between which the rows lie; or
        y_names: one name a row.

    Example:
        >>> svg = heat_map([[0.5, None]], x=[1, 2], y_label="", y_names=["a"], value_label="rate")
        >>> svg.count("<svg")
        1
    """
    columns = _stretches(len(x))
    values = numpy.array([[numpy.nan if value is None else value for value in row] for row in rows], dtype=float)
    with numpy.errstate(invalid="ignore"):
        filled = numpy.isfinite(values)
        sums, counts = numpy.where(filled, values, 0.0), filled.astype(float)
        thinned = numpy.stack([sums[:, c].sum(1) / counts[:, c].sum(1) for c in columns], axis=1)
    starts = [x[c.start] for c in columns]
    edges = numpy.array([*starts, x[-1] + 1], dtype=float) - 0.5
    height = 2.9 if y_names is None else max(1.6, 0.9 + 0.24 * len(rows))
    with _figure(height, {"axes.grid": False}) as figure:
        axes = _axes(figure, "block", y_label)
        row_edges = numpy.arange(len(rows) + 1, dtype=float) if y_edges is None else numpy.array(y_edges, dtype=float)
        mesh = axes.pcolormesh(edges, row_edges, numpy.ma.masked_invalid(thinned), cmap="Blues", vmin=0.0, vmax=1.0)
        mesh.set_rasterized(len(columns) * len(rows) > 2000)
        if y_names is not None:
            axes.set_yticks(numpy.arange(len(rows)) + 0.5, y_names)
            axes.invert_yaxis()
        bar = figure.colorbar(mesh, ax=axes, label=value_label, pad=0.02)
        bar.outline.set_visible(False)
        return _svg(figure)


def bar_plot(values: Mapping[str, Number], *, x_label: str) -> str:
    """A horizontal bar for each name, the longest first, as an ``<svg>`` document.

    Example:
        >>> bar_plot({"rollout": 3.0, "training": 1.0}, x_label="seconds").count("<svg")
        1
    """
    names = sorted(values, key=lambda name: -values[name])
    with _figure(max(1.3, 0.6 + 0.27 * len(names))) as figure:
        axes = figure.add_subplot()
        bars = axes.barh(names, [values[name] for name in names], color=COLOURS[0], height=0.62)
        axes.bar_label(bars, fmt=_short, padding=3, fontsize=8, color="#475569")
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(x_label)
        return _svg(figure)


def _short(value: float) -> str:
    """Three significant digits, or all digits of a number of a thousand and more."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def smoothed(y: Sequence[float]) -> list[float]:
    """The exponential running mean of a line over about a fifteenth of its length; gaps stay gaps.

    ``m_t = sum_k w^k y_{t-k} / sum_k w^k``, over the points that are finite

    Example:
        >>> smoothed([2.0, 2.0, math.nan, 2.0])
        [2.0, 2.0, nan, 2.0]
    """
    keep = 1 - 1 / max(3.0, len(y) / 15)
    total = weight = 0.0
    found = []
    for value in y:
        if math.isfinite(value):
            total, weight = keep * total + value, keep * weight + 1
        found.append(total / weight if math.isfinite(value) else math.nan)
    return found


def thinned(line: Line) -> tuple[list[float], list[float]]:
    """The line, averaged over at most ``_MAX_POINTS`` equal stretches."""
    y = [math.nan if value is None else float(value) for value in line.y]
    if len(y) <= _MAX_POINTS:
        return [float(value) for value in line.x], y
    means = []
    for stretch in _stretches(len(y)):
        finite = [value for value in y[stretch] if math.isfinite(value)]
        means.append(math.fsum(finite) / len(finite) if finite else math.nan)
    return [float(numpy.mean(line.x[stretch])) for stretch in _stretches(len(y))], means


def _stretches(length: int) -> list[slice]:
    """At most ``_MAX_POINTS`` slices of nearly equal length that cover ``range(length)``."""
    count = min(length, _MAX_POINTS)
    bounds = [length * number // count for number in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


@contextmanager
def _figure(height: float, style: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """An empty figure, with the style set inside; matplotlib is imported here, so that runs start without it."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, **(style or {})}):
        yield Figure(figsize=(_WIDTH, height), layout="constrained")


def _axes(figure: Any, x_label: str, y_label: str) -> Any:
    """Axes with labels, and whole numbers along x."""
    from matplotlib import ticker

    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    return axes


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = text.getvalue()
    return drawn[drawn.index("<svg") :]
