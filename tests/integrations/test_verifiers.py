"""Against the installed package; without it only its absence is tested."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from logitless.errors import ConfigurationError, InputError, UnavailableError
from logitless.integrations.verifiers import play_task, task_rows
from logitless.models.char_tokenizer import character_tokenizer
from logitless.rollout.environment import Limits
from logitless.rollout.environments.harness import Harness
from logitless.rollout.environments.options import environment_of
from logitless.rollout.sampling import SamplingOptions
from logitless.types import Completion, Prompt
from tests.rollout.engines import StandIn

installed = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="needs pip install 'logitless[verifiers]'"
)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(UnavailableError, match=r"pip install 'logitless\[verifiers\]'"):
        list(task_rows("sums"))


@pytest.fixture
def vf():
    return importlib.import_module("verifiers.v1")


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
