"""Tool calls, parsed from the text of a turn."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from logitless.rewards.workers.tasks import unfenced

Format: TypeAlias = Literal["tags", "tool_call", "json"]
"""``tags``: ``<calculator>2+2</calculator>``, with the tool's single argument inside. ``tool_call``: JSON in
``<tool_call>...</tool_call>`` (Qwen, Hermes). ``json``: the whole turn is a JSON object or a list of them (Llama 3,
Mistral), with ``parameters`` or ``arguments``, after ``[TOOL_CALLS]`` or without."""


@dataclass(frozen=True)
class Call:
    """One tool call.

    Args:
        name: of the tool.
        arguments: by name; under ``""`` if the call is text without a name for it.
        error: why the call cannot be parsed; then the rest is empty.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def tool_calls(text: str, names: Sequence[str], style: Format) -> list[Call]:
    """The calls in a turn, in order.

    Args:
        text: of the turn.
        names: of the available tools; with ``tags``, other tags are plain text.
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
        return [call for part in inside for call in _from_json(part, may_be_answer=False)]
    whole = unfenced(text, "json").strip().removeprefix("[TOOL_CALLS]").removeprefix("<|python_tag|>").strip()
    return _from_json(whole, may_be_answer=True) if whole[:1] in ("{", "[") else []


def _from_json(text: str, *, may_be_answer: bool) -> list[Call]:
    """The calls in a JSON text. Anything else is a call with an error, or no call if the text may be an answer."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [] if may_be_answer else [Call("", error=f"no JSON: {error}")]
    calls = []
    for each in value if isinstance(value, list) else [value]:
        arguments = None
        if isinstance(each, dict) and isinstance(each.get("name"), str):
            arguments = each.get("arguments", each.get("parameters", {}))
        if isinstance(arguments, dict):
            calls.append(Call(each["name"], arguments))
        elif not may_be_answer or (isinstance(each, dict) and "name" in each):
            calls.append(Call("", error='an object with "name" and "arguments" expected'))
        else:
            return []
    return calls
