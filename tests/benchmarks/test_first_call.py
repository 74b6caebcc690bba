"""What the sampler's first call costs: what was measured is what is promised and what the page says."""

import json
from pathlib import Path

import first_call

ROOT = Path(__file__).parents[2]


def test_a_first_call_starts_with_graphs_in_under_ten_seconds_and_the_page_says_in_how_many():
    found = json.loads((first_call.RESULTS / "first-call-H200.json").read_text())
    of_empty = [row for row in found["rows"] if row["caches"] == "empty"]
    assert of_empty
    assert max(row["first_seconds"] for row in of_empty) < 10
    assert all(row["compiled_while_waited_for"] == 0 for row in of_empty)
    assert first_call.table(found) in (ROOT / "docs" / "rollout.md").read_text()
