"""The page on instructions is the registry's."""

from docs.generate.rewards import page
from logitless.rewards.instructions import INSTRUCTIONS


def test_every_official_instruction_has_a_row_with_its_marks():
    rows = [line for line in page("").splitlines() if line.startswith("| `") and ":" in line.split("`")[1]]
    ids = [row.split("`")[1].partition("(")[0] for row in rows]
    assert ids == [name for name in INSTRUCTIONS if "@" not in name]
    assert all(len(row.replace("\\|", "").split("|")) == 4 for row in rows)
    first_cells = {name: row.split("|")[1] for name, row in zip(ids, rows, strict=True)}
    assert first_cells["keywords:word_once"] == " `keywords:word_once(keyword)`†‡° "
    assert all(("†" in cell) == (f"{name}@fixed" in INSTRUCTIONS) for name, cell in first_cells.items())
    assert first_cells["punctuation:no_comma"] == " `punctuation:no_comma`†‡ "
