"""Judging: what the rewards say of episodes, and the one number a completion that comes of it."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from logitless.objective.advantage import has_signal
from logitless.rewards.combine import Unscored, score_batch, total_reward
from logitless.rewards.reward import EpisodeReward, WeightedReward
from logitless.types import Episode, Group, Prompt, Verdict

ENVIRONMENT = "environment"
"""The verdict on an episode that no reward judges beside the environment that pays for it."""


def judge(
    prompts: Sequence[Prompt],
    episodes: Sequence[Sequence[Episode]],
    rewards: Sequence[WeightedReward],
    *,
    unscored: Unscored,
) -> list[Group]:
    """A group of each prompt: its completions with what was said of them.

    A reward that reads text is given the completion's text; an ``EpisodeReward`` is given the whole episode. What the
    environment paid at the turns is added to the weighted sum of the rewards; where there are none, it is the reward,
    and a verdict called ``environment`` says so. An episode that its environment could not go on with is an ``error``
    under every reward.

    Args:
        prompts: may repeat.
        episodes: of each prompt, in order.
        rewards: judge.
        unscored: what a completion is worth that some of the functions could not judge, see ``total_reward``.

    Example:
        >>> from logitless.rewards.combine import weighted
        >>> from logitless.rewards.text.length import Length
        >>> from logitless.types import Completion
        >>> episode = Episode(Completion("7", (4, 2), "4", "stop"), ())
        >>> [group] = judge([Prompt("7", "2+2=", (4,))], [[episode]], weighted([Length()]), unscored="leave_out")
        >>> group.rewards
        (2.0,)
    """
    pairs = [(p, episode) for p, of_prompt in zip(prompts, episodes, strict=True) for episode in of_prompt]
    verdicts = _verdicts(pairs, rewards)
    totals = [
        _total(said, episode, [r for r in rewards if r.applies_to(prompt.source)], unscored)
        for said, (prompt, episode) in zip(verdicts, pairs, strict=True)
    ]
    groups = []
    for prompt, of_prompt in zip(prompts, episodes, strict=True):
        n = len(of_prompt)
        paid = tuple(episode.turn_rewards for episode in of_prompt)
        groups.append(
            Group(
                prompt,
                tuple(episode.completion for episode in of_prompt),
                tuple(verdicts[:n]),
                tuple(totals[:n]),
                paid if any(paid) else (),
                tuple(e.messages for e in of_prompt) if any(e.num_turns > 1 for e in of_prompt) else (),
            )
        )
        verdicts, totals = verdicts[n:], totals[n:]
    return groups


def _verdicts(pairs: Sequence[tuple[Prompt, Episode]], rewards: Sequence[WeightedReward]) -> list[dict[str, Verdict]]:
    """By reward name, in the rewards' order, for each episode; of the rewards that judge its prompt's source."""
    if not rewards:
        return [{ENVIRONMENT: _failed(e) if e.failure else Verdict.graded(_paid(e))} for _, e in pairs]
    said: list[dict[str, Verdict]] = [{} for _ in pairs]
    for entry in rewards:
        rows = [row for row, (prompt, _) in enumerate(pairs) if entry.applies_to(prompt.source)]
        for row, verdict in zip(rows, _verdicts_of(entry, [pairs[row] for row in rows]) if rows else (), strict=True):
            episode = pairs[row][1]
            said[row][entry.name] = _failed(episode) if episode.failure else verdict
    return said


def _verdicts_of(entry: WeightedReward, pairs: Sequence[tuple[Prompt, Episode]]) -> list[Verdict]:
    """What one reward says of each episode."""
    names = {name for prompt, _ in pairs for name in prompt.columns}
    columns = {name: [p.columns.get(name) for p, _ in pairs] for name in names}
    if isinstance(entry.reward, EpisodeReward):
        return entry.reward.episode_verdicts([episode for _, episode in pairs], columns)
    said = score_batch(
        [entry],
        [p.messages if p.messages is not None else p.text for p, _ in pairs],
        [episode.completion.text for _, episode in pairs],
        columns,
        completion_ids=[episode.completion.token_ids.tolist() for _, episode in pairs],
    )
    return [row[entry.name] for row in said]


def _failed(episode: Episode) -> Verdict:
    """What is said of an episode that its environment could not go on with."""
    first, _, trace = episode.failure.partition("\n")
    return Verdict(score=None, status="error", message=f"the environment failed: {first}", traceback=trace)


def _total(
    verdicts: dict[str, Verdict], episode: Episode, rewards: Sequence[WeightedReward], unscored: Unscored
) -> float | None:
    if ENVIRONMENT in verdicts and not rewards:
        return verdicts[ENVIRONMENT].score
    total = total_reward(verdicts, rewards, unscored)
    return total + _paid(episode) if total is not None and episode.turn_rewards else total


def _paid(episode: Episode) -> float:
    return math.fsum(episode.turn_rewards)


def signal(groups: Sequence[Group]) -> list[bool]:
    """Whether the rewards inside each group differ.

    Example:
        >>> signal([])
        []
    """
    if not groups:
        return []
    rewards, group = rewards_of_groups(groups)
    return has_signal(rewards, group).tolist()


def rewards_of_groups(groups: Sequence[Group]) -> tuple[Float[Tensor, "B"], Int[Tensor, "B"]]:
    """The reward of each completion, NaN where it has none, and the number of its group.

    Example:
        >>> rewards_of_groups([])
        (tensor([]), tensor([], dtype=torch.int64))
    """
    rewards = torch.tensor([number(r) for g in groups for r in g.rewards], dtype=torch.float32)
    return rewards, torch.tensor([i for i, g in enumerate(groups) for _ in g.completions], dtype=torch.long)


def number(reward: float | None) -> float:
    """The reward, or NaN where there is none.

    Example:
        >>> number(None)
        nan
    """
    return math.nan if reward is None else reward
