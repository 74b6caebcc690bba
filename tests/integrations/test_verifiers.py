"""Against the installed package; without it only its absence is tested."""

import asyncio
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from logitless.errors import ConfigurationError, InputError, UnavailableError
from logitless.integrations.verifiers import play_task, task_function, task_reward, task_rows
from logitless.models.char_tokenizer import character_tokenizer
from logitless.rewards.instructions.instruction_reward import InstructionReward
from logitless.rewards.text.exact import Exact
from logitless.rewards.user_function import TrustedFunction
from logitless.rollout.environment import Limits
from logitless.rollout.environments.harness import Harness
from logitless.rollout.environments.options import environment_of
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt
from tests.rollout.engines import StandIn

installed = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="needs pip install 'logitless[verifiers]'"
)


@pytest.mark.parametrize(
    "make", [lambda: task_reward(Exact()), lambda: task_function(object), lambda: list(task_rows("sums"))]
)
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


# --- tasks that verifiers plays, against the policy's endpoint

TASKSET = "taskset_of_sums"


@pytest.fixture(autouse=True)
def its_module_is_found(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@installed
def test_the_rows_of_a_taskset_say_which_task_they_are():
    rows = list(task_rows(TASKSET))
    assert rows == [{"id": str(a), "prompt": f"{a}+{a}=", "idx": a} for a in range(3)]
    with pytest.raises(ConfigurationError, match="a taskset of verifiers called 'nowhere_at_all'"):
        list(task_rows("nowhere_at_all"))


@installed
@pytest.mark.parametrize(("row", "match"), [({}, "the number of a task"), ({"idx": 3}, "from 0 to 2")])
def test_a_row_without_a_task_is_refused(row, match):
    with pytest.raises(InputError, match=match):
        play_task("http://127.0.0.1:1/v1", row, 0, taskset=TASKSET)


class Answers(StandIn):
    """An engine that says 2 to everything."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def sample(self, prompts, num_samples, options, *, seed):
        ids = (*self.tokenizer("2", add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id)
        made = [Completion(p.id, ids, "2", "stop", (-0.5, -0.25), weights_version=3) for p in prompts]
        return [[each] * num_samples for each in made]


@installed
@pytest.mark.timeout(300)
def test_verifiers_plays_a_task_and_the_trainer_sees_the_tokens_and_the_tasks_reward():
    tokenizer = character_tokenizer("0123456789+= ")
    tokenizer.chat_template = TEMPLATE
    harness = Harness(function="logitless.integrations.verifiers:play_task", options={"taskset": TASKSET})
    made = environment_of(harness, tokenizer)
    prompts = [Prompt(row["id"], row["prompt"], (5,), columns={"idx": row["idx"]}) for row in task_rows(TASKSET)]
    read, groups = made.episodes(
        Answers(tokenizer), prompts, num_samples=2, options=SamplingOptions(4), seed=0, limits=Limits(max_turns=2)
    )
    assert [tokenizer.decode(list(p.token_ids)) for p in read] == ["0+0=", "1+1=", "2+2="]
    assert [[sum(e.turn_rewards) for e in group] for group in groups] == [[0.0] * 2, [1.0] * 2, [0.0] * 2]
    for episode in (e for group in groups for e in group):
        assert episode.failure == ""
        assert episode.completion.logp_sampler.tolist() == [-0.5, -0.25]
        assert episode.completion.weights_version == 3
        assert [m["role"] for m in episode.messages] == ["user", "assistant"]
