"""Rewards of one's own: a template to copy beside a recipe. docs/own_reward.md says what holds for them.

rewards:
  - {name: function, path: ./own_reward.py:right_number}
  - {name: function, path: ./own_reward.py:brevity, weight: 0.2}
"""

import re

LONGEST = 200


def right_number(completions: list[str], answer: list[str]) -> list[float | None]:
    """1 where the last number of a completion is that of the row's column ``answer``, else 0."""
    return [_score(completion, expected) for completion, expected in zip(completions, answer, strict=True)]


def _score(completion: str, expected: str | None) -> float | None:
    if expected is None:
        return None  # cannot be scored: the completion is left out, which is not the same as 0
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and int(numbers[-1]) == int(expected))


def brevity(completions: list[str]) -> list[float]:
    """1 for an empty completion, 0 from ``LONGEST`` characters on."""
    return [max(0.0, 1 - len(completion) / LONGEST) for completion in completions]
