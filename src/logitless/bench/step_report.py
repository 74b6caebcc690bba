"""The tables and the plot of ``logitless bench step``, made from its JSON files and from nothing else."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from logitless import pages
from logitless.bench.step_contenders import WORKLOADS
from logitless.bench.step_profile import CLASSES, OTHER
from logitless.bench.step_rows import PROFILED
from logitless.models.activations import MODE_WORDS

Row = dict[str, Any]
MARKS = pages.Marks("step")
LONGEST = pages.Marks("step", "longest")
SUMMARY = pages.Marks("step", "summary")
PROFILE = pages.Marks("step", "profile")
BY_WORKLOAD = pages.Marks("step", "workloads")
ACTIVATIONS = pages.Marks("step", "activations")
HALF_LIVE = pages.Marks("step", "half live")
LEAST_MEMORY = pages.Marks("step", "least memory")
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


def update(
    documents: Sequence[Path], results: Sequence[dict[str, Any]], activations: Sequence[Row], *, check: bool
) -> int:
    """Rewrites the table in each document; with ``check``, 1 if one is out of date."""
    return pages.update(
        documents,
        {
            MARKS: table(results),
            LONGEST: longest_table(results),
            SUMMARY: summary(results),
            PROFILE: profile_table(results),
            BY_WORKLOAD: workloads_table(results),
            ACTIVATIONS: activations_table(activations),
            HALF_LIVE: half_live_table(results),
            LEAST_MEMORY: least_memory_table(results),
        },
        check=check,
    )


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: one table a model."""
    if not results:
        return "No results yet: run `logitless bench step` on a GPU."
    e = results[0]["environment"]
    lines = [
        f"{e['gpu']}, driver {e['driver']}, torch {e['torch']}, triton {e['triton']}, transformers "
        f"{e['transformers']}, TRL {e['trl']}. Tokens are the rollouts' own, each completion with its prompt, padding "
        "not counted; peak memory is everything PyTorch had allocated, weights and optimizer included; GB are 10^9 "
        "bytes. Differences are from the autocast form: of the loss, and relative of the gradient's norm and of one "
        "step's change of the weights.",
        "",
    ]
    for document in results:
        if document["rows"]:
            lines += [*_model_table(document), ""]
    return "\n".join(lines).rstrip()


COLUMNS = (
    *("workload", "live", "", "tokens/s", "step", "MFU", "over TRL", "over TRL without recomputation"),
    *("over autocast", "peak GB", "loss", "gradient norm", "weights"),
)


def _model_table(document: dict[str, Any]) -> list[str]:
    lines = [
        f"**{document['model']['title']}**",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---|--:|---|" + "--:|" * (len(COLUMNS) - 3),
    ]
    order = list(NAMES)
    rows = sorted(document["rows"], key=lambda r: (_place(r["workload"]), -r["live"], order.index(r["contender"])))
    for row in rows:
        first = [row["workload"], f"{row['live']:g}", NAMES[row["contender"]]]
        cells = [row["failure"], *[""] * (len(COLUMNS) - 4)] if row["seconds"] is None else _numbers(row)
        lines.append("| " + " | ".join([*first, *cells]) + " |")
    return lines


def _place(workload: str) -> int:
    return list(WORKLOADS).index(workload)


def _numbers(row: Row) -> list[str]:
    def shown(name: str, form: str) -> str:
        return "–" if row[name] is None else form.format(row[name])

    return [
        f"{row['tokens_per_second']:,.0f}",
        f"{1000 * row['seconds']:.0f} ms",
        shown("mfu", "{:.0%}"),
        shown("over_trl", "{:.2f}x"),
        shown("over_trl_without_recomputation", "{:.2f}x"),
        shown("over_autocast", "{:.2f}x"),
        "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f}",
        shown("loss_difference", "{:.1e}"),
        shown("grad_norm_difference", "{:.1e}"),
        shown("weights_difference", "{:.2f}"),
    ]


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: how many times faster than TRL's default a step is, a row a model, a column a workload."""

    def cell(document: dict[str, Any], workload: str) -> str:
        overs = [_row(document, "logitless", workload, live).get("over_trl") for live in (1.0, 0.5)]
        return " | ".join("–" if over is None else f"{over:.1f}x" for over in overs)

    return _by_workload(results, lambda name: f"{name} | half live", cell)


def half_live_table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: how many times faster a step with half of the groups live is than with all, as ``summary``.

    Example:
        >>> rows = [{"workload": "long", "contender": "logitless", "live": 1 / n, "seconds": 1 / n} for n in (1, 2)]
        >>> print(half_live_table([{"model": {"title": "M"}, "rows": rows}]).splitlines()[-1])
        | M | 2.00x |
    """

    def cell(document: dict[str, Any], workload: str) -> str:
        whole, half = (_row(document, "logitless", workload, live).get("seconds") for live in (1.0, 0.5))
        return "–" if not whole or not half else f"{whole / half:.2f}x"

    return _by_workload(results, str, cell)


def least_memory_table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: the peak at memory budget 0, that of TRL's default, and how many times faster the step is, as
    ``summary``."""

    def cell(document: dict[str, Any], workload: str) -> str:
        mine, other = (_row(document, contender, workload, 1.0) for contender in ("logitless-budget-0", "trl"))
        if not mine.get("peak_bytes") or not other.get("peak_bytes"):
            return "–"
        return f"{mine['peak_bytes'] / 1e9:.1f} of {other['peak_bytes'] / 1e9:.1f} GB, {mine['over_trl']:.1f}x"

    return _by_workload(results, str, cell)


def _by_workload(
    results: Sequence[dict[str, Any]],
    heading: Callable[[str], str],
    cell: Callable[[dict[str, Any], str], str],
) -> str:
    """A row a model, a column a workload (or several, where a heading and a cell have bars in them)."""
    found = [document for document in results if document["rows"]]
    names = [name for name in WORKLOADS if any(row["workload"] == name for d in found for row in d["rows"])]
    if not names:
        return "No results yet: run `logitless bench step` on a GPU."
    headings = " | ".join(heading(name) for name in names)
    lines = [f"| | {headings} |", "|---|" + "--:|" * (headings.count("|") + 1)]
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


def profile_table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: milliseconds of a step by class of kernels, a column a model and contender."""
    profiles = _profiles(results)
    if not profiles:
        return "No results yet: run `logitless bench step` on a GPU."
    names = [f"{title.partition(',')[0]}, {NAMES[contender]}" for title, contender, _ in profiles]
    lines = ["| ms | " + " | ".join(names) + " |", "|---|" + "--:|" * len(names)]
    for kind in _classes(profiles):
        lines.append(f"| {kind} | " + " | ".join(f"{c[kind]:.1f}" if kind in c else "" for *_, c in profiles) + " |")
    lines.append("| the step | " + " | ".join(f"{sum(c.values()):.0f}" for *_, c in profiles) + " |")
    return "\n".join(lines)


def workloads_table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: milliseconds of this library's step by class of kernels, one table a model, a column a workload."""
    tables = []
    for document in results:
        rows = [row for row in document["profile"] if row["contender"] == "logitless"]
        found: dict[tuple[str, float], dict[str, float]] = {}
        for row in rows:
            found.setdefault((row["workload"], row["live"]), {})[row["class"]] = row["ms"]
        steps = sorted(found.items(), key=lambda item: (-item[0][1], _place(item[0][0])))  # the whole ones first
        if not steps:
            continue
        names = [workload + ("" if live == 1.0 else f", {live:g} live") for (workload, live), _ in steps]
        lines = [f"| {document['model']['title'].partition(',')[0]}, ms | " + " | ".join(names) + " |"]
        lines.append("|---|" + "--:|" * len(names))
        for kind in _classes([("", "", classes) for _, classes in steps]):
            lines.append(f"| {kind} | " + " | ".join(f"{c.get(kind, 0.0):.1f}" for _, c in steps) + " |")
        lines.append("| the step | " + " | ".join(f"{sum(c.values()):.0f}" for _, c in steps) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables) or "No results yet: run `logitless bench step` on a GPU."


def activations_table(rows: Sequence[Row]) -> str:
    """Markdown: estimated and measured peaks of what layers take, a row a plan, columns a model.

    Example:
        >>> row = {"model": "m", "modes": "keep", "layers": {"keep": 2, "host": 0}, "part": "layers",
        ...        "estimated_bytes": 2e9, "measured_bytes": 2.5e9, "error": -0.2}
        >>> print(activations_table([row]).splitlines()[-1])
        | 2 keep all | 2.00 | 2.50 | -20.0% |
    """
    mine = [row for row in rows if row["part"] == "layers"]
    if not mine:
        return "No results yet: run `python benchmarks/activations.py` on a GPU."
    lines: list[str] = []
    for model in dict.fromkeys(row["model"] for row in mine):
        lines += [
            *([""] if lines else []),
            f"| {model} | estimated, GB | measured, GB | difference |",
            "|---|--:|--:|--:|",
        ]
        for row in mine:
            if row["model"] == model:
                plan = ", ".join(f"{count} {MODE_WORDS[mode]}" for mode, count in row["layers"].items() if count)
                lines.append(
                    f"| {plan} | {row['estimated_bytes'] / 1e9:.2f} | {row['measured_bytes'] / 1e9:.2f} | "
                    f"{row['error']:+.1%} |"
                )
    return "\n".join(lines)


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
        return "No results yet: run `logitless bench step --parts lengths,longest` on a GPU."
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
