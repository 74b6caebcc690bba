"""Tables of ``benchmarks/scale.py``, from its result files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def load(folder: Path) -> list[dict[str, Any]]:
    """The result files, one a model."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("scale-*.json"))]


def tables(folder: Path) -> dict[str, str]:
    """Of the pages, by part."""
    return {"steps": "\n".join(step_table(load(folder)))}


LAYOUTS = ("replicate", "shard", "all_rows", "in_order", "sequence")


def step_table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Tokens a second, efficiency and peak GiB of a step, a row a model and number of GPUs, a column a layout.

    Example:
        >>> row = {"gpus": 2, "model": "m", "layout": "shard", "tokens": 8192, "length": 2048}
        >>> row |= {"tokens_per_second": 1e4, "efficiency": 0.9, "peak_bytes": 2**31, "forecast_bytes": 2**31}
        >>> here = dict.fromkeys(("gpu", "driver", "torch", "triton"), "x")
        >>> print("\\n".join(list(step_table([{"environment": here, "rows": [row]}]))[-3:]))
        | m | 2 |  | 10,000 (90%), 2.0 |  |  |  |
        <BLANKLINE>
        Forecast memory is 1.00 to 1.00 of these peaks.
    """
    rows = [row for result in results for row in result["rows"] if "forecast_bytes" in row]
    here = results[0]["environment"]
    yield f"**{here['gpu']}**, driver {here['driver']}, torch {here['torch']}, Triton {here['triton']}"
    yield ""
    yield f"| model | GPUs | {' | '.join(f'`{layout}`' for layout in LAYOUTS)} |"
    yield "|---|--:|" + "--:|" * len(LAYOUTS)
    found = {(row["model"], row["gpus"], row["layout"]): row for row in rows}
    for model, gpus in dict.fromkeys((row["model"], row["gpus"]) for row in rows):
        cells = (_step(found.get((model, gpus, layout))) for layout in LAYOUTS)
        yield f"| {model} | {gpus} | {' | '.join(cells)} |"
    shares = [row["forecast_bytes"] / row["peak_bytes"] for row in rows]
    yield ""
    yield f"Forecast memory is {min(shares):.2f} to {max(shares):.2f} of these peaks."


def _step(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    efficiency = "" if row["efficiency"] is None else f" ({row['efficiency']:.0%})"
    return f"{row['tokens_per_second']:,.0f}{efficiency}, {row['peak_bytes'] / 2**30:.1f}"
