"""Tables and pictures of ``benchmarks/rollout.py``, from its result files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def documents(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The result files of a kind, such as ``rollout``."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{kind}-*.json"))]


def tables(folder: Path) -> dict[str, str]:
    """Of the page, by part."""
    made = {
        "speed": ("rollout", speed_table),
        "block": ("block", block_table),
    }
    found = {part: "\n\n".join(map(table, documents(folder, kind))) for part, (kind, table) in made.items()}
    return found | {"law": law_table(documents(folder, "sampled-bits"))}


def speed_table(document: Mapping[str, Any]) -> str:
    """Tokens a second and the share of the roofline, by model, workload and engine.

    Example:
        >>> row = {"model": "m", "workload": "w", "engine": "gpu", "tokens_per_second": 1e3, "peak_bytes": 2**30}
        >>> row |= {"roofline_tokens_per_second": 4e3}
        >>> here = dict.fromkeys(("gpu", "driver", "torch", "triton"), "x")
        >>> print(speed_table({"environment": here, "rows": [row]}).splitlines()[-1])
        | m | w | gpu | 1,000 | 25% | 1.0 |
    """
    here = document["environment"]
    title = f"**{here['gpu']}**, driver {here['driver']}, torch {here['torch']}, Triton {here['triton']}"
    return "\n".join([title, "", *_speed_lines(document["rows"])])


def _speed_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| model | workload | engine | tokens/s | of the roofline | GiB |"
    yield "|---|---|---|--:|--:|--:|"
    for row in rows:
        share = row["tokens_per_second"] / row["roofline_tokens_per_second"]
        yield (
            f"| {row['model']} | {row['workload']} | {row['engine']} | {row['tokens_per_second']:,.0f} | {share:.0%} |"
            f" {row['peak_bytes'] / 2**30:.1f} |"
        )


def block_table(document: Mapping[str, Any]) -> str:
    """Seconds of a block by phase, and each phase's share.

    Example:
        >>> row = {"model": "m", "engine": "gpu", "rollout_seconds": 1.0, "packing_seconds": 0.5, "tokens": 1000}
        >>> row |= {"scoring_seconds": 0.0, "training_seconds": 2.5}
        >>> print(block_table({"environment": {"gpu": "x"}, "rows": [row]}).splitlines()[-1])
        | m | gpu | 1,000 | 1.00 s (25%) | 0.50 s (12%) | 0.00 s (0%) | 2.50 s (62%) | 4.00 s |
    """
    phases = ("rollout", "packing", "scoring", "training")
    lines = [
        f"**{document['environment']['gpu']}**",
        "",
        f"| model | engine | tokens | {' | '.join(phases)} | together |",
    ]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|")
    for row in document["rows"]:
        seconds = [row[f"{phase}_seconds"] for phase in phases]
        cells = [f"{each:.2f} s ({each / sum(seconds):.0%})" for each in seconds]
        row_text = [row["model"], row["engine"], f"{row['tokens']:,}", *cells, f"{sum(seconds):.2f} s"]
        lines.append(f"| {' | '.join(row_text)} |")
    return "\n".join(lines)


def law_table(found: Sequence[Mapping[str, Any]]) -> str:
    """Tokens sampled and those with other bits than training's, routes and those to other experts; by GPU.

    Example:
        >>> row = {"model": "m", "tokens": 1000000, "mismatched_tokens": 0, "routes": 8000000, "mismatched_routes": 0}
        >>> print(law_table([{"environment": {"gpu": "x"}, "rows": [row]}]).splitlines()[-1])
        | m | 1,000,000 | 0 | 8,000,000 | 0 |
    """
    lines = []
    for gpu in dict.fromkeys(document["environment"]["gpu"] for document in found):
        lines += ["", f"**{gpu}**", "", "| model | tokens | with other bits | routes | to other experts |"]
        lines.append("|---|--:|--:|--:|--:|")
        for row in (row for document in found if document["environment"]["gpu"] == gpu for row in document["rows"]):
            routes = f"{row['routes']:,} | {row['mismatched_routes']}" if "routes" in row else "|"
            lines.append(f"| {row['model']} | {row['tokens']:,} | {row['mismatched_tokens']} | {routes} |")
    return "\n".join(lines[1:])


def plot_step(document: Mapping[str, Any], path: Path) -> None:
    """A step of each number of rows as a bar of its parts."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "step", "svg.fonttype": "none"}):
        counts = sorted({row["num_rows"] for row in document["rows"]})
        parts = list(dict.fromkeys(row["part"] for row in document["rows"]))
        figure = Figure(figsize=(9, 2.6))
        axes = figure.add_subplot()
        left = dict.fromkeys(counts, 0.0)
        for part, colour in zip(parts, matplotlib.colormaps["tab20"].colors, strict=False):  # type: ignore[attr-defined]
            label: str | None = part
            for row in (row for row in document["rows"] if row["part"] == part):
                count, width = row["num_rows"], row["microseconds"]
                axes.barh(counts.index(count), width, left=left[count], color=colour, label=label, height=0.6)
                left[count], label = left[count] + width, None  # once in the legend
        axes.set_yticks(range(len(counts)), [f"{count} rows" for count in counts])
        axes.set_xlabel("microseconds of a step, kernel by kernel")
        axes.set_title(f"A decoding step of {document['model']}, {document['environment']['gpu']}", loc="left")
        axes.legend(frameon=False, fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.45, -0.25))
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)
