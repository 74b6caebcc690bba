"""Judged groups as JSON: for the log of blocks, and with their arrays apart, as they go between ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from logitless.types import PER_TOKEN, Completion, Group, Prompt, Verdict


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


def taken_apart(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], bytes]:
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


def put_together(prompts: Sequence[Prompt], rest: Sequence[dict[str, Any]], numbers: bytes) -> list[Group]:
    """The groups that ``taken_apart`` was given, of these prompts."""
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
