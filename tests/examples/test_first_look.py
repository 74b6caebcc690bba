"""The notebook runs from its first cell to its last, with a shorter run."""

import json
from pathlib import Path

import matplotlib
import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_look.ipynb"
SHORT = "BLOCKS, WARM_STEPS, OUTPUT = 1, 1, {!r}"


def cells(output):
    """Code cells in order; that of the parameters with smaller ones."""
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            yield SHORT.format(output) if "parameters" in cell["metadata"].get("tags", []) else "".join(cell["source"])


@pytest.mark.slow
def test_every_cell_runs_in_order(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(NOTEBOOK.parent)
    matplotlib.use("agg")
    names = {}
    for source in cells(str(tmp_path)):
        exec(compile(source, str(NOTEBOOK), "exec"), names)
    assert (names["scores"].logp - names["plain"]).abs().max() < 1e-5
    assert names["hidden"].grad.abs().sum() > 0
    assert len(names["steps"]) == 1
    assert "largest difference" in capsys.readouterr().out


def test_it_is_kept_without_outputs():
    code = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
