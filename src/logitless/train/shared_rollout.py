"""Sampling and judging with several ranks: each takes its share of the prompts, and all of them get all groups.

A completion is drawn from the seed, the prompt's id and its place among the prompt's samples, and a verdict is of one
completion, so that who draws and who judges makes no difference. What does differ is rounding: the logits of a row
depend in their last bits on which rows are in the batch. Where a number that decides a token lies within that of a
boundary, the token is another one; of tokens drawn from float32 logits that is less than one in a million.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from logitless.distributed.failing import failing_together
from logitless.distributed.ranks import Ranks
from logitless.distributed.shares import in_order
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
    "token_ids": (np.int64, np.int32),
    "logp_sampler": (np.float64, np.float32),
    "entropy_sampler": (np.float64, np.float32),
    "logp_policy": (np.float64, np.float32),
    "token_versions": (np.int64, np.int32),
    "turn": (np.int64, np.int32),
    "prompt_ids": (np.int64, np.int32),
}
"""Fields of a completion, the last of its group, with one number a token, and their types: one that holds them, and one
of half the size that is taken where it holds them all."""


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
    rest, numbers = _taken_apart(groups)
    everyones = zip(ranks.everyones(rest), ranks.everyones_bytes(numbers), strict=True)
    shares = [_put_together(of_rank, of_tokens) for of_rank, of_tokens in everyones]
    found = in_order(shares if clients is None else [shares[rank] for rank in clients])
    return [group_of_json(prompt, group) for prompt, group in zip(prompts, found, strict=True)]


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
        "verdicts": [{name: dict(vars(verdict)) for name, verdict in of.items()} for of in group.verdicts],
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


def _taken_apart(groups: Sequence[Group]) -> tuple[dict[str, Any], bytes]:
    """What goes between ranks as JSON, and the numbers of tokens, of which a block has a million: each field's end to
    end."""
    rest = [group_as_json(group) for group in groups]
    types: dict[str, str] = {}
    numbers = []
    for name, (wide, narrow) in _OF_TOKENS.items():
        having = _having(rest, name)
        parts = [np.array(fields[name], wide) for fields in having]
        whole = np.concatenate([np.zeros(0, wide), *parts])
        with np.errstate(over="ignore"):
            half = whole.astype(narrow)
        if half.astype(wide).tobytes() == whole.tobytes():
            whole = half
        types[name] = whole.dtype.str
        numbers.append(whole.tobytes())
        for fields in having:
            fields[name] = len(fields[name])
    return {"groups": rest, "types": types}, b"".join(numbers)


def _put_together(rest: dict[str, Any], numbers: bytes) -> list[dict[str, Any]]:
    """The groups that ``_taken_apart`` was given, as ``group_as_json`` writes them."""
    groups: list[dict[str, Any]] = rest["groups"]
    begin = 0
    for name, dtype in rest["types"].items():
        having = _having(groups, name)
        count = sum(fields[name] for fields in having)
        whole = np.frombuffer(numbers, dtype, count, begin)
        begin += whole.nbytes
        end = 0
        for fields in having:
            end += fields[name]
            fields[name] = tuple(whole[end - fields[name] : end].tolist())
    return groups


def _having(groups: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """What has the field of ``_OF_TOKENS``, and not None for it."""
    if name == "prompt_ids":
        return list(groups)
    return [fields for group in groups for fields in group["completions"] if fields[name] is not None]


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _tuple(value) for name, value in fields.items()}


def _tuple(value: Any) -> Any:
    return tuple(_tuple(inner) for inner in value) if isinstance(value, list) else value
