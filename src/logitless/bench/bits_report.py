"""Tables and picture of docs/bits.md, from the result files of ``logitless bench bits`` and from nothing else."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logitless import pages
from logitless.bench.bits_cases import STOCK
from logitless.errors import DataError
from logitless.pages import Marks

_KINDS = {"train_forward": "forward", "train_step": "forward and backward", "decode": "decoding step"}
_GOALS = {"train_forward": 1.0, "train_step": 0.9, "decode": 1.03}


@dataclass(frozen=True)
class Results:
    """Documents of all cards: laws and prices, and times of attention."""

    bits: tuple[Mapping[str, Any], ...]
    attention: tuple[Mapping[str, Any], ...] = ()


def load(folder: Path) -> Results:
    """What a folder has.

    Raises:
        DataError: there are no laws and prices.
    """
    bits, attention = (
        tuple(json.loads(path.read_text()) for path in sorted(folder.glob(f"{kind}-*.json")))
        for kind in ("bits", "attention")
    )
    if not bits:
        raise DataError(
            needed=f"a file bits-*.json in {folder}", given="none", remedy="Run `logitless bench bits` on a GPU."
        )
    return Results(bits, attention)


def update(documents: Sequence[Path], results: Results, *, check: bool) -> int:
    """Rewrites the tables between the marks of each document; with ``check``, 1 if one is out of date."""
    tables = {
        Marks("bits", "attention"): "\n\n".join(attention_table(r) for r in results.attention),
        Marks("bits", "laws"): "\n\n".join(laws_table(r) for r in results.bits),
        Marks("bits", "price"): "\n\n".join(price_table(r) for r in results.bits),
        Marks("bits", "kernels"): "\n\n".join(kernels_table(r) for r in results.bits),
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


def attention_table(document: Mapping[str, Any]) -> str:
    """Milliseconds of attention, forward and backward together, and FlashAttention-2's over ours.

    Example:
        >>> names = ("logitless", "logitless-unshared", "flash-attention-2")
        >>> rows = [{"shape": "4,2,64", "workload": "w", "contender": c, "forward_ms": 1.0, "backward_ms": t}
        ...         for c, t in zip(names, (1.0, 2.0, 3.0))]
        >>> here = dict.fromkeys(("gpu", "driver", "torch", "triton"), "x")
        >>> print(attention_table({"environment": here, "rows": rows}).splitlines()[-1])
        | 4,2,64; w | 2 | 3 | 4 | 1.3 to 2.0 |  |  |
    """
    times: dict[tuple[str, str], dict[str, float]] = {}
    for row in document["rows"]:
        case = times.setdefault((row["shape"], row["workload"]), {})
        case[row["contender"]] = row["forward_ms"] + row["backward_ms"]
    lines = [
        f"{_title(document)}: milliseconds, forward and backward",
        "",
        "| heads, key heads, width; workload | prompt shared | unshared | FlashAttention-2, unshared "
        "| its time over ours | cuDNN | FlexAttention, shared mask |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (shape, workload), case in times.items():
        ours, unshared, theirs = (case[name] for name in ("logitless", "logitless-unshared", "flash-attention-2"))
        low, high = sorted((f"{theirs / unshared:.1f}", f"{theirs / ours:.1f}"), key=float)
        ratio = low if low == high else f"{low} to {high}"
        cells = [f"{ours:.3g}", f"{unshared:.3g}", f"{theirs:.3g}", ratio]
        cells += [f"{case[name]:.3g}" if name in case else "" for name in ("cudnn", "flex")]
        lines.append(f"| {shape}; {workload} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Of transformers' layers, the difference between sampler and trainer by share of tokens; ours is 0 everywhere."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

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
