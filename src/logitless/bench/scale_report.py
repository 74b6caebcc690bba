"""Tables of ``logitless bench scale``, from its result files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from logitless import pages
from logitless.pages import Marks


def load(folder: Path) -> list[dict[str, Any]]:
    """The result files, one a model."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("scale-*.json"))]


def update(paths: Sequence[Path], folder: Path, *, check: bool) -> int:
    """Rewrites the tables between the marks of each document; with ``check``, 1 if one is out of date."""
    results = load(folder)
    tables = {
        Marks("scale", "steps"): "\n".join(step_table(results)),
        Marks("scale", "blocks"): "\n".join(block_table(results)),
        Marks("scale", "head"): "\n".join(head_table(results)),
    }
    return pages.update(paths, tables, check=check)


def step_table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Tokens a second, efficiency and memory, by model, number of GPUs and layout.

    Example:
        >>> row = {"gpus": 2, "model": "m", "layout": "shard", "tokens": 8192, "length": 2048, "micro_batches": 2}
        >>> row |= {"tokens_per_second": 1e4, "efficiency": 0.9, "peak_bytes": 2**31, "forecast_bytes": 2**31}
        >>> here = dict.fromkeys(("gpu", "driver", "torch", "triton"), "x")
        >>> list(step_table([{"environment": here, "rows": [row]}]))[-1]
        '| m | 2 | shard | 2 x 8,192 | 2,048 | 10,000 | 90% | 2.0 GiB | 1.00 |'
    """
    rows = [row for result in results for row in result["rows"] if "forecast_bytes" in row]
    here = results[0]["environment"]
    yield f"**{here['gpu']}**, driver {here['driver']}, torch {here['torch']}, Triton {here['triton']}"
    yield ""
    columns = ["model", "GPUs", "layout", "tokens a GPU and step", "of a sequence", "tokens/s", "efficiency"]
    yield f"| {' | '.join([*columns, 'peak a GPU', 'forecast / peak'])} |"
    yield "|---|--:|---|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        batches = "" if row["micro_batches"] == 1 else f"{row['micro_batches']} x "
        share = row["tokens"] // (row["gpus"] if row["layout"] == "sequence" else 1)
        efficiency = "" if row["efficiency"] is None else f"{row['efficiency']:.0%}"
        layout = row["layout"] if row["gpus"] > 1 else _alone(row)
        yield (
            f"| {row['model']} | {row['gpus']} | {layout} | {batches}{share:,} | {row['length']:,} |"
            f" {row['tokens_per_second']:,.0f} | {efficiency} | {row['peak_bytes'] / 2**30:.1f} GiB |"
            f" {row['forecast_bytes'] / row['peak_bytes']:.2f} |"
        )


def _alone(row: Mapping[str, Any]) -> str:
    return "alone, in order" if row["layout"] == "in_order" else "alone"


def block_table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Tokens a second of a whole block, and seconds of its phases.

    Example:
        >>> row = {"gpus": 2, "model": "m", "layout": "block_replicate", "engine": "gpu", "tokens": 8192}
        >>> row |= {"tokens_per_second": 1e4, "efficiency": 0.9}
        >>> row |= {"seconds": {"handing_over": 0.1, "rollout": 1.0, "scoring": 0.2, "training": 0.34}}
        >>> list(block_table([{"rows": [row]}]))[-1]
        '| m | 2 | replicate | gpu | 8,192 | 10,000 | 90% | 0.10 | 1.00 | 0.20 | 0.34 |'
    """
    columns = ["model", "GPUs", "layout", "engine", "tokens a GPU", "tokens/s", "efficiency"]
    yield f"| {' | '.join([*columns, 'handing over, s', 'rollout', 'packing, scoring', 'training'])} |"
    yield "|---|--:|---|---|--:|--:|--:|--:|--:|--:|--:|"
    for row in (row for result in results for row in result["rows"] if row["layout"].startswith("block")):
        efficiency = "" if row["efficiency"] is None else f"{row['efficiency']:.0%}"
        seconds = " | ".join(f"{value:.2f}" for value in row["seconds"].values())
        yield (
            f"| {row['model']} | {row['gpus']} | {row['layout'].removeprefix('block_')} | {row['engine']} |"
            f" {row['tokens']:,} | {row['tokens_per_second']:,.0f} | {efficiency} | {seconds} |"
        )


def head_table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Milliseconds of the head's forward and backward over shards.

    Example:
        >>> row = {"gpus": 2, "model": "m", "layout": "head", "tokens": 16384}
        >>> row |= {"seconds": {"whole": 0.02, "waits": 0.03, "overlaps": 0.025}}
        >>> list(head_table([{"rows": [row]}]))[-1]
        '| m | 2 | 16,384 | 20.0 | 30.0 | 25.0 |'
    """
    yield "| model | GPUs | rows a GPU | whole weight, ms | shards, each waited for | shards, the next under way |"
    yield "|---|--:|--:|--:|--:|--:|"
    for row in (row for result in results for row in result["rows"] if row["layout"] == "head"):
        numbers = (f"{1e3 * row['seconds'][name]:.1f}" for name in ("whole", "waits", "overlaps"))
        yield f"| {row['model']} | {row['gpus']} | {row['tokens']:,} | {' | '.join(numbers)} |"
