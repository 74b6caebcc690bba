"""Against the installed package; without it only its absence is tested."""

import asyncio
import importlib
import importlib.util
import sys

import pytest

from logitless.errors import ConfigurationError, UnavailableError
from logitless.integrations.verifiers import task_function, task_reward
from logitless.rewards.exact import Exact
from logitless.rewards.instruction_reward import InstructionReward
from logitless.rewards.user_function import TrustedFunction

installed = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="needs pip install 'logitless[verifiers]'"
)


@pytest.mark.parametrize("make", [lambda: task_reward(Exact()), lambda: task_function(object)])
def test_without_the_package_the_error_says_what_to_install(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(UnavailableError, match=r"pip install 'logitless\[verifiers\]'"):
        make()


@pytest.fixture
def vf():
    return importlib.import_module("verifiers.v1")


def trace_of(vf, task, *texts):
    nodes = [vf.MessageNode(message={"role": "user", "content": task.data.prompt_text})]
    for text in texts:
        message = {"role": "assistant", "content": text}
        nodes.append(vf.MessageNode(parent=len(nodes) - 1, message=message, sampled=True))
    about = vf.TraceTask(type=type(task).__name__, data=task.data)
    return vf.Trace(task=about, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=nodes)


@installed
def test_a_reward_of_logitless_judges_the_last_message_of_a_trace(vf):
    class Row(vf.TaskData):
        answer: str
        instruction_id_list: list[str]
        kwargs: list[dict]

    class Sum(vf.Task[Row]):
        exact = task_reward(Exact(), weight=2.0)
        follows = task_reward(InstructionReward(label="follows"), weight=0.5)

    row = Row(
        prompt="2+2=", answer="4", instruction_id_list=["punctuation:no_comma", "startend:quotation"], kwargs=[{}, {}]
    )
    trace = trace_of(vf, Sum(row), "5", "4")
    asyncio.run(Sum(row).score(trace))
    assert {name: (given.score, given.weight) for name, given in trace.rewards.items()} == {
        "exact": (1.0, 2.0),
        "follows": (0.5, 0.5),
    }
    assert trace.reward == 2.25


@installed
def test_a_completion_that_cannot_be_scored_is_unscored_and_not_wrong(vf):
    class Row(vf.TaskData):
        answer: str

    class Unscorable(vf.Task[Row]):
        exact = task_reward(Exact())
        never = task_reward(TrustedFunction(function=lambda completions, **columns: [None], label="never"))

    task = Unscorable(Row(prompt="2+2=", answer="4"))
    trace = trace_of(vf, task, "4")
    with pytest.raises(vf.TaskError, match="'missing'"):
        asyncio.run(task.score(trace))
    assert trace.rewards["never"] is None


def counting_task(vf):
    class Row(vf.TaskData):
        answer: str

    class Count(vf.Task[Row]):
        @vf.reward(weight=3.0)
        async def right(self, task, trace) -> float:
            return float(trace.last_reply == task.answer)

        @vf.reward
        async def length(self, trace) -> float:
            return len(trace.last_reply) / 10

        @vf.metric
        async def prompt_length(self, task) -> float:
            return len(task.prompt_text)

    return Count


@installed
def test_a_task_of_verifiers_scores_completions_in_the_shape_of_trl(vf):
    function = task_function(counting_task(vf))
    columns = {"answer": ["4", "4"], "undeclared": [object(), object()]}
    scores = asyncio.run(function(["2+2=", "2+2="], ["4", [{"role": "assistant", "content": "5!"}]], **columns))
    assert scores == pytest.approx([3.1, 0.2])


@installed
def test_a_task_of_verifiers_is_a_reward_of_logitless(vf):
    reward = TrustedFunction(function=task_function(counting_task(vf)))
    assert reward.metric_name == "Count"
    [verdict] = reward.verdicts(["2+2="], ["4"], {"answer": ["4"]})
    assert verdict.score == pytest.approx(3.1)


@installed
def test_a_task_without_rewards_scores_nothing(vf):
    assert asyncio.run(task_function(vf.Task)(["2+2="], ["4"])) == [None]


@installed
def test_a_task_that_needs_a_sandbox_is_refused_and_not_scored_in_part(vf):
    class Sandboxed(vf.Task[vf.TaskData]):
        @vf.reward
        async def passes(self, trace, runtime) -> float:
            return 1.0

    with pytest.raises(ConfigurationError, match=r"runtime \['passes'\]"):
        task_function(Sandboxed)


@installed
def test_what_is_no_task_is_refused(vf):
    with pytest.raises(ConfigurationError, match="not its taskset"):
        task_function(vf.Taskset)
