"""The confidence interval of a fraction."""

import math

Z_95 = 1.959964
"""Half the width of a two-sided 95 % interval, in standard deviations of a normal distribution."""


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of the mean of ``count`` independent numbers in [0, 1]; [0, 1] if ``count`` is 0.

    ``(p + z^2 / 2n -+ z * sqrt(p * (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)``

    Made for numbers that are 0 or 1. Others vary less, so that their interval is too wide rather than too narrow.

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
