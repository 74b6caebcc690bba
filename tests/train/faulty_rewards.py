"""Reward functions of TRL's shape with a fault each."""

import time


def raising(completions, **columns):
    """Raise."""
    raise RuntimeError("broken")


def hanging(completions, **columns):
    """Never come back in time."""
    time.sleep(60)


def not_a_number(completions, **columns):
    """Give NaN."""
    return [float("nan")] * len(completions)


def too_many(completions, **columns):
    """Give one value too many."""
    return [1.0] * (len(completions) + 1)


def nothing(completions, **columns):
    """Give no score."""
    return [None] * len(completions)
