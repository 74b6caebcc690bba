"""A page that compares runs: curves in common plots, results in a table, and differences between recipes."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from logitless.errors import ConfigurationError
from logitless.train.record.run_folder import open_run_folder
from logitless.train.report.cards import Curves, grid_of, table_of, write_document
from logitless.train.report.page import Recorded
from logitless.train.report.plots import COLOURS

_COMPARED = """
Reward | reward | reward/mean | Mean over the block.
Held-out accuracy | fraction, whole, exact | evaluation/accuracy | Under the evaluation's sampling settings.
KL to the reference | nat per token | kl_ref/k3_mean | k3, mean over tokens.
Divergence from the teacher | nat per token | teacher/divergence | Before its weight.
Entropy | nat per token | entropy/mean | Mean over trained tokens.
Completion length | token | length/mean | Mean.
Gradient norm | norm | optimizer/grad_norm | Before clipping.
Sampler against trainer | nat | sampler/logp_difference_mean | |logp_old − logp_sampler|, mean.
Time | second, exact | time/elapsed_seconds | Of all phases so far.
"""


def write_comparison(run_folders: Sequence[Path], out: Path) -> Path:
    """Write one self-contained page that compares runs.

    Raises:
        ConfigurationError: fewer than two runs, more than there are colours, or a folder without a run.

    Example:
        >>> import tempfile
        >>> from logitless.train.record.run_folder import create_run_folder
        >>> folders = [create_run_folder(Path(tempfile.mkdtemp()), name) for name in ("one", "two")]
        >>> for folder in folders:
        ...     folder.write_config(f"name: {folder.path.name}")
        ...     folder.append_metrics({"step": 1, "reward/mean": 0.5})
        >>> write_comparison([folder.path for folder in folders], folders[0].path / "comparison.html").name
        'comparison.html'
    """
    if not 2 <= len(run_folders) <= len(COLOURS):
        raise ConfigurationError(
            needed=f"2 to {len(COLOURS)} runs to compare", given=str(len(run_folders)), remedy="Name others."
        )
    runs = {
        name: Recorded.of(open_run_folder(path)) for name, path in zip(_names(run_folders), run_folders, strict=True)
    }
    cards = [
        curves.card([line for metric in curves.labels for name, run in runs.items() for line in run.line(metric, name)])
        for curves in Curves.listed(_COMPARED)
    ]
    heading = " · ".join(runs)
    sections = [
        f"<header><h1>{html.escape(heading)}</h1><p>{len(runs)} runs</p></header>",
        f"<section><h2>Ends</h2>{_ends(runs)}</section>",
        grid_of("Curves", cards),
        f"<section><h2>Recipes</h2>{_differences(runs)}</section>",
    ]
    write_document(out, heading, sections)
    return out


def _names(folders: Sequence[Path]) -> list[str]:
    """Names of the folders; full paths for those with the same name."""
    names = [folder.resolve().name for folder in folders]
    return [str(folder) if names.count(name) > 1 else name for name, folder in zip(names, folders, strict=True)]


def _ends(runs: Mapping[str, Recorded]) -> str:
    found = {name: run.results for name, run in runs.items()}
    rows = [
        [name, *(f"{first} → {last}" if first else last or "–" for first, last in results.values())]
        for name, results in found.items()
    ]
    return table_of(["run", *next(iter(found.values()))], rows)


def _differences(runs: Mapping[str, Recorded]) -> str:
    """A table of the keys whose values differ between the recipes."""
    configs = [_flat(run.config) for run in runs.values()]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = []
    for key in keys:
        values = [config.get(key, "–") for config in configs]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return table_of(["key", *runs], rows) if rows else "<p class=note>The same in every key.</p>"


def _flat(value: Any, above: str = "") -> dict[str, str]:
    if isinstance(value, dict) and value:
        return {k: v for name, inner in value.items() for k, v in _flat(inner, f"{above}.{name}".lstrip(".")).items()}
    return {above: str(value)}
