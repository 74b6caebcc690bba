"""Groups as JSON beside one buffer with the numbers of all their arrays: for the log of blocks, and between ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from logitless.rollout.arrays import Arrays, taking
from logitless.train.store.stored_block import tuples
from logitless.types import Completion, Group, Prompt, Verdict


def encode_groups(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], bytes]:
    """Groups as JSON, and the numbers of all their arrays end to end (``arrays.py``).

    Of a prompt there are the token ids alone: the reader knows the prompt.

    Example:
        >>> prompt = Prompt("7", "2+2=", (4,))
        >>> group = Group(prompt, (Completion("7", (4,), "4", "stop"),), ({"exact": Verdict.graded(1.0)},), (1.0,))
        >>> decode_groups([prompt], *encode_groups([group])) == [group]
        True
    """
    arrays = Arrays()
    rest = [_encoded(group, arrays.put) for group in groups]
    return rest, arrays.joined()


def decode_groups(prompts: Sequence[Prompt], rest: Sequence[Mapping[str, Any]], numbers: bytes) -> list[Group]:
    """The groups that ``encode_groups`` encoded, one of each prompt."""
    take = taking(numbers)
    return [_decoded(prompt, group, take) for prompt, group in zip(prompts, rest, strict=True)]


def _encoded(group: Group, put: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    return {
        "prompt_ids": put(group.prompt.token_ids),
        "completions": [completion.as_json(put) for completion in group.completions],
        "verdicts": [{name: dict(vars(verdict)) for name, verdict in of.items()} for of in group.verdicts],
        "rewards": group.rewards,
        "turn_rewards": group.turn_rewards,
        "conversations": group.conversations,
        "baseline": group.baseline,
    }


def _decoded(prompt: Prompt, group: Mapping[str, Any], take: Callable[[Any], Any]) -> Group:
    """JSON has lists in place of tuples; arrays are taken in the order in which they were put."""
    read = replace(prompt, token_ids=take(group["prompt_ids"]))
    return Group(
        read,
        tuple(Completion.of_json(each, take) for each in group["completions"]),
        tuple({name: Verdict(**tuples(verdict)) for name, verdict in of.items()} for of in group["verdicts"]),
        tuple(group["rewards"]),
        tuple(tuple(of) for of in group["turn_rewards"]),
        tuple(tuple(of) for of in group["conversations"]),
        group["baseline"],
    )
