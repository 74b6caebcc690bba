"""Measures what collecting ahead wins, and sets it beside the simulation.

The collector is the one that runs use, with its thread and its log; the engine and the trainer take the times that the
simulation is given and compute nothing, as an engine on other GPUs takes none of this machine's.

python benchmarks/staleness.py --out benchmarks/results/staleness.json --plot docs/staleness.svg
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from quickstart import ROOT, processor

from logitless.bench.machine import write_result
from logitless.rewards.combine import weighted
from logitless.rewards.length import Length
from logitless.rollout.environment import SingleTurn
from logitless.rollout.sampling import SamplingOptions
from logitless.rollout.staleness import block_seconds, simulate
from logitless.train.ahead import AheadCollector, CollectedBlocks
from logitless.train.collector import Collector
from logitless.train.config import RolloutSection
from logitless.types import Completion, Prompt

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "logitless"

SHARES = {"equal": (1.0, 1.0), "rollout twice as long": (2.0, 1.0)}
LARGEST, BLOCKS, UNIT, SPREAD = 4, 40, 0.4, 0.5


class TakingTime:
    """An engine elsewhere: it takes the time of its block."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.calls = seconds, 0

    def sample(self, prompts: Any, num_samples: int, options: Any, *, seed: int) -> list[list[Completion]]:  # noqa: ARG002
        """One token each, when the time is over."""
        time.sleep(self.seconds[self.calls])
        self.calls += 1
        return [[Completion(p.id, (3,), "a", "stop", (-1.0,))] * num_samples for p in prompts]

    def load(self, weights: Any, version: int) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to give back."""


def measured(rollout: list[float], training: list[float], staleness: int) -> float:
    """Seconds of the real collector with an engine and a trainer of these times."""
    prompts = [Prompt(str(i), "a", (3,)) for i in range(8)]
    options = RolloutSection(
        prompts_per_block=4, completions_per_prompt=2, staleness=staleness, sampling=SamplingOptions(max_new_tokens=1)
    )
    arguments = (prompts, TakingTime(rollout), SingleTurn(), weighted([Length()]), options)
    with tempfile.TemporaryDirectory() as folder:
        collector = Collector(*arguments, seed=0)
        if staleness:
            log = CollectedBlocks(Path(folder) / "collected", prompts)
            collector = AheadCollector(*arguments, seed=0, staleness=staleness, blocks=len(rollout), log=log)
        began = time.perf_counter()
        for block, seconds in enumerate(training):
            collector.next(block)
            time.sleep(seconds)
        taken = time.perf_counter() - began
        collector.close()
    return taken


def plot(result: dict[str, Any], path: Path) -> None:
    """Speed and age against staleness: lines are simulated, points measured."""
    from matplotlib import pyplot

    figure, (speed, age) = pyplot.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for number, (name, rows) in enumerate(result["curves"].items()):
        k = [row["staleness"] for row in rows]
        speed.plot(k, [row["simulated_speedup"] for row in rows], color=f"C{number}", label=f"{name}, simulated")
        speed.plot(k, [row["measured_speedup"] for row in rows], "o", color=f"C{number}", label=f"{name}, measured")
        age.plot(k, [row["lag_mean"] for row in rows], color=f"C{number}", label=name)
    speed.set(xlabel="rollout.staleness", ylabel="speed over rollout and training in turn", xticks=k)
    age.set(xlabel="rollout.staleness", ylabel="mean age of a block, versions", xticks=k)
    speed.legend(fontsize=8)
    age.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Both curves, as numbers and as a picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "staleness.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "staleness.svg")
    options = parser.parse_args()
    curves: dict[str, list[dict[str, Any]]] = {}
    for name, (rollout_mean, training_mean) in SHARES.items():
        rollout = block_seconds(rollout_mean * UNIT, SPREAD, BLOCKS, seed=1)
        training = block_seconds(training_mean * UNIT, SPREAD / 5, BLOCKS, seed=2)
        curves[name] = []
        for staleness in range(LARGEST + 1):
            found, seconds = simulate(rollout, training, staleness), measured(rollout, training, staleness)
            row = {
                "staleness": staleness,
                "simulated_seconds": found.seconds,
                "measured_seconds": seconds,
                "simulated_speedup": found.speedup,
                "measured_speedup": found.seconds_in_turn / seconds,
                "lag_mean": found.lag_mean,
                "lag_max": found.lag_max,
            }
            curves[name].append(row)
            print(name, {key: round(value, 3) for key, value in row.items()}, flush=True)
    settings = {"blocks": BLOCKS, "unit_seconds": UNIT, "spread": SPREAD, "numpy": np.__version__}
    result = {"machine": {"processor": processor()}, "settings": settings, "curves": curves}
    write_result(options.out, result, indent=2)
    plot(result, options.plot)


if __name__ == "__main__":
    main()
