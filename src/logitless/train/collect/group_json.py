"""Groups as JSON for the log of blocks, and as JSON with the arrays in one buffer, as they are sent between ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from logitless.types import PER_TOKEN, Completion, Group, Prompt, Verdict


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
        group.get("baseline"),  # a log of an earlier version has none
    )


def encode_groups(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], bytes]:
    """Groups as JSON, and the numbers of all their arrays end to end: a block has a million of them.

    In the JSON an array is its length and dtype. int64 arrays are sent as int32 where all numbers fit.
    """
    arrays: list[np.ndarray] = []

    def put(array: np.ndarray) -> tuple[int, str]:
        narrow = array.astype(np.int32) if array.dtype == np.int64 else array
        arrays.append(narrow if np.array_equal(narrow, array, equal_nan=True) else array)
        return len(array), arrays[-1].dtype.str

    rest = [group_as_json(group, put) for group in groups]
    return rest, b"".join(array.tobytes() for array in arrays)


def decode_groups(prompts: Sequence[Prompt], rest: Sequence[dict[str, Any]], numbers: bytes) -> list[Group]:
    """The groups that ``encode_groups`` encoded, one of each prompt."""
    begin = 0

    def take(length_and_dtype: tuple[int, str]) -> np.ndarray:
        nonlocal begin
        count, dtype = length_and_dtype
        array = np.frombuffer(numbers, dtype, count, begin)
        begin += array.nbytes
        return array

    return [group_of_json(prompt, group, take) for prompt, group in zip(prompts, rest, strict=True)]


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _tuple(value) for name, value in fields.items()}


def _tuple(value: Any) -> Any:
    return tuple(_tuple(inner) for inner in value) if isinstance(value, list) else value
