"""How far ahead to collect: a simulation with a clock and no model.

One sampler and one trainer, as in ``train.ahead``: block b begins when the one before it is through and b - k blocks
have been trained on; training on it begins when it is there and the one before it is through.

    begin[b] = max(end[b-1], trained[b-k-1])      end[b] = begin[b] + rollout time
    trained[b] = max(end[b], trained[b-1]) + training time

With equal times every block one version behind is enough for both to be busy all the time; more only helps where times
vary from block to block, and each costs a version of age.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from logitless.errors import InputError


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


def chosen_staleness(
    rollout_seconds: Sequence[float], training_seconds: Sequence[float], *, largest: int = 8, within: float = 0.02
) -> Simulated:
    """The smallest staleness that is about as fast as any: age is paid for in each step, and speed is not won twice.

    Args:
        rollout_seconds, training_seconds: as ``simulate`` takes them.
        largest: staleness to try.
        within: of the best time, as a share.

    Example:
        >>> chosen_staleness([3.0] * 100, [2.0] * 100).staleness
        1
    """
    tried = [simulate(rollout_seconds, training_seconds, k) for k in range(largest + 1)]
    best = min(each.seconds for each in tried)
    return next(each for each in tried if each.seconds <= best * (1 + within))
