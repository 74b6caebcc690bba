"""How far a fraction of few things may be from that of many."""

import math

Z_95 = 1.959964
"""Half the width of a two-sided 95 % interval, in standard deviations of a normal distribution."""


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of the mean of ``count`` independent numbers in [0, 1]; all of [0, 1] where there is none.

    ``(p + z^2 / 2n -+ z * sqrt(p * (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)``

    A number in [0, 1] varies at most as much as a coin of the same mean, so that for fractions of a thing the interval
    is wide rather than narrow.

    Source: Wilson 1927, Probable Inference.

    Example:
        >>> low, high = wilson_interval(0.8, 10)
        >>> f"{low:.3f} {high:.3f}"
        '0.490 0.943'
    """
    if not count:
        return 0.0, 1.0
    share = Z_95**2 / count
    middle = mean + share / 2
    half = Z_95 * math.sqrt(max(0.0, mean * (1 - mean)) / count + share / (4 * count))
    return max(0.0, (middle - half) / (1 + share)), min(1.0, (middle + half) / (1 + share))
