"""The sampler's first call: what was measured keeps what is promised."""

import json

from script import RESULTS


def test_a_first_call_starts_with_graphs_in_under_ten_seconds():
    found = json.loads((RESULTS / "first-call-H200.json").read_text())
    of_empty = [row for row in found["rows"] if row["caches"] == "empty"]
    assert of_empty
    assert max(row["first_seconds"] for row in of_empty) < 10
    assert all(row["compiled_while_waited_for"] == 0 for row in of_empty)
