"""Verdicts of several rewards on texts, as in a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from logitless.rewards.reward import WeightedReward, judge
from logitless.types import Completion, Episode, Prompt, Verdict


def scored(
    rewards: Sequence[WeightedReward], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> list[dict[str, Verdict]]:
    """The verdicts on each completion, by reward name; columns have one value a completion."""
    groups = judge(
        [
            Prompt(str(row), "?", (1,), {n: values[row] for n, values in columns.items()})
            for row in range(len(completions))
        ],
        [[Episode(Completion(str(row), (5,), text, "stop"), ())] for row, text in enumerate(completions)],
        rewards,
        unscored="leave_out",
    )
    return [verdicts for group in groups for verdicts in group.verdicts]
