"""docs/configuration.md: complete, and readable without the source."""

import re

from docs.generate.configuration import keys, sections
from logitless.train.recipe.model import LoraSection


def test_every_key_is_described():
    undescribed = [line for line in sections().splitlines() if line.endswith(": \u2013")]
    assert undescribed == []


def test_every_link_leads_to_a_section():
    text = sections()
    headings = {re.sub(r"[`.]", "", line[3:]).lower() for line in text.splitlines() if line.startswith("## ")}
    assert set(re.findall(r"\(#(\w+)\)", text)) <= headings


def test_types_bounds_and_defaults_are_those_of_the_type():
    text = sections()
    assert "\n- `rank: 16`: " in text
    assert "\n- `staleness: 0` (≥ 0): " in text
    assert "\n- `betas: [0.9, 0.95]` ([number, number]): " in text
    assert "\n- `rewards` (list of [rewards](#rewards), required): " in text
    assert "\n- `lora: null` ([model.lora](#modellora)): " in text
    assert "\n- `use_rslora: false`: " in text
    assert [key.default for key in keys(LoraSection)][:3] == ["16", "32.0", "all-linear"]


def test_a_key_with_the_default_required_is_not_called_a_required_key():
    assert "\n- `sandbox: required`: " in sections()
    assert "\n- `sandbox` (required)" not in sections()
