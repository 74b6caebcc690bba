"""Tool calls in each of the formats that models write."""

import pytest

from logitless.rollout.tool_calls import Call, tool_calls

NAMES = ["calculator", "python"]


@pytest.mark.parametrize(
    ("style", "text", "calls"),
    [
        ("tags", "a <python>x\ny</python> b <calculator>1</calculator>", [("python", "x\ny"), ("calculator", "1")]),
        ("tags", "<other>1</other> <calculator>1</python>", []),
        ("tool_call", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", {"a": 1})]),
        ("tool_call", '{"name": "f", "arguments": {}}', []),
        ("json", '{"name": "f", "parameters": {"a": "b"}}', [("f", {"a": "b"})]),
        ("json", '<|python_tag|>{"name": "f", "parameters": {}}', [("f", {})]),
        ("json", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "a"}, {"name": "g"}]', [("f", {}), ("g", {})]),
        ("json", '```json\n{"name": "f", "arguments": {}}\n```', [("f", {})]),
        ("json", "So it is 4.", []),
        ("json", "[1, 2, 3]", []),
        ("json", '{"answer": 4}', []),
        ("json", "{not JSON", []),
    ],
)
def test_calls_are_read_and_other_text_is_text(style, text, calls):
    wanted = [Call(name, {"": given} if isinstance(given, str) else given) for name, given in calls]
    assert tool_calls(text, NAMES, style) == wanted


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("tool_call", "<tool_call>{</tool_call>"),
        ("tool_call", "<tool_call>[]3</tool_call>"),
        ("tool_call", "<tool_call>3</tool_call>"),
        ("tool_call", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("json", '{"name": "f", "arguments": "1"}'),
        ("tool_call", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
    ],
)
def test_a_call_that_cannot_be_read_is_one_and_says_why(style, text):
    [call] = tool_calls(text, NAMES, style)
    assert call.error
