"""The table and the plot of ``logitless bench step``, made from its JSON files and from nothing else."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from logitless import pages

Row = dict[str, Any]
MARKS = pages.Marks("step")
NAMES = {
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


def update(documents: Sequence[Path], results: Sequence[dict[str, Any]], *, check: bool) -> int:
    """Rewrites the table in each document; with ``check``, 1 if one is out of date."""
    return pages.update(documents, {MARKS: table(results)}, check=check)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: one table a model."""
    if not results:
        return "No results yet: run `logitless bench step` on a GPU."
    e = results[0]["environment"]
    lines = [
        f"{e['gpu']}, driver {e['driver']}, torch {e['torch']}, triton {e['triton']}, transformers "
        f"{e['transformers']}, TRL {e['trl']}. Tokens are the rollouts' own, padding not counted; peak memory is "
        "everything PyTorch had allocated, weights and optimizer included; GB are 10^9 bytes. The longest sequence is "
        "in completion tokens, one sequence a micro-batch; ~ is extrapolated from measured peaks, the others ran "
        "under the limit.",
        "",
    ]
    for document in results:
        lines += [*_model_table(document), ""]
    return "\n".join(lines).rstrip()


def _model_table(document: dict[str, Any]) -> list[str]:
    w = document["workload"]
    cards = sorted({row["memory_gb"] for row in document["longest"]})
    tokens = max(row["tokens"] for row in document["rollouts"])
    columns = ("tokens/s", "step", "over full logits", "peak GB", "loss", "gradient norm")
    header = [*columns, *(f"longest in {card} GB" for card in cards)]
    lines = [
        f"**{document['model']['title']}** ({w['prompts']} x {w['completions_per_prompt']} completions of up to "
        f"{w['completion_tokens']} tokens, {tokens} tokens a step)",
        "",
        "| | " + " | ".join(header) + " |",
        "|---|" + "--:|" * len(header),
    ]
    for contender, name in NAMES.items():
        row = next((r for r in document["rollouts"] if r["contender"] == contender), None)
        if row is None:
            continue
        cells = [row["failure"], *[""] * (len(columns) - 1)] if row["seconds"] is None else _numbers(row)
        cells += [_longest(document["longest"], contender, card) for card in cards]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _numbers(row: Row) -> list[str]:
    return [
        f"{row['tokens_per_second']:,.0f}",
        f"{row['seconds']:.3g} s",
        "–" if row["ratio_to_full"] is None else f"{row['ratio_to_full']:.2f}x",
        "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f}",
        f"{row['loss']:.5f}",
        f"{row['grad_norm']:.4g}",
    ]


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
        for color, (contender, name) in zip(("C3", "C0", "C1", "C2"), NAMES.items(), strict=True):
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
