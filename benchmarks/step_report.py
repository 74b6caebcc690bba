"""The tables and the plot of ``benchmarks/step.py``, made from its JSON files and from nothing else."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from logitless.models.activations import MODE_WORDS
from shapes import WORKLOADS
from step_profile import CLASSES, OTHER
from step_rows import PROFILED

Row = dict[str, Any]
NAMES = {
    "logitless": "logitless",
    "logitless-budget-0": "logitless, memory budget 0",
    "logitless-8bit-moments": "logitless, 8-bit moments",
    "logitless-host-moments": "logitless, moments on the host",
    "logitless-autocast": "logitless, autocast",
    "trl": "TRL",
    "trl-without-recomputation": "TRL, no recomputation",
}
DRAWN = ("trl", "logitless-autocast", "logitless")
"""Whose kernels are shown; the result files have those of all."""

HEADS = {
    "full-logits": "full logits",
    "logitless": "logitless",
    "logitless-budget-0": "logitless, memory budget 0",
    "trl": "TRL",
}


def load(folder: Path) -> list[dict[str, Any]]:
    """All result files of a folder, small models first.

    Example:
        >>> load(Path("/nonexistent"))
        []
    """
    documents = [json.loads(path.read_text()) for path in folder.glob("step-*.json")]
    return sorted(documents, key=lambda d: d["model"]["parameters"])


def load_activations(folder: Path) -> list[Row]:
    """Rows of ``benchmarks/activations.py``.

    Example:
        >>> load_activations(Path("/nonexistent"))
        []
    """
    return [row for path in sorted(folder.glob("activations-*.json")) for row in json.loads(path.read_text())["rows"]]


def tables(folder: Path) -> dict[str, str]:
    """Of the pages, by part."""
    results = load(folder)
    return {
        "": table(results),
        "longest": longest_table(results),
        "activations": activations_table(load_activations(folder)),
        "half live": half_live_table(results),
        "least memory": least_memory_table(results),
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: a table a model, a row a workload: a step of each contender, and its peak of memory."""
    if not results:
        return "No results yet: run `python benchmarks/step.py` on a GPU."
    e = results[0]["environment"]
    lines = [
        f"{e['gpu']}, driver {e['driver']}, torch {e['torch']}, triton {e['triton']}, transformers "
        f"{e['transformers']}, TRL {e['trl']}. Milliseconds of a step (peak GB). {_agreement(results)}",
        "",
    ]
    for document in results:
        if document["rows"]:
            lines += [*_model_table(document), ""]
    return "\n".join(lines).rstrip()


def _agreement(results: Sequence[dict[str, Any]]) -> str:
    """How far contenders are from the autocast form, at most."""
    rows = [row for document in results for row in document["rows"] if row.get("loss_difference") is not None]
    if not rows:
        return ""
    loss, norm = (max(row[name] for row in rows) for name in ("loss_difference", "grad_norm_difference"))
    return (
        f"Losses differ from those of *logitless, autocast* by at most {loss:.1e}, "
        f"norms of gradients by at most {norm:.1%}."
    )


TABLE = ("logitless", "logitless-autocast", "trl", "trl-without-recomputation")
"""Contenders of the table, with every group live; the others have tables of their own."""


def _model_table(document: dict[str, Any]) -> list[str]:
    columns = ("workload", "tokens/s", "over TRL", *(NAMES[contender] for contender in TABLE))
    lines = [
        f"**{document['model']['title']}**",
        "",
        "| " + " | ".join(columns) + " |",
        "|---|" + "--:|" * (len(columns) - 1),
    ]
    for workload in WORKLOADS:
        rows = [_row(document, contender, workload, 1.0) for contender in TABLE]
        if any(rows):
            cells = [workload, *_numbers(rows[0]), *map(_step, rows)]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _numbers(row: Row) -> list[str]:
    forms = {"tokens_per_second": "{:,.0f}", "over_trl": "{:.2f}x"}
    return ["–" if row.get(name) is None else form.format(row[name]) for name, form in forms.items()]


def _step(row: Row) -> str:
    """Time and memory of a step, or why there is none."""
    if not row:
        return "–"
    if row["seconds"] is None:
        return str(row["failure"])
    peak = "" if row["peak_bytes"] is None else f" ({row['peak_bytes'] / 1e9:.1f})"
    return f"{1000 * row['seconds']:.0f}{peak}"


def half_live_table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: how many times faster a step with half of the groups live is than with all.

    Example:
        >>> rows = [{"workload": "long", "contender": "logitless", "live": 1 / n, "seconds": 1 / n} for n in (1, 2)]
        >>> print(half_live_table([{"model": {"title": "M"}, "rows": rows}]).splitlines()[-1])
        | M | 2.00x |
    """

    def cell(document: dict[str, Any], workload: str) -> str:
        whole, half = (_row(document, "logitless", workload, live).get("seconds") for live in (1.0, 0.5))
        return "–" if not whole or not half else f"{whole / half:.2f}x"

    return _by_workload(results, cell)


def least_memory_table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: the peak at memory budget 0, that of TRL's default, and how many times faster the step is."""

    def cell(document: dict[str, Any], workload: str) -> str:
        mine, other = (_row(document, contender, workload, 1.0) for contender in ("logitless-budget-0", "trl"))
        if not mine.get("peak_bytes") or not other.get("peak_bytes"):
            return "–"
        return f"{mine['peak_bytes'] / 1e9:.1f}/{other['peak_bytes'] / 1e9:.1f}, {mine['over_trl']:.1f}x"

    return _by_workload(results, cell)


def _by_workload(
    results: Sequence[dict[str, Any]],
    cell: Callable[[dict[str, Any], str], str],
) -> str:
    """A row a model, a column a workload."""
    found = [document for document in results if document["rows"]]
    names = [name for name in WORKLOADS if any(row["workload"] == name for d in found for row in d["rows"])]
    if not names:
        return "No results yet: run `python benchmarks/step.py` on a GPU."
    lines = [f"| | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    for document in found:
        lines.append(f"| {document['model']['title']} | {' | '.join(cell(document, name) for name in names)} |")
    return "\n".join(lines)


def _row(document: dict[str, Any], contender: str, workload: str, live: float) -> Row:
    """The row of a case; an empty one where it was not measured."""
    return next((row for row in document["rows"] if _is(row, contender, workload, live)), {})


def _is(row: Row, contender: str, workload: str, live: float) -> bool:
    return (row["contender"], row["workload"], row["live"]) == (contender, workload, live)


def _profiles(results: Sequence[dict[str, Any]]) -> list[tuple[str, str, dict[str, float]]]:
    """Model, contender, and milliseconds by class of the step that is profiled for all."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for document in results:
        for contender in DRAWN:
            rows = [row for row in document["profile"] if _is(row, contender, *PROFILED)]
            if rows:
                found[document["model"]["title"], contender] = {row["class"]: row["ms"] for row in rows}
    return [(title, contender, classes) for (title, contender), classes in found.items()]


def _classes(profiles: Sequence[tuple[str, str, dict[str, float]]]) -> list[str]:
    named = [kind for kind, _ in CLASSES]
    return [kind for kind in (*named, OTHER, "idle") if any(kind in classes for *_, classes in profiles)]


def activations_table(rows: Sequence[Row]) -> str:
    """Markdown: measured peaks of what layers take, a row a model, a column a mode; the largest error of estimates.

    Example:
        >>> row = {"model": "m", "modes": "keep", "layers": {"keep": 2, "host": 0}, "part": "layers",
        ...        "estimated_bytes": 2e9, "measured_bytes": 2.5e9, "error": -0.2}
        >>> mixed = row | {"layers": {"keep": 1, "host": 1}, "error": 0.3}
        >>> print(activations_table([row, mixed]).partition("|--:|--:|--:|--:|\\n")[2])
        | m | 2.50 | – | – | – |
        <BLANKLINE>
        Estimates of 2 plans, mixed ones included, are within 30.0%.
    """
    mine = [row for row in rows if row["part"] == "layers"]
    if not mine:
        return "No results yet: run `python benchmarks/activations.py` on a GPU."
    modes = list(MODE_WORDS)
    lines = ["| GB | " + " | ".join(MODE_WORDS.values()) + " |", "|---|" + "--:|" * len(modes)]
    for model in dict.fromkeys(row["model"] for row in mine):
        cells = dict.fromkeys(modes, "–")
        for row in mine:
            used = [mode for mode, count in row["layers"].items() if count]
            if row["model"] == model and len(used) == 1:
                cells[used[0]] = f"{row['measured_bytes'] / 1e9:.2f}"
        lines.append(f"| {model} | {' | '.join(cells.values())} |")
    worst = max(abs(row["error"]) for row in mine)
    return "\n".join([*lines, "", f"Estimates of {len(mine)} plans, mixed ones included, are within {worst:.1%}."])


def plot_profile(results: Sequence[dict[str, Any]], path: Path) -> None:
    """A bar a model and contender, in parts by class of kernels, as fractions of the longest step of the model."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    profiles = _profiles(results)
    classes = _classes(profiles)
    figure = Figure(figsize=(9, 1.2 + 0.55 * len(profiles)), layout="constrained")
    axes = figure.subplots()
    longest = {title: max(sum(c.values()) for t, _, c in profiles if t == title) for title, *_ in profiles}
    labels = [f"{title.partition(',')[0]}: {NAMES[contender]}" for title, contender, _ in profiles]
    left = [0.0] * len(profiles)
    for number, kind in enumerate(classes):
        widths = [c.get(kind, 0.0) / longest[title] for title, _, c in profiles]
        color: Any = "0.88" if kind == "idle" else colormaps["tab20"].colors[number % 20]  # type: ignore[attr-defined]
        axes.barh(labels, widths, left=left, color=color, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, (*_, c) in enumerate(profiles):
        axes.text(left[place] + 0.01, place, f"{sum(c.values()):.0f} ms", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.12), xlabel="time of a step, over the longest of the model")
    if profiles:
        figure.legend(fontsize=7, ncols=7, loc="outside lower center")
    figure.savefig(path, dpi=110)


def longest_table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: the longest sequence a model, contender and card."""
    found = [document for document in results if document["longest"]]
    if not found:
        return "No results yet: run `python benchmarks/step.py --parts lengths,longest` on a GPU."
    cards = sorted({row["memory_gb"] for document in found for row in document["longest"]})
    lines = [
        "| | | " + " | ".join(f"{card} GB" for card in cards) + " |",
        "|---|---|" + "--:|" * len(cards),
    ]
    for document in found:
        for contender, name in HEADS.items():
            cells = [_longest(document["longest"], contender, card) for card in cards]
            if any(cells):
                lines.append(f"| {document['model']['title']} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _longest(rows: Sequence[Row], contender: str, card: int) -> str:
    row = next((r for r in rows if (r["contender"], r["memory_gb"]) == (contender, card)), None)
    if row is None:
        return ""
    if row["completion_tokens"] == 0:
        return "none"
    return ("~" if row["how"] == "extrapolated" else "") + f"{row['completion_tokens']:,}"


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Memory and tokens/s against the length of a sequence, a column a model; open circles are extrapolated."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * max(1, len(results)), 6.4), layout="constrained")
    axes = figure.subplots(2, max(1, len(results)), squeeze=False, sharex="col")
    for (memory, speed), document in zip(axes.T, results, strict=False):
        for color, (contender, name) in zip(("C3", "C0", "C1", "C2"), HEADS.items(), strict=True):
            rows = [r for r in document["lengths"] if r["contender"] == contender and r["seconds"] is not None]
            rows = sorted(rows, key=lambda r: r["completion_tokens"])
            lengths = [r["completion_tokens"] for r in rows]
            speed.plot(lengths, [r["tokens_per_second"] for r in rows], color=color, marker=".", label=name)
            peaks = [(r["completion_tokens"], r["peak_bytes"] / 1e9) for r in rows if r["peak_bytes"] is not None]
            ends = [r for r in document["longest"] if r["contender"] == contender and r["completion_tokens"]]
            if peaks:
                memory.plot(*zip(*peaks, strict=True), color=color, marker=".", label=name)
            for r in ends:
                inside = color if r["how"] == "measured" else "none"
                memory.scatter(r["completion_tokens"], r["memory_gb"], edgecolors=color, facecolors=inside, zorder=3)
        for card in sorted({row["memory_gb"] for row in document["longest"]}):
            memory.axhline(card, color="black", linewidth=0.6, linestyle=":")
        memory.set(title=document["model"]["title"], ylabel="peak memory, GB")
        speed.set(xlabel="completion tokens, one sequence a micro-batch", ylabel="tokens/s")
        speed.set_xscale("log", base=2)
        speed.xaxis.set_major_formatter(lambda n, _: f"{n / 1024:g}k")
        speed.set_ylim(bottom=0)
        for each in (memory, speed):
            each.grid(alpha=0.3)
            if each.get_legend_handles_labels()[0]:
                each.legend(fontsize=7)
    figure.savefig(path, dpi=110)
