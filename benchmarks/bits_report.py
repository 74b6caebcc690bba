"""Tables and picture of docs/bits.md, from the result files of ``benchmarks/bits.py``."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bits_cases import STOCK

_KINDS = {"train_forward": "forward", "train_step": "forward and backward", "decode": "decoding step"}
_GOALS = {"train_forward": 1.0, "train_step": 0.9, "decode": 1.03}


def load(folder: Path, kind: str) -> list[dict[str, Any]]:
    """What a folder has of all cards: ``bits``, or times of ``attention``."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{kind}-*.json"))]


def tables(folder: Path) -> dict[str, str]:
    """Of the page, by part."""
    bits = load(folder, "bits")
    attention = "\n\n".join(map(attention_table, load(folder, "attention")))
    return {"attention": attention, "laws": laws_table(bits), "price": price_table(bits)}


def table(document: Mapping[str, Any]) -> str:
    """Laws and price of one card."""
    return f"{laws_table([document])}\n\n{price_table([document])}"


def _title(documents: Sequence[Mapping[str, Any]]) -> str:
    first, *others = (document["environment"] for document in documents)
    cards = " and ".join(here["gpu"] for here in (first, *others))
    return f"{cards}; driver {first['driver']}, torch {first['torch']}, Triton {first['triton']}"


def laws_table(documents: Sequence[Mapping[str, Any]]) -> str:
    """Tokens that differ, of how many, by card and over all models; ways of computing in which none does share a row.

    For transformers' layers the share of tokens that differ, and the mean and the largest difference of the model
    where it is largest.

    Example:
        >>> rows = [{"comparison": way, "tokens": 600, "differ": 0} for way in ("alone", "again")]
        >>> rows.append({"comparison": "split", "tokens": 600, "differ": 7})
        >>> here = dict.fromkeys(("gpu", "driver", "torch", "triton"), "x")
        >>> print(laws_table([{"environment": here, "rows": rows}]).split("|--:|")[1])
        <BLANKLINE>
        | split | 7 of 600 |
        | row-invariant layers, 2 ways | 0 of 1,200 |
    """
    rows = [[row for row in document["rows"] if "comparison" in row] for document in documents]
    differing = {row["comparison"] for of in rows for row in of if "mean_nats" in row or row["differ"]}
    ways = list(dict.fromkeys(row["comparison"] for of in rows for row in of))
    equal = [way for way in ways if way not in differing]
    cards = " | ".join(document["environment"]["gpu"] for document in documents)
    lines = [_title(documents), "", f"| Tokens that differ in any bit | {cards} |", "|---|" + "--:|" * len(documents)]
    shown = {way: [way] for way in ways if way in differing} | {f"row-invariant layers, {len(equal)} ways": equal}
    for name, told in shown.items():
        cells = [_law([row for row in of if row["comparison"] in told]) for of in rows]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _law(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    differ, tokens = (sum(row[name] for row in rows) for name in ("differ", "tokens"))
    if "mean_nats" in rows[0]:
        mean, largest = (max(row[name] for row in rows) for name in ("mean_nats", "max_nats"))
        return f"{differ / tokens:.0%}, by {mean:.2f} nats in the mean, {largest:.2f} at most" if differ else "0%"
    return f"{differ} of {tokens:,}"


def price_table(documents: Sequence[Mapping[str, Any]]) -> str:
    """Time with row-invariant layers over that of the reference; bold above its goal."""
    rows = [
        (row, document["environment"]["gpu"]) for document in documents for row in document["rows"] if "kind" in row
    ]
    columns = list(dict.fromkeys((row["model"], gpu) for row, gpu in rows))
    cells: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row, gpu in rows:
        cells.setdefault((row["kind"], row["model"], gpu), []).append(row)
    names = [model if len(documents) == 1 else f"{model}, {gpu.split()[1]}" for model, gpu in columns]
    lines = [f"| Time over the reference's | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    for kind in dict.fromkeys(row["kind"] for row, _ in rows):
        sizes = [row["num_rows"] for row, _ in rows if row["kind"] == kind == "decode"]
        title = f"{_KINDS[kind]}{f', {min(sizes)} to {max(sizes)} sequences' if sizes else ''}"
        cell = " | ".join(_marked(cells.get((kind, *column), [])) for column in columns)
        lines.append(f"| {title} | {cell} |")
    return "\n".join(lines)


def _marked(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    ratios = [row["ratio"] for row in rows]
    found = " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios))))
    return found if round(max(ratios), 2) <= _GOALS[rows[0]["kind"]] else f"**{found}**"


def attention_table(document: Mapping[str, Any]) -> str:
    """Times of other kernels over ours, forward and backward together: least and most over shapes and workloads.

    Example:
        >>> names = ("logitless", "logitless-unshared", "flash-attention-2")
        >>> rows = [{"shape": "4,2,64", "workload": "w", "contender": c, "forward_ms": 1.0, "backward_ms": t}
        ...         for c, t in zip(names, (1.0, 2.0, 3.0))]
        >>> here = dict.fromkeys(("gpu", "driver", "torch", "triton"), "x")
        >>> print(attention_table({"environment": here, "rows": rows}).splitlines()[-1])
        | FlashAttention-2 | 1.3 to 2 |
    """
    times: dict[tuple[str, str], dict[str, float]] = {}
    for row in document["rows"]:
        case = times.setdefault((row["workload"], row["shape"]), {})
        case[row["contender"]] = row["forward_ms"] + row["backward_ms"]
    lines = [_title([document]), "", "| | its time over ours |", "|---|--:|"]
    for contender, name in _KERNELS.items():
        ours = ("logitless",) if contender == "flex" else ("logitless-unshared", "logitless")
        over = [case[contender] / case[each] for case in times.values() if contender in case for each in ours]
        if over:
            lines.append(f"| {name} | {min(over):.2g} to {max(over):.2g} |")
    return "\n".join(lines)


_KERNELS = {"flash-attention-2": "FlashAttention-2", "cudnn": "cuDNN", "flex": "FlexAttention, shared mask"}


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
    axes.set_title(f"What row-invariant layers remove, {document['environment']['gpu']}", loc="left")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)
    plt.close(figure)
