"""Speed and staleness of collecting ahead, measured and simulated.

The collector is that of a run; the engine and the trainer only wait for the times that the simulation is given, like an
engine on other GPUs.

The simulation has one sampler and one trainer, as ``train.collect.ahead``: sampling block b begins when block b - 1 is
sampled and b - k blocks have been trained on; training on it begins when it is sampled and block b - 1 is trained on.

    begin[b] = max(end[b-1], trained[b-k-1])      end[b] = begin[b] + rollout time
    trained[b] = max(end[b], trained[b-1]) + training time

With equal times k = 1 keeps both busy all the time; a larger k helps only if times vary from block to block, and makes
completions older.

python benchmarks/staleness.py --out benchmarks/results/staleness.json --plot docs/staleness.svg
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from logitless.bench.machine import write_result
from logitless.errors import InputError
from logitless.rewards.reward import weighted
from logitless.rewards.text.length import Length
from logitless.rollout.environment import SingleTurn
from logitless.rollout.sampling import SamplingOptions
from logitless.train.collect.ahead import AheadCollector
from logitless.train.collect.block_log import BlockLog
from logitless.train.collect.collector import Collector
from logitless.train.recipe.rollout import RolloutSection
from logitless.types import Completion, Prompt
from script import RESULTS, ROOT, command_line, processor

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "logitless"

SHARES = {"equal": (1.0, 1.0), "rollout twice as long": (2.0, 1.0)}
LARGEST, BLOCKS, UNIT, SPREAD = 4, 40, 0.4, 0.5


@dataclass(frozen=True)
class Simulated:
    """What came of a run with a clock.

    Args:
        staleness: k, blocks ahead.
        seconds: from the first rollout to the last step.
        seconds_in_turn: the same where nothing overlaps.
        lag_mean: versions, by which a block was older than the weights it was trained on, over all blocks.
        lag_max: the same.

    Example:
        >>> Simulated(1, 60.0, 100.0, 0.9, 1).speedup.__round__(2)
        1.67
    """

    staleness: int
    seconds: float
    seconds_in_turn: float
    lag_mean: float
    lag_max: int

    @property
    def speedup(self) -> float:
        """Over rollout and training in turn."""
        return self.seconds_in_turn / self.seconds


def simulate(rollout_seconds: Sequence[float], training_seconds: Sequence[float], staleness: int) -> Simulated:
    """Run the clock.

    Args:
        rollout_seconds: of each block.
        training_seconds: of each block, scoring included.
        staleness: k.

    Raises:
        InputError: no blocks, other numbers of them, or a negative time or staleness.

    Example:
        >>> [simulate([3.0] * 4, [2.0] * 4, k).seconds for k in (0, 1)]  # 4 * (3 + 2); 4 * 3 + 2
        [20.0, 14.0]
    """
    blocks = len(rollout_seconds)
    if not blocks == len(training_seconds) > 0 or staleness < 0 or min(*rollout_seconds, *training_seconds, 0.0) < 0:
        raise InputError(
            needed="a time of rollout and one of training for each block, and a staleness of at least 0",
            given=f"{blocks} and {len(training_seconds)} times, staleness={staleness}",
            remedy="Give what `time/rollout_seconds` and `time/training_seconds` say of some blocks.",
        )
    ended, trained, lags = 0.0, list[float](), list[int]()
    for block in range(blocks):
        released = trained[block - staleness - 1] if block > staleness else 0.0
        begun = max(ended, released)
        seen = sum(each <= begun for each in trained)  # versions that its weights have
        ended = begun + rollout_seconds[block]
        trained.append(max(ended, trained[-1] if trained else 0.0) + training_seconds[block])
        lags.append(block - seen)
    in_turn = float(sum(rollout_seconds) + sum(training_seconds))
    return Simulated(staleness, trained[-1], in_turn, sum(lags) / blocks, max(lags))


def block_seconds(mean: float, spread: float, blocks: int, *, seed: int) -> list[float]:
    """Times of blocks that vary: log-normal, of this mean and of this standard deviation in units of the mean.

    Example:
        >>> block_seconds(2.0, 0.0, 2, seed=0)
        [2.0, 2.0]
    """
    sigma = np.sqrt(np.log1p(spread**2))
    drawn = np.random.default_rng(seed).standard_normal(blocks)
    return [float(each) for each in mean * np.exp(sigma * drawn - sigma**2 / 2)]


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
            log = BlockLog(Path(folder) / "collected", prompts)
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
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "staleness.json")
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
