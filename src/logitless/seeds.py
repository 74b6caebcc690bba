"""Seeds: everything random is drawn from the run's seed and from what it is for, never from a generator in common."""

import hashlib


def derived_seed(*labels: int | str) -> int:
    """A seed of 63 bits for one purpose, from the run's seed and what it is for.

    Example:
        >>> derived_seed(0, "rollout", 3) == derived_seed(0, "rollout", 3) != derived_seed(0, "rollout", 4)
        True
    """
    digest = hashlib.sha256(repr(labels).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
