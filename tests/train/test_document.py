"""docs/configuration.md: current, complete, and readable without the source."""

import re
from pathlib import Path

from logitless.train.document import keys, page
from logitless.train.recipe.model import LoraSection

ROOT = Path(__file__).parents[2]


def test_the_committed_page_is_current():
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert text == page(), "run python -m logitless.train.document"


def test_every_key_is_described():
    undescribed = [line for line in page().splitlines() if line.endswith(": \u2013")]
    assert undescribed == []


def test_every_link_leads_to_a_section():
    text = page()
    headings = {re.sub(r"[`.]", "", line[3:]).lower() for line in text.splitlines() if line.startswith("## ")}
    assert set(re.findall(r"\(#(\w+)\)", text)) <= headings


def test_types_bounds_and_defaults_are_those_of_the_type():
    text = page()
    assert "\n- `rank: 16`: " in text
    assert "\n- `staleness: 0` (≥ 0): " in text
    assert "\n- `betas: [0.9, 0.95]` ([number, number]): " in text
    assert "\n- `rewards` (list of [rewards](#rewards), required): " in text
    assert "\n- `lora: null` ([model.lora](#modellora)): " in text
    assert "\n- `use_rslora: false`: " in text
    assert [key.default for key in keys(LoraSection)][:3] == ["16", "32.0", "all-linear"]
