"""What the sampler's first call costs: what was measured is what is promised and what the page says."""

import importlib.util
import json
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("first_call", ROOT / "benchmarks" / "first_call.py")
first_call = importlib.util.module_from_spec(spec)
spec.loader.exec_module(first_call)


def row(caches, first, check, compiled):
    phases = {"self-check": check, "compile": 0.5, "capture": 0.7}
    times = {
        "imports_seconds": 10 + first,
        "first_seconds": first,
        "second_seconds": 1.2,
        "first_seconds_by_phase": phases,
    }
    return {"caches": caches, "model": "small", "workload": "1x2-3-4", "compiled": compiled, **times}


def test_the_table_has_the_median_of_the_runs_by_what_the_caches_held():
    machine = {"gpu": "A GPU", "driver": "1.2", "torch": "2.11", "triton": "3.6"}
    rows = [row("empty", 9.0, 4.0, 50), row("full", 3.0, 0.1, 0), row("empty", 7.0, 3.0, 50), row("full", 2.0, 0.3, 0)]
    text = first_call.table({"machine": machine, "rows": rows})
    assert "**A GPU**, driver 1.2, torch 2.11, Triton 3.6; small, 1x2-3-4" in text
    assert "| imports before it | 18.0 | 12.5 |" in text
    assert "| the first call | 8.0 | 2.5 |" in text
    assert "| kernels compiled | 50 | 0 |" in text
    page = f"before\n{first_call._BEGIN}\nold\n{first_call._END}\nafter"
    assert first_call.replaced(page, "new").split() == f"before {first_call._BEGIN} new {first_call._END} after".split()


def test_a_first_call_starts_with_graphs_in_under_ten_seconds_and_the_page_says_in_how_many():
    found = json.loads((first_call.RESULTS / "first-call-H200.json").read_text())
    of_empty = [row for row in found["rows"] if row["caches"] == "empty"]
    assert of_empty
    assert max(row["first_seconds"] for row in of_empty) < 10
    assert all(row["compiled_while_waited_for"] == 0 for row in of_empty)
    assert first_call.table(found) in (ROOT / "docs" / "rollout.md").read_text()


def test_stacks_say_where_this_thread_was():
    def busy(is_enough):
        while not is_enough():
            threading.Event().wait(0.001)

    def waiting(stacks):
        return sum(seconds for where, seconds in list(stacks.seen.items()) if "threading.py" in where)

    with first_call.Stacks(True) as stacks:
        busy(lambda: waiting(stacks) > 0.2)  # however late the other thread comes to look
    assert any("threading.py" in where for _, where in stacks.told())
    assert sum(seconds for seconds, _ in stacks.told()) > 0.1
    with first_call.Stacks(False) as stacks:
        busy(iter([False, False, True]).__next__)
    assert stacks.told() == []
