"""Sampling and judging with several ranks: each takes its share of the prompts, and all of them get all groups.

A completion is drawn from the seed, the prompt's id and its place among the prompt's samples, and a verdict is of one
completion, so that who draws and who judges makes no difference. What does differ is rounding: the logits of a row
depend in their last bits on which rows are in the batch. Where a number that decides a token lies within that of a
boundary, the token is another one; of tokens drawn from float32 logits that is less than one in a million.
"""

import base64
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from logitless.distributed.failing import failing_together
from logitless.distributed.ranks import Ranks
from logitless.rewards.combine import Unscored
from logitless.rewards.contract import WeightedReward
from logitless.rollout.engine import Engine
from logitless.rollout.environment import Driver, Environment, Limits
from logitless.rollout.play import play
from logitless.rollout.sampling import SamplingOptions
from logitless.train.judge import judge
from logitless.train.one_client import OneClientANode
from logitless.types import Completion, Group, Prompt, Verdict

_OF_TOKENS = {
    "token_ids": "q",
    "logp_sampler": "d",
    "entropy_sampler": "d",
    "logp_policy": "d",
    "token_versions": "q",
    "turn": "q",
}
"""Fields of a completion with one number a token, and their type in an ``array``."""


def sampled_and_judged(
    ranks: Ranks,
    engine: Engine,
    environment: Environment | Driver,
    prompts: Sequence[Prompt],
    rewards: Sequence[WeightedReward],
    *,
    num_samples: int,
    options: SamplingOptions,
    unscored: Unscored,
    seed: int,
    limits: Limits = Limits(),
) -> list[Group]:
    """The judged groups of all prompts, in order, on every rank.

    Args:
        ranks: that share the work; all of them call.
        engine: samples, with the same weights on every rank.
        environment: answers.
        prompts: the same on every rank, with distinct ids.
        rewards: judge.
        num_samples: of each prompt.
        options: of sampling.
        unscored: what a completion is worth that some of the functions could not judge.
        seed: of this round.
        limits: of an episode.

    Raises:
        LogitlessError: on every rank, what one of them met: an EngineError, where an engine elsewhere failed it.
    """
    clients = engine.clients if isinstance(engine, OneClientANode) else None
    mine = [prompts[i] for i in ranks.shared(len(prompts), clients)]
    groups: list[Group] = []
    with failing_together(ranks, "completions, sampled and judged"):
        if mine:
            if isinstance(environment, Driver):
                mine, episodes = environment.episodes(
                    engine, mine, num_samples=num_samples, options=options, seed=seed, limits=limits
                )
            else:
                episodes = play(
                    engine, mine, environment, num_samples=num_samples, options=options, seed=seed, limits=limits
                )
            groups = judge(mine, episodes, rewards, unscored=unscored)
    if ranks.world == 1:
        return groups
    found = ranks.together([_shortened(group_as_json(group)) for group in groups], clients)
    return [group_of_json(prompt, _as_it_was(group)) for prompt, group in zip(prompts, found, strict=True)]


def group_as_json(group: Group) -> dict[str, Any]:
    """What was sampled and said, and of the prompt, which every rank has, the tokens that were read.

    Example:
        >>> prompt = Prompt("7", "2+2=", (4,))
        >>> group = Group(prompt, (Completion("7", (4,), "4", "stop"),), ({"exact": Verdict.graded(1.0)},), (1.0,))
        >>> group_of_json(prompt, group_as_json(group)) == group
        True
    """
    return {
        "prompt_ids": group.prompt.token_ids,
        "completions": [dict(vars(completion)) for completion in group.completions],
        "verdicts": [{name: asdict(verdict) for name, verdict in of.items()} for of in group.verdicts],
        "rewards": group.rewards,
        "turn_rewards": group.turn_rewards,
        "conversations": group.conversations,
    }


def group_of_json(prompt: Prompt, group: Mapping[str, Any]) -> Group:
    """The group that ``group_as_json`` wrote; JSON has lists where it had tuples."""
    return Group(
        replace(prompt, token_ids=tuple(group["prompt_ids"])),
        tuple(Completion(**_tuples(each)) for each in group["completions"]),
        tuple({name: Verdict(**_tuples(verdict)) for name, verdict in of.items()} for of in group["verdicts"]),
        tuple(group["rewards"]),
        tuple(tuple(of) for of in group["turn_rewards"]),
        tuple(tuple(of) for of in group["conversations"]),
    )


def _shortened(group: dict[str, Any]) -> dict[str, Any]:
    """The same, numbers of tokens as the text of their bytes: a block has hundreds of thousands, and every rank reads
    those of all."""
    for fields in group["completions"]:
        for name, kind in _OF_TOKENS.items():
            if fields[name] is not None:
                fields[name] = base64.b64encode(array(kind, fields[name]).tobytes()).decode()
    return group


def _as_it_was(group: dict[str, Any]) -> dict[str, Any]:
    for fields in group["completions"]:
        for name, kind in _OF_TOKENS.items():
            if fields[name] is not None:
                numbers = array(kind)
                numbers.frombytes(base64.b64decode(fields[name]))
                fields[name] = tuple(numbers)
    return group


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _tuple(value) for name, value in fields.items()}


def _tuple(value: Any) -> Any:
    return tuple(_tuple(inner) for inner in value) if isinstance(value, list) else value
