"""What a completion is worth: the verdicts of several rewards by name, and the one number that comes of them."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from logitless.errors import ConfigurationError, InputError
from logitless.rewards.reward import EpisodeReward, TextReward, WeightedReward
from logitless.types import Episode, Group, Prompt, Verdict

Unscored: TypeAlias = Literal["leave_out", "drop"]

ENVIRONMENT = "environment"
"""The verdict on an episode that no reward judges beside the environment that pays for it."""


def weighted(rewards: Sequence[TextReward]) -> tuple[WeightedReward, ...]:
    """The entries of a recipe's list of rewards, each under its label, with its weight.

    Raises:
        ConfigurationError: two have the same name, or there are gates and nothing beside them.

    Example:
        >>> from logitless.rewards.text.length import Length
        >>> entries = weighted([Length(weight=0.5), Length(unit="words", label="words")])
        >>> [(entry.name, entry.weight) for entry in entries]
        [('length', 0.5), ('words', 1.0)]
    """
    entries = tuple(WeightedReward(r, r.weight, r.metric_name, r.gate, r.sources) for r in rewards)
    twice = [name for name, times in Counter(entry.name for entry in entries).items() if times > 1]
    if twice:
        raise ConfigurationError(
            needed="a different name for every reward",
            given=f"{', '.join(map(repr, twice))} more than once",
            remedy="Give one of them a `label`.",
        )
    if entries and all(entry.gate for entry in entries):
        raise ConfigurationError(
            needed="a reward that is not a gate",
            given=f"{len(entries)} gates only",
            remedy="Add a reward, or set `gate: false` on one.",
        )
    return entries


def weighted_sum(
    verdicts: Mapping[str, Verdict],
    weights: Mapping[str, float],
    *,
    gates: Sequence[str] = (),
    unscored: Unscored = "leave_out",
) -> float | None:
    """``sum_name weights[name] * verdicts[name].score``, 0 where a gate is shut, None where there is nothing to sum.

    A gate is open where its score is above 0. A gate without a score leaves the reward unknown: None.

    Args:
        verdicts: of one completion, by reward name.
        weights: by reward name; other verdicts do not count.
        gates: names of the gates.
        unscored: ``leave_out`` sums the scored rewards alone and gives None only where there is none; ``drop`` gives
            None as soon as one of them has no score.

    Raises:
        InputError: a weight or a gate without a verdict.

    Example:
        >>> timeout = Verdict(score=None, status="timeout")
        >>> weighted_sum({"exact": Verdict.graded(1.0), "style": timeout}, {"exact": 2.0, "style": 1.0})
        2.0
        >>> weighted_sum({"style": timeout}, {"style": 1.0}) is None
        True
    """
    absent = [name for name in (*weights, *gates) if name not in verdicts]
    if absent:
        raise InputError(
            needed=f"a verdict of each of {[*weights, *gates]}",
            given=f"none of {absent}",
            remedy="Score with the same rewards that the weights are for.",
        )
    openness = [verdicts[name].score for name in gates]
    scores = {name: verdicts[name].score for name in weights}
    scored = {name: score for name, score in scores.items() if score is not None}
    if None in openness or not scored or (unscored == "drop" and len(scored) < len(scores)):
        return None
    if any(score <= 0 for score in openness if score is not None):
        return 0.0
    return math.fsum(weights[name] * score for name, score in scored.items())


def total_reward(
    verdicts: Mapping[str, Verdict], rewards: Sequence[WeightedReward], unscored: Unscored = "leave_out"
) -> float | None:
    """The number a completion is trained on: ``weighted_sum`` with the weights and gates of these rewards.

    Example:
        >>> from logitless.rewards.text.length import Length
        >>> rewards = weighted([Length(unit="words", weight=0.5)])
        >>> total_reward({"length": Verdict.graded(2.0)}, rewards)
        1.0
    """
    return weighted_sum(
        verdicts,
        {entry.name: entry.weight for entry in rewards if not entry.gate},
        gates=[entry.name for entry in rewards if entry.gate],
        unscored=unscored,
    )


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
    said = entry.reward.verdicts(
        [p.messages if p.messages is not None else p.text for p, _ in pairs],
        [episode.completion.text for _, episode in pairs],
        columns,
        [episode.completion.token_ids.tolist() for _, episode in pairs],
    )
    if len(said) != len(pairs):
        raise InputError(
            needed=f"a verdict for each of {len(pairs)} completions",
            given=f"{len(said)} from reward {entry.name!r}",
            remedy="Return one Verdict a completion, in order.",
        )
    return said


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
