"""Reward functions of TRL's shape with a fault each."""


def raising(completions, **columns):
    """Raise."""
    raise RuntimeError("broken")


def nothing(completions, **columns):
    """Give no score."""
    return [None] * len(completions)
