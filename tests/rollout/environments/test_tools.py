"""Tools run in other processes, within limits, and the episode continues with their results."""

from types import SimpleNamespace

import pytest

from logitless.errors import ConfigurationError, UnavailableError
from logitless.rewards.workers.pool import Outcome
from logitless.rollout.environments import tools as tools_module
from logitless.rollout.environments.tool_environment import ToolEnvironment
from logitless.rollout.environments.tools import Calculator, Python, Result
from logitless.types import Completion, Prompt


def said(tool, *texts):
    return [result.text for result in tool.run([{tool.argument: text} for text in texts])]


def turn(text):
    return Completion("7", (4,), text, "stop")


def contents(environment, text):
    reply = environment.reply(environment.start(Prompt("7", "", (4,)), seed=0), turn(text))
    return [message["content"] for message in reply.messages]


def test_a_program_says_what_it_prints_and_how_it_fails():
    # Without a sandbox, so that the test says the same on every machine; tests of `code` are about it.
    printed, wrong, silent = said(Python(sandbox="none"), "print(6 * 7)", "x = 1\nx / 0", "pass")
    assert printed == "42"
    assert "line 2" in wrong
    assert "ZeroDivisionError" in wrong
    assert silent == "(nothing printed)"


def test_a_program_that_goes_on_for_ever_is_ended_and_the_policy_reads_so():
    [text] = said(Python(sandbox="none", deadline_seconds=2.0), "print('a', flush=True)\nwhile True: pass")
    assert text == "a\nerror: over 2 s"


def test_a_program_in_a_sandbox_reaches_no_network():
    tool = Python()
    try:
        tool.check()
    except UnavailableError as error:
        pytest.skip(str(error))
    [text] = said(tool, "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)")
    assert "Error" in text
    assert "refused" not in text.lower()


def test_what_a_tool_says_is_cut_where_it_is_too_long():
    assert said(Calculator(max_characters=3), "10**5") == ["100\n[3 more]"]


@pytest.fixture
def every_run_ends(monkeypatch):
    """Each item of a pool ends with the given outcome."""

    def ends(*outcome, **details):
        pool = SimpleNamespace(run=lambda task, items, **limits: [Outcome(*outcome, **details)] * len(items))
        monkeypatch.setattr(tools_module, "shared_pool", lambda purpose: pool)

    return ends


@pytest.mark.parametrize("status", ["idle", "raised"])
def test_a_machine_that_fails_ends_the_episode_without_a_reward(status, every_run_ends):
    every_run_ends(status, message="no processor")
    environment = ToolEnvironment(tools=(Calculator(),))
    reply = environment.reply(None, turn("<calculator>1</calculator>"))
    assert reply.ends
    assert "no processor" in reply.failure


@pytest.mark.parametrize("status", ["timeout", "crashed", "memory", "orphans"])
def test_a_call_that_breaks_its_own_run_is_read_as_an_error(status, every_run_ends):
    every_run_ends(status)
    assert Calculator().run([{"expression": "1"}]) == [Result(f"error: {status}")]


def test_a_turn_with_calls_is_answered_and_one_without_ends_the_episode():
    environment = ToolEnvironment(tools=(Calculator(),), call_reward=0.25)
    first, last = environment.replies([None] * 2, [turn("<calculator>2+3</calculator>"), turn("5")])
    assert first.messages == ({"role": "tool", "content": "5", "name": "calculator", "tool_call_id": "000000000"},)
    assert first.reward == 0.25
    assert last.ends
    assert last.reward == 0


def test_calls_of_many_turns_go_to_each_tool_at_once_and_come_back_in_order():
    asked = []

    class Counting(Calculator):
        def run_texts(self, texts):
            asked.append(list(texts))
            return [Result(f"={text}") for text in texts]

    environment = ToolEnvironment(tools=(Counting(),), max_calls=2)
    both = "<calculator>a</calculator><calculator>b</calculator>"
    replies = environment.replies([None] * 3, [turn(both), turn("no"), turn(f"{both}<calculator>c</calculator>")])
    assert asked == [["a", "b", "a", "b"]]
    assert [[m["content"] for m in reply.messages] for reply in replies] == [
        ["=a", "=b"],
        [],
        ["=a", "=b", "error: at most 2 calls a turn"],
    ]


def test_an_unknown_tool_and_a_call_that_cannot_be_read_are_errors_that_pay_nothing():
    environment = ToolEnvironment(tools=(Calculator(),), format="tool_call", call_reward=1.0)
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{</tool_call>'
    unknown, unreadable = contents(environment, text)
    assert unknown == "error: no tool called 'f'"
    assert unreadable.startswith("error: no JSON")
    assert environment.reply(None, turn(text)).reward == 0
    wrong = '<tool_call>{"name": "calculator", "arguments": {"expression": 3}}</tool_call>'
    assert contents(environment, wrong) == ["error: expression must be a text"]


def test_where_there_is_no_role_for_tools_the_user_speaks_for_all_of_them():
    environment = ToolEnvironment(tools=(Calculator(),), role="user")
    reply = environment.reply(None, turn("<calculator>1+1</calculator><calculator>2+2</calculator>"))
    assert reply.messages == ({"role": "user", "content": "2\n4"},)


def test_the_policy_can_be_told_of_its_tools():
    [schema] = ToolEnvironment(tools=(Calculator(),)).schemas
    assert schema["function"]["parameters"]["required"] == ["expression"]


@pytest.mark.parametrize("given", [{"tools": ()}, {"tools": (Calculator(), Calculator())}])
def test_tools_are_named_once(given):
    with pytest.raises(ConfigurationError, match="each once"):
        ToolEnvironment(**given)
