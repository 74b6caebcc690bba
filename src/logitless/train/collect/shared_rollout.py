"""Sampling and judging with several ranks: each takes its share of the prompts, and all of them get all groups.

A completion is drawn from the seed, the prompt's id and its place among the prompt's samples, and a verdict is of one
completion, so that who draws and who judges makes no difference. What does differ is rounding: the logits of a row
depend in their last bits on which rows are in the batch. Where a number that decides a token lies within that of a
boundary, the token is another one; of tokens drawn from float32 logits that is less than one in a million.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from logitless.distributed.failing import failing_together
from logitless.distributed.ranks import Ranks
from logitless.distributed.shares import in_order
from logitless.rewards.combine import Unscored
from logitless.rewards.reward import WeightedReward
from logitless.rollout.engine import Engine
from logitless.rollout.environment import Driver, Environment, Limits
from logitless.rollout.play import play
from logitless.rollout.sampling import SamplingOptions
from logitless.train.collect.episode_rewards import judge
from logitless.train.collect.one_client import OneClientANode
from logitless.types import PER_TOKEN, Completion, Group, Prompt, Verdict


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
    of_ranks = list(zip(ranks.all_gather_object(rest), ranks.all_gather_bytes(numbers), strict=True))
    taking = range(ranks.world) if clients is None else clients
    return in_order([_put_together(prompts[i :: len(taking)], *of_ranks[rank]) for i, rank in enumerate(taking)])


def group_as_json(group: Group, array: Callable[[np.ndarray], Any] = np.ndarray.tolist) -> dict[str, Any]:
    """What was sampled and said, and of the prompt, which every rank has, the tokens that were read.

    Args:
        group: judged.
        array: what stands for an array.

    Example:
        >>> prompt = Prompt("7", "2+2=", (4,))
        >>> group = Group(prompt, (Completion("7", (4,), "4", "stop"),), ({"exact": Verdict.graded(1.0)},), (1.0,))
        >>> group_of_json(prompt, group_as_json(group)) == group
        True
    """
    return {
        "prompt_ids": array(group.prompt.token_ids),
        "completions": [completion.as_json(array) for completion in group.completions],
        "verdicts": [{name: dict(vars(verdict)) for name, verdict in of.items()} for of in group.verdicts],
        "rewards": group.rewards,
        "turn_rewards": group.turn_rewards,
        "conversations": group.conversations,
    }


def group_of_json(prompt: Prompt, group: Mapping[str, Any], array: Callable[[Any], Any] = np.asarray) -> Group:
    """The group that ``group_as_json`` wrote; JSON has lists where it had tuples.

    Args:
        prompt: of the group.
        group: as JSON.
        array: makes an array of what stands for one; called in the order in which they were written.
    """
    read = replace(prompt, token_ids=array(group["prompt_ids"]))
    completions = [
        {name: array(value) if name in PER_TOKEN and value is not None else value for name, value in each.items()}
        for each in group["completions"]
    ]
    return Group(
        read,
        tuple(Completion(**each) for each in completions),
        tuple({name: Verdict(**_tuples(verdict)) for name, verdict in of.items()} for of in group["verdicts"]),
        tuple(group["rewards"]),
        tuple(tuple(of) for of in group["turn_rewards"]),
        tuple(tuple(of) for of in group["conversations"]),
    )


def _taken_apart(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], bytes]:
    """What goes between ranks as JSON, and the arrays, of which a block has a million numbers, end to end.

    In JSON an array is its length and type; numbers that fit into four bytes travel in four.
    """
    arrays: list[np.ndarray] = []

    def put(array: np.ndarray) -> tuple[int, str]:
        narrow = array.astype(np.int32) if array.dtype == np.int64 else array
        arrays.append(narrow if np.array_equal(narrow, array, equal_nan=True) else array)
        return len(array), arrays[-1].dtype.str

    rest = [group_as_json(group, put) for group in groups]
    return rest, b"".join(array.tobytes() for array in arrays)


def _put_together(prompts: Sequence[Prompt], rest: Sequence[dict[str, Any]], numbers: bytes) -> list[Group]:
    """The groups that ``_taken_apart`` was given, of these prompts."""
    begin = 0

    def take(said: tuple[int, str]) -> np.ndarray:
        nonlocal begin
        count, dtype = said
        array = np.frombuffer(numbers, dtype, count, begin)
        begin += array.nbytes
        return array

    return [group_of_json(prompt, group, take) for prompt, group in zip(prompts, rest, strict=True)]


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _tuple(value) for name, value in fields.items()}


def _tuple(value: Any) -> Any:
    return tuple(_tuple(inner) for inner in value) if isinstance(value, list) else value
