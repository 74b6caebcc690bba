"""docs/configuration.md: current, complete, and readable without the source."""

import re
from pathlib import Path

from logitless.train.config import LoraSection
from logitless.train.document import keys, page

ROOT = Path(__file__).parents[2]


def test_the_committed_page_is_current():
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert text == page(), "run python -m logitless.train.document"


def test_every_key_is_described():
    undescribed = [line for line in page().splitlines() if line.endswith("| \u2013 |")]
    assert undescribed == []


def test_every_link_leads_to_a_section():
    text = page()
    headings = {re.sub(r"[`.]", "", line[3:]).lower() for line in text.splitlines() if line.startswith("## ")}
    assert set(re.findall(r"\(#(\w+)\)", text)) <= headings


def test_all_variants_of_a_part_are_there():
    text = page()
    for name in ("clip", "vespo", "kl_cov", "math", "code", "ifeval", "leave_one_out", "gdpo", "hub", "reasoning_gym"):
        assert re.search(rf"^### .*`name: {name}`", text, re.M), name
    for name in ("fixed", "proportional", "linear", "ziegler"):
        assert f"### `name: {name}`" in text


def test_types_bounds_and_defaults_are_those_of_the_type():
    text = page()
    assert "| `rank` | integer > 0 | `16` |" in text
    assert "| `betas` | [number, number] | `[0.9, 0.95]` |" in text
    assert "| `rewards` | list of [rewards](#rewards) | required |" in text
    assert "| `lora` | [model.lora](#modellora) or null | `null` |" in text
    assert [key.default for key in keys(LoraSection)][:3] == ["16", "32.0", "all-linear"]


def test_a_reference_to_another_class_is_replaced_by_its_words():
    assert "as for `FileData`" not in page()
    assert "See `" not in page()
