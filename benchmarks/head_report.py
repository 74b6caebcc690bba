"""Tables and plots of ``benchmarks/head.py``, from its JSON files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NAMES = {
    "bare": "bare products (cuBLAS)",
    "logitless-fused": "logitless, fused",
    "logitless-chunked": "logitless, chunked",
    "logitless-reference": "logitless, reference",
    "trl": "TRL",
    "liger": "Liger",
    "cce": "cut-cross-entropy",
}
NOTHING = "No results yet: run `python benchmarks/head.py` on a GPU."
PEAK = 790.0
"""TFLOP/s of a large square bfloat16 product on an H200: the roof of the roofline."""


def load(folder: Path) -> list[dict[str, Any]]:
    """All result files of a folder, narrow heads first.

    Example:
        >>> load(Path("/nonexistent"))
        []
    """
    documents = [json.loads(path.read_text()) for path in folder.glob("head-*.json")]
    return sorted(documents, key=lambda d: (d["shape"]["width"], d["shape"]["vocabulary"]))


def pick(rows: Sequence[Row], contender: str, **wanted: Any) -> Row | None:
    """The row of a contender with these values, at live 1 and no budget unless said otherwise.

    Example:
        >>> row = {"contender": "trl", "live": 1.0, "budget_bytes": None, "trained": "weight", "ms": 2.0}
        >>> pick([row], "trl", trained="weight")["ms"]
        2.0
    """
    wanted = {"live": 1.0, "budget_bytes": None} | wanted | {"contender": contender}
    return next((r for r in rows if all(r.get(k) == v for k, v in wanted.items())), None)


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: time, memory and error of a training step through the head, one column a shape."""
    if not results:
        return NOTHING
    lines = [
        f"{_machine(results)} {_length(results[0])} tokens, forward and backward with the weight trained: time over "
        "the three bare matrix products of the same run; peak memory beyond inputs and gradients, GiB; largest error "
        "of a log-prob.",
        "",
        "| | " + " | ".join(f"{d['shape']['model']}, D={d['shape']['width']}" for d in results) + " |",
        "|---|" + "--:|" * len(results),
    ]
    for contender, name in NAMES.items():
        for budget, label in ((None, name), (0, f"{name}, memory budget 0")):
            found = [_trained(d, contender, budget_bytes=budget) for d in results]
            if contender != "bare" and any(found):
                lines.append(f"| {label} | " + " | ".join(_step_cell(row) for row in found) + " |")
    return "\n".join(lines)


def _step_cell(row: Row | None) -> str:
    if row is None or row["ms"] is None:
        return _ratio(row)
    peak, error = row["peak_bytes"], row["logp_max_error"]
    parts = [
        _ratio(row),
        *([] if peak is None else [f"{peak / 2**30:.1f}"]),
        *([] if error is None else [_error(error)]),
    ]
    return "; ".join(parts)


def targets(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: what the fused head was to reach and what it reached, one column a shape; misses are bold."""
    if not results:
        return NOTHING
    lines = [
        "| | target | " + " | ".join(f"D = {d['shape']['width']}" for d in results) + " |",
        "|---|--:|" + "--:|" * len(results),
    ]

    def add(label: str, limit: str, cells: Sequence[str]) -> None:
        lines.append(f"| {label} | {limit} | " + " | ".join(cells) + " |")

    def ratios(label: str, limit: float, **wanted: Any) -> None:
        rows = [_trained(d, "logitless-fused", **wanted) for d in results]
        add(label, f"{limit:.2f}", [_held(None if r is None else r["ratio_to_bare"], limit, ".2f") for r in rows])

    plain = [_trained(d, "logitless-fused") for d in results]
    ratios("forward + backward / three products", 1.05)
    add("… lowest and highest of its rounds", "", [_rounds(row) for row in plain])
    ratios("scoring / one product", 1.05, trained="none")
    ratios("half of the rows with a gradient", 0.68, live=0.5)
    ratios("a fifth of the rows with a gradient", 0.48, live=0.2)
    ratios("frozen / two products", 1.06, trained="frozen")
    lora = [_trained(d, "logitless-fused", trained="lora") for d in results]
    frozen = [_trained(d, "logitless-fused", trained="frozen") for d in results]
    over = [None if a is None or b is None else a["ms"] / b["ms"] for a, b in zip(lora, frozen, strict=True)]
    add("LoRA rank 16 / frozen", "1.06", [_held(value, 1.06, ".2f") for value in over])
    ratios("budget 0 / three products", 1.40, budget_bytes=0)
    zero = [_trained(d, "logitless-fused", budget_bytes=0) for d in results]
    peaks = [None if r is None or r["peak_bytes"] is None else r["peak_bytes"] / 2**30 for r in zero]
    add("budget 0, peak GiB", "0.6", [_held(value, 0.6, ".2f") for value in peaks])
    limits = [1e-4 if d["shape"]["width"] <= 4096 else 2.5e-4 for d in results]
    logp = [None if r is None else r["logp_max_error"] for r in plain]
    cells = [_held(value, limit, ".1e") for value, limit in zip(logp, limits, strict=True)]
    add("largest error of logp", "1e-4, at 8192 2.5e-4", cells)
    for name, key in (("dX", "dx_rel_error"), ("dW", "dw_rel_error")):
        errors = [None if r is None else r[key] for r in plain]
        add(f"relative error of {name}", "4e-3", [_held(value, 4e-3, ".1e") for value in errors])
    return "\n".join(lines)


def _held(value: float | None, limit: float, form: str) -> str:
    """A number, bold where it is above its limit as it is printed."""
    if value is None:
        return "–"
    text = f"{value:{form}}"
    return text if float(text) <= limit else f"**{text}**"


def _rounds(row: Row | None) -> str:
    if row is None or row["ms"] is None:
        return "–"
    return f"{row['ms_min'] / row['bare_ms']:.2f} to {row['ms_max'] / row['bare_ms']:.2f}"


def _trained(document: dict[str, Any], contender: str, **wanted: Any) -> Row | None:
    return pick(document["rows"], contender, **({"N": _length(document), "trained": "weight"} | wanted))


def _length(document: dict[str, Any]) -> int:
    """The number of rows at which everything was measured."""
    return max(row["N"] for row in document["rows"] if row["trained"] == "frozen")


def _machine(results: Sequence[dict[str, Any]]) -> str:
    e = results[0]["environment"]
    return (
        f"{e['gpu']}, driver {e['driver']}, torch {e['torch']}, triton {e['triton']}, TRL {e['trl']}, "
        f"Liger {e['liger-kernel']}, cut-cross-entropy {e['cut-cross-entropy']}; bfloat16."
    )


def _ratio(row: Row | None) -> str:
    if row is None:
        return "–"
    if row["ratio_to_bare"] is None:
        return "out of memory" if row["failure"] == "out of memory" else "cannot run"
    return f"{row['ratio_to_bare']:.2f}x"


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def tables(folder: Path) -> dict[str, str]:
    """Of the pages, by part."""
    results = load(folder)
    return {"summary": summary(results), "targets": targets(results)}


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Time against N, time and memory against the budget, and a roofline, in one picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.2), layout="constrained")
    by_length, by_budget, roofline = figure.subplots(1, 3)
    memory = by_budget.twinx()
    for color, document in zip(("C0", "C1", "C2", "C3"), results, strict=False):
        rows, shape = document["rows"], document["shape"]
        label = f"D={shape['width']}"
        plain = [r for r in rows if (r["trained"], r["live"], r["budget_bytes"]) == ("weight", 1.0, None) and r["ms"]]
        for contender, style in (("logitless-fused", "-"), ("trl", "--"), ("bare", ":")):
            mine = sorted((r["N"], r["ms"]) for r in plain if r["contender"] == contender)
            if mine:
                by_length.loglog(*zip(*mine, strict=True), style, color=color, marker=".", label=f"{label} {contender}")
        budget = sorted(
            (r["budget_bytes"] / 2**30, r["ratio_to_bare"], (r["peak_bytes"] or 0) / 2**30)
            for r in rows
            if r["budget_bytes"] is not None and r["ratio_to_bare"] is not None
        )
        if budget:
            x, ratio, peak = zip(*budget, strict=True)
            by_budget.plot(x, ratio, color=color, marker=".", label=label)
            memory.plot(x, peak, "--", color=color, marker="x")
        for contender, marker in (("bare", "o"), ("logitless-fused", "s"), ("trl", "^")):
            flops = [(r["N"], 6e-9 * r["N"] * shape["width"] * shape["vocabulary"] / r["ms"], r) for r in plain]
            points = [(n, rate) for n, rate, r in flops if r["contender"] == contender]
            if points:
                n, rate = zip(*sorted(points), strict=True)
                roofline.semilogx(n, rate, marker, color=color, label=f"{label} {contender}", markersize=4)
    by_length.set(xlabel="rows N", ylabel="forward + backward, ms", title="time against N")
    by_budget.set(
        xlabel="budget, GiB", ylabel="time over three bare products (solid)", title="time and memory by budget"
    )
    memory.set_ylabel("peak beyond inputs and gradients, GiB (dashed)")
    roofline.axhline(PEAK, color="black", linewidth=0.8)
    roofline.set(
        xlabel="rows N", ylabel="TFLOP/s of the three products", title="roofline (compute bound at every N here)"
    )
    for axes in (by_length, by_budget, roofline):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=6)
    figure.savefig(path, dpi=110)
