"""Reward functions of TRL's shape with a fault each."""


def raising(completions, **columns):
    """Raise."""
    raise RuntimeError("broken")


def raising_often(completions, **columns):
    """Raise unless the completion begins with one of two of the toy's eight letters."""
    if not completions[0].startswith(("a", "b")):
        raise RuntimeError("broken")
    return [1.0]


def nothing(completions, **columns):
    """Give no score."""
    return [None] * len(completions)
