"""Tables and picture of docs/bits.md, from the result files of ``logitless bench bits`` and from nothing else."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from logitless import pages
from logitless.errors import DataError
from logitless.pages import Marks

_KINDS = {"train_forward": "forward", "train_step": "forward and backward", "decode": "decoding step"}
_GOALS = {"train_forward": 1.0, "train_step": 0.9, "decode": 1.03}


def load(folder: Path) -> list[dict[str, Any]]:
    """Documents of all cards in a folder.

    Raises:
        DataError: there are none.
    """
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("bits-*.json"))]
    if not found:
        raise DataError(
            needed=f"a file bits-*.json in {folder}", given="none", remedy="Run `logitless bench bits` on a GPU."
        )
    return found


def update(documents: Sequence[Path], results: Sequence[Mapping[str, Any]], *, check: bool) -> int:
    """Rewrites the tables between the marks of each document; with ``check``, 1 if one is out of date."""
    tables = {
        Marks("bits", "laws"): "\n\n".join(laws_table(r) for r in results),
        Marks("bits", "price"): "\n\n".join(price_table(r) for r in results),
        Marks("bits", "kernels"): "\n\n".join(kernels_table(r) for r in results),
    }
    return pages.update(documents, tables, check=check)


def table(document: Mapping[str, Any]) -> str:
    """Laws and price of one card."""
    return f"{laws_table(document)}\n\n{price_table(document)}"


def _title(document: Mapping[str, Any]) -> str:
    here = document["environment"]
    return f"**{here['gpu']}**, driver {here['driver']}, torch {here['torch']}, Triton {here['triton']}"


def _models(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def laws_table(document: Mapping[str, Any]) -> str:
    """Tokens that differ, of how many, by comparison and model; for transformers' layers the difference in nats.

    Example:
        >>> rows = [{"model": "m", "comparison": "alone", "tokens": 1200, "differ": 0}]
        >>> here = dict.fromkeys(("gpu", "driver", "torch", "triton"), "x")
        >>> print(laws_table({"environment": here, "rows": rows}).splitlines()[-2])
        | alone | 0 of 1,200 |
    """
    rows = [row for row in document["rows"] if "comparison" in row]
    models = _models(rows)
    cells = {(row["comparison"], row["model"]): _law(row) for row in rows}
    lines = [f"{_title(document)}: tokens that differ in any bit", "", "| | " + " | ".join(models) + " |"]
    lines.append("|---|" + "--:|" * len(models))
    for name in dict.fromkeys(row["comparison"] for row in rows):
        lines.append(f"| {name} | " + " | ".join(cells.get((name, model), "") for model in models) + " |")
    exact = [row for row in rows if row.get("exact", True)]
    total, differ = (sum(row[name] for row in exact) for name in ("tokens", "differ"))
    return "\n".join([*lines, f"| together | {differ} of {total:,} |" + " |" * (len(models) - 1)])


def _law(row: Mapping[str, Any]) -> str:
    if "mean_nats" in row:
        return f"{row['differ'] / row['tokens']:.0%}; mean {row['mean_nats']:.3f}, largest {row['max_nats']:.2f} nats"
    return f"{row['differ']} of {row['tokens']:,}"


def price_table(document: Mapping[str, Any]) -> str:
    """Milliseconds with row-invariant layers, those of the reference, and the ratio."""
    rows = [row for row in document["rows"] if "kind" in row]
    models = _models(rows)
    cells = {
        (row["kind"], _size(row), row["model"]): f"{_marked(row)} ({row['ms']:.4g} / {row['ms_reference']:.4g} ms)"
        for row in rows
    }
    lines = [_title(document), "", "| | goal | " + " | ".join(models) + " |", "|---|--:|" + "--:|" * len(models)]
    for kind, size in dict.fromkeys((row["kind"], _size(row)) for row in rows):
        title = f"{_KINDS[kind]}{f', {size} rows' if size else ''}"
        cell = " | ".join(cells.get((kind, size, model), "") for model in models)
        lines.append(f"| {title} | {_GOALS[kind]} | {cell} |")
    return "\n".join(lines)


def _size(row: Mapping[str, Any]) -> int:
    return row["num_rows"] if row["kind"] == "decode" else 0


def _marked(row: Mapping[str, Any]) -> str:
    ratio = f"{row['ratio']:.2f}"
    return ratio if round(row["ratio"], 2) <= _GOALS[row["kind"]] else f"**{ratio}**"


def kernels_table(document: Mapping[str, Any]) -> str:
    """Which kernel multiplies, by shape and number of rows, and where a library was turned down."""
    lines = [
        _title(document),
        "",
        "| product | kernel, at these numbers of rows | other bits, at rows |",
        "|---|---|---|",
    ]
    shapes = {shape: found for check in document["self_check"].values() for shape, found in check["linear"].items()}
    for shape, found in shapes.items():
        ways: dict[str, list[str]] = {}
        for rows, way in found["ways"].items():
            ways.setdefault(way, []).append(rows)
        chosen = "; ".join(f"{way} at {', '.join(rows)}" for way, rows in ways.items())
        failed = "; ".join(f"{way}: {', '.join(map(str, rows))}" for way, rows in found["failed"].items())
        lines.append(f"| {shape} | {chosen} | {failed} |")
    return "\n".join(lines)


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Of transformers' layers, the difference between sampler and trainer by share of tokens; ours is 0 everywhere."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from logitless.bench.bits import STOCK

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for model, found in document["differences"].items():
        if STOCK in found:
            quantiles = found[STOCK]
            axes.plot([i / (len(quantiles) - 1) for i in range(len(quantiles))], quantiles, label=model)
    axes.axhline(0, color="black", linewidth=2, label="row-invariant layers (every token, every model)")
    axes.set_xlabel("share of tokens")
    axes.set_ylabel("|logp decoded − logp trained|, nats")
    axes.set_title(f"What one set of bits removes, {document['environment']['gpu']}", loc="left")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)
    plt.close(figure)
