"""Every saving of a training step on, and off: the quickstart learns the same, as the committed runs have it."""

import json
import statistics
from pathlib import Path

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "savings.json"


def runs():
    """The runs by seed: with every saving, and with none."""
    found = {}
    for run in json.loads(RESULT.read_text())["runs"]:
        found.setdefault(run["seed"], {})[run["way"]] = run
    return [(ways["every saving on"], ways["every saving off"]) for ways in found.values()]


def test_both_ways_take_200_steps_and_their_curves_lie_on_top_of_each_other():
    for on, off in runs():
        assert len(on["reward"]) == len(off["reward"]) == 200
        # a mean of 512 rewards of 0 or 1 is off by up to 0.022 by itself, one of ten such by 0.007
        for start in range(0, 200, 10):
            mine, theirs = (statistics.fmean(run["reward"][start : start + 10]) for run in (on, off))
            assert abs(mine - theirs) < 0.05
        assert abs(on["accuracy_after"] - off["accuracy_after"]) < 0.05


def test_with_savings_a_fraction_of_the_tokens_is_read():
    for on, off in runs():
        assert off["saving/shared_tokens"] == off["saving/zero_advantage_tokens"] == 0
        assert on["saving/shared_tokens"] > 0 < on["saving/zero_advantage_tokens"]
        assert on["optimizer/read_tokens"] < 0.7 * off["optimizer/read_tokens"]
