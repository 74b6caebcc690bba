"""The curve of a run's mean rewards, as the benchmarks that compare runs draw it."""

from collections.abc import Sequence

from logitless.train.plots import Line

WINDOW = 10


def reward_curve(label: str, rewards: Sequence[float]) -> Line:
    """Each point the mean of the last ten blocks (or steps), of fewer at the beginning."""
    windows = [rewards[max(0, b + 1 - WINDOW) : b + 1] for b in range(len(rewards))]
    return Line(label, tuple(range(1, len(rewards) + 1)), tuple(sum(window) / len(window) for window in windows))
