"""Seeds. Every random number comes from a generator of its own, seeded by the run's seed and its purpose."""

import hashlib


def derived_seed(*labels: int | str) -> int:
    """A 63-bit seed for one purpose, from the run's seed and labels of the purpose.

    Example:
        >>> derived_seed(0, "rollout", 3) == derived_seed(0, "rollout", 3) != derived_seed(0, "rollout", 4)
        True
    """
    digest = hashlib.sha256(repr(labels).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
