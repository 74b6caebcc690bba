"""Groups as JSON for the log of blocks, and as JSON with the arrays in one buffer, as they are sent between ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from logitless.rollout.arrays import Arrays, taking
from logitless.train.store.stored_block import tuples
from logitless.types import Completion, Group, Prompt, Verdict


def group_as_json(group: Group, array: Callable[[np.ndarray], Any] = np.ndarray.tolist) -> dict[str, Any]:
    """A group as JSON. Of the prompt it has the token ids alone: the reader knows the prompt.

    Args:
        group: with rewards.
        array: encodes an array.

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
        "baseline": group.baseline,
    }


def group_of_json(prompt: Prompt, group: Mapping[str, Any], array: Callable[[Any], Any] = np.asarray) -> Group:
    """The group that ``group_as_json`` encoded.

    Args:
        prompt: of the group.
        group: as JSON, which has lists in place of tuples.
        array: decodes an array; called in the order in which they were encoded.
    """
    read = replace(prompt, token_ids=array(group["prompt_ids"]))
    return Group(
        read,
        tuple(Completion.of_json(each, array) for each in group["completions"]),
        tuple({name: Verdict(**tuples(verdict)) for name, verdict in of.items()} for of in group["verdicts"]),
        tuple(group["rewards"]),
        tuple(tuple(of) for of in group["turn_rewards"]),
        tuple(tuple(of) for of in group["conversations"]),
        group.get("baseline"),  # a log of an earlier version has none
    )


def encode_groups(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], bytes]:
    """Groups as JSON, and the numbers of all their arrays end to end (``arrays.py``)."""
    arrays = Arrays()
    rest = [group_as_json(group, arrays.put) for group in groups]
    return rest, arrays.joined()


def decode_groups(prompts: Sequence[Prompt], rest: Sequence[Mapping[str, Any]], numbers: bytes) -> list[Group]:
    """The groups that ``encode_groups`` encoded, one of each prompt."""
    take = taking(numbers)
    return [group_of_json(prompt, group, take) for prompt, group in zip(prompts, rest, strict=True)]
