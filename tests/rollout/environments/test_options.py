"""The environments of recipes are made, checked and rendered before the first rollout."""

from dataclasses import replace

import pytest

from logitless.errors import ConfigurationError
from logitless.rollout.chat import ChatEnvironment
from logitless.rollout.environment import Reply, SingleTurn
from logitless.rollout.environments.harness import Harness
from logitless.rollout.environments.options import OwnEnvironment, environment_of
from logitless.rollout.environments.text_game import GuessingGame
from logitless.rollout.environments.tool_environment import ToolEnvironment, tools_of
from logitless.rollout.environments.tools import Calculator
from logitless.types import Completion
from tests.rollout.templates import chat_tokenizer


def test_a_recipe_without_one_has_single_turns():
    assert isinstance(environment_of(None, chat_tokenizer("qwen")), SingleTurn)


def test_tools_are_told_of_and_their_messages_rendered():
    made = environment_of(ToolEnvironment(tools=(Calculator(),), format="tool_call"), chat_tokenizer("qwen"))
    assert isinstance(made, ChatEnvironment)
    assert [schema["function"]["name"] for schema in tools_of(made)] == ["calculator"]
    assert tools_of(environment_of(GuessingGame(), chat_tokenizer("gemma"))) is None


def test_a_chat_template_that_does_not_take_the_results_is_refused():
    with pytest.raises(ConfigurationError, match="role: user"):
        environment_of(ToolEnvironment(tools=(Calculator(),)), chat_tokenizer("gemma"))
    environment_of(ToolEnvironment(tools=(Calculator(),), role="user"), chat_tokenizer("gemma"))


def test_an_environment_of_ones_own_is_made_with_its_options():
    own = OwnEnvironment(factory="logitless.rollout.environments.text_game:GuessingGame", options={"per_guess": 0.5})
    assert environment_of(own, chat_tokenizer("qwen")).inner == GuessingGame(per_guess=0.5)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "nowhere:x",
        "logitless.rollout.environments.text_game:Nothing",
        "logitless.rollout.environments.text_game:last_number",
        "json:dumps",
    ],
)
def test_a_path_that_makes_no_environment_is_refused(path):
    with pytest.raises(ConfigurationError, match=r"import path|an environment from"):
        OwnEnvironment(factory=path).made()


def test_what_has_not_both_methods_is_no_environment():
    with pytest.raises(ConfigurationError, match="start and reply"):
        OwnEnvironment(factory="builtins:dict").made()


@pytest.mark.parametrize(
    ("start", "reply", "said"),
    [
        ("self, prompt", "self, state, turn", r"start\(prompt, \*, seed\); given Own\.start\(prompt\), .*'seed'"),
        ("self, prompt, *, sede", "self, state, turn", r"start\(prompt, \*, seed\); given .*'sede'"),
        ("self, prompt, *, seed", "self, turn", r"reply\(state, turn\); given Own\.reply\(turn\), too many"),
    ],
)
def test_an_environment_with_other_arguments_is_refused_before_the_first_rollout(start, reply, said, tmp_path):
    methods = f"    def start({start}):\n        pass\n\n    def reply({reply}):\n        pass\n"
    (tmp_path / "own.py").write_text(f"class Own:\n{methods}\n\ndef drive(base_url, row):\n    pass\n")
    with pytest.raises(ConfigurationError, match=said):
        environment_of(OwnEnvironment(factory=f"{tmp_path}/own.py:Own"), chat_tokenizer("qwen"))
    with pytest.raises(ConfigurationError, match=r"function\(base_url, row, seed, \*\*options\); given drive\("):
        environment_of(Harness(function=f"{tmp_path}/own.py:drive"), chat_tokenizer("qwen"))


def test_a_harness_renders_with_the_recipes_variables_of_the_chat_template(tmp_path):
    (tmp_path / "own.py").write_text("def drive(base_url, row, seed):\n    pass\n")
    quiet = {"enable_thinking": False}
    harness = environment_of(Harness(function=f"{tmp_path}/own.py:drive"), chat_tokenizer("qwen"), quiet)
    assert harness.chat_template_kwargs == quiet


def test_a_harness_without_a_chat_template_or_with_a_wrong_template_is_refused_before_the_first_rollout(tmp_path):
    (tmp_path / "own.py").write_text("def drive(base_url, row, seed):\n    pass\n")
    harness = Harness(function=f"{tmp_path}/own.py:drive", template="\n{reply}\n")
    tokenizer = chat_tokenizer("qwen")
    environment_of(harness, tokenizer)
    with pytest.raises(ConfigurationError, match=r"with \{reply\}"):
        environment_of(replace(harness, template="nothing"), tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigurationError, match=r"a tokenizer with a chat template.*tokenizer_config\.json"):
        environment_of(harness, tokenizer)


@pytest.mark.parametrize("program", ["nowhere-to-be-found", "./agent.py"])
def test_a_program_that_is_not_found_is_refused_before_the_first_rollout(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=f"environment.command.* given '{program}' in {tmp_path}"):
        environment_of(Harness(command=(program,)), chat_tokenizer("qwen"))


def test_an_environment_and_a_harness_may_stand_in_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from logitless import Reply\n\n\nclass Mute:\n    def __init__(self, pays=0.0):\n        self.pays = pays\n\n"
        "    def start(self, prompt, *, seed):\n        return None\n\n"
        "    def reply(self, state, turn):\n        return Reply(reward=self.pays)\n\n\n"
        "def drive(base_url, row, seed, scale):\n    return scale * seed\n"
    )
    own = OwnEnvironment(factory=f"{tmp_path}/mine.py:Mute", options={"pays": 0.5}).made()
    assert own.reply(None, Completion("7", (4,), "4", "stop")) == Reply(reward=0.5)
    assert Harness(function=f"{tmp_path}/mine.py:drive", options={"scale": 2.0}).drive()("", {}, 3) == 6.0
    with pytest.raises(ConfigurationError, match=r"'\./file\.py:name'.*no 'absent' in .*which has Mute, drive"):
        Harness(function=f"{tmp_path}/mine.py:absent").drive()
