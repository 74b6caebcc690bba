"""The page on instructions is the registry's."""

from pathlib import Path

from logitless.rewards.instructions import INSTRUCTIONS, document

ROOT = Path(__file__).parents[3]


def test_the_page_is_current():
    assert (ROOT / document.PAGE).read_text(encoding="utf-8") == document.page()


def test_every_official_instruction_has_a_row_with_its_marks():
    rows = [line for line in document.page().splitlines() if line.startswith("| `") and ":" in line.split("`")[1]]
    ids = [row.split("`")[1].partition("(")[0] for row in rows]
    assert ids == [name for name in INSTRUCTIONS if "@" not in name]
    assert all(len(row.replace("\\|", "").split("|")) == 4 for row in rows)
    first_cells = {name: row.split("|")[1] for name, row in zip(ids, rows, strict=True)}
    assert first_cells["keywords:word_once"] == " `keywords:word_once(keyword)`†‡° "
    assert all(("†" in cell) == (f"{name}@fixed" in INSTRUCTIONS) for name, cell in first_cells.items())
    assert first_cells["punctuation:no_comma"] == " `punctuation:no_comma`†‡ "
