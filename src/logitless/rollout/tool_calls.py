"""How a policy writes that it wants a tool, and how that is read: from the text of a turn, never from its tokens."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from logitless.rewards.workers.tasks import unfenced

Format: TypeAlias = Literal["tags", "tool_call", "json"]
"""``tags``: ``<calculator>2+2</calculator>``, what stands inside being the tool's one argument. ``tool_call``: JSON in
``<tool_call>...</tool_call>``, as Qwen and Hermes write it. ``json``: the whole turn is a JSON object or a list of
them, as Llama 3 and Mistral write it (``parameters`` or ``arguments``, ``[TOOL_CALLS]`` before or not)."""


@dataclass(frozen=True)
class Call:
    """One wish for a tool.

    Args:
        name: of the tool.
        arguments: by name; text alone stands under ``""``.
        error: why it cannot be read; then the rest is empty.

    Example:
        >>> Call("calculator", {"expression": "2+2"}).arguments["expression"]
        '2+2'
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def tool_calls(text: str, names: Sequence[str], style: Format) -> list[Call]:
    """The calls that a turn makes, in its order; none where it only speaks.

    Args:
        text: of the turn.
        names: of the tools that there are; under ``tags`` other tags are text.
        style: how calls are written.

    Example:
        >>> tool_calls("So <calculator>2+2</calculator>", ["calculator"], "tags")
        [Call(name='calculator', arguments={'': '2+2'}, error='')]
        >>> tool_calls('<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>', ["python"], "tool_call")
        [Call(name='python', arguments={'code': '1'}, error='')]
        >>> tool_calls('{"name": "python", "parameters": {"code": "1"}}', ["python"], "json")
        [Call(name='python', arguments={'code': '1'}, error='')]
        >>> tool_calls("The answer is 4.", ["python"], "json"), tool_calls("<tool_call>{", ["python"], "tool_call")
        ([], [])
    """
    if style == "tags":
        either = "|".join(map(re.escape, names))
        return [Call(m[1], {"": m[2]}) for m in re.finditer(rf"<({either})>(.*?)</\1>", text, re.DOTALL)]
    if style == "tool_call":
        inside = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
        return [call for part in inside for call in _of_json(part, part)]
    whole = unfenced(text, "json").strip().removeprefix("[TOOL_CALLS]").removeprefix("<|python_tag|>").strip()
    return _of_json(whole, None) if whole[:1] in ("{", "[") else []


def _of_json(text: str, otherwise: str | None) -> list[Call]:
    """Calls in JSON; what is no JSON is a call that cannot be read, or none where it may be an answer."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [] if otherwise is None else [Call("", error=f"no JSON: {error}")]
    calls = []
    for each in value if isinstance(value, list) else [value]:
        arguments = None
        if isinstance(each, dict) and isinstance(each.get("name"), str):
            arguments = each.get("arguments", each.get("parameters", {}))
        if isinstance(arguments, dict):
            calls.append(Call(each["name"], arguments))
        elif otherwise is not None or (isinstance(each, dict) and "name" in each):
            calls.append(Call("", error='an object with "name" and "arguments" expected'))
        else:
            return []  # JSON that is an answer
    return calls
