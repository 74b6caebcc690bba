"""Weights in bfloat16 with float32 masters learn what float32 weights learn, as the committed runs have it."""

import json
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "trained-dtype.json"
MASTERS = "bfloat16, float32 masters"


def ends():
    """Held-out accuracy and the mean reward of the last ten blocks of each run, by way of training."""
    found = {}
    for run in json.loads(RESULT.read_text())["runs"]:
        found.setdefault(run["way"], []).append((run["accuracy_after"], statistics.fmean(run["reward"][-10:])))
    return found


def test_ways_of_training_differ_by_no_more_than_seeds_do():
    by_way = ends()
    assert all(len(runs) >= 3 for runs in by_way.values())
    for other in by_way.keys() - {MASTERS}:
        for ours, theirs in zip(zip(*by_way[MASTERS], strict=True), zip(*by_way[other], strict=True), strict=True):
            noise = (statistics.variance(ours) / len(ours) + statistics.variance(theirs) / len(theirs)) ** 0.5
            assert abs(statistics.fmean(ours) - statistics.fmean(theirs)) < 2 * noise, other


def test_every_way_learns():
    assert all(accuracy > 0.6 for runs in ends().values() for accuracy, _ in runs)


def test_the_page_has_the_committed_numbers():
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    for way, runs in ends().items():
        cells = [f"{statistics.fmean(c):.3f} ± {statistics.stdev(c):.3f}" for c in zip(*runs, strict=True)]
        assert f"| {way} | {' | '.join(cells)} |" in page
