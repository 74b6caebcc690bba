from dataclasses import dataclass
from typing import Literal

import pytest

from logitless.errors import ConfigurationError, DataError, InputError
from logitless.rewards.reward import (
    MAX_CHARACTERS,
    Batch,
    Reward,
    TextReward,
    WeightedReward,
    check_reserved,
    check_text_column,
    column,
    completion_text,
    prompt_text,
)
from logitless.rewards.text.exact import Exact
from logitless.rewards.text.length import Length
from logitless.types import Verdict


@dataclass(frozen=True, kw_only=True)
class Echo(TextReward):
    """Scores the number in its column."""

    name: Literal["echo"] = "echo"

    def grade(self, texts, batch):
        return [Verdict.graded(value) for value in batch.columns["value"]]


def test_the_text_of_a_conversation_is_its_last_assistant_message():
    messages = [
        {"role": "assistant", "content": "calling"},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "five"},
    ]
    assert completion_text(messages) == "five"
    parts = [{"type": "text", "text": "fi"}, {"type": "image"}, {"type": "text", "text": "ve"}]
    assert completion_text([{"role": "assistant", "content": parts}]) == "five"
    assert completion_text([{"role": "assistant", "content": ""}]) == ""


@pytest.mark.parametrize(
    "completion",
    [[], [{"role": "user", "content": "a"}], [{"role": "assistant", "content": None}], None, 5, ["text"], [{}], b"a"],
)
def test_a_completion_without_text_is_an_error_and_the_others_are_graded(completion):
    with pytest.raises(InputError, match="decoded completion"):
        completion_text(completion)
    verdicts = Echo().verdicts(["p"] * 3, ["a", completion, "c"], {"value": [1.0, 2.0, 3.0]})
    assert [verdict.status for verdict in verdicts] == ["graded", "error", "graded"]
    assert [verdict.score for verdict in verdicts] == [1.0, None, 3.0]


def test_a_completion_beyond_the_length_cap_is_ungradable():
    verdicts = Length(unit="characters").verdicts(["p"] * 2, ["a" * MAX_CHARACTERS, "a" * (MAX_CHARACTERS + 1)], {})
    assert [verdict.status for verdict in verdicts] == ["graded", "ungradable"]
    assert verdicts[1].score == 0.0
    assert str(MAX_CHARACTERS) in verdicts[1].message


def test_prompts_are_texts_or_messages():
    assert prompt_text("Say hi.") == "Say hi."
    assert prompt_text([{"role": "user", "content": "Say"}, {"role": "user", "content": None}]) == "Say\n"


@pytest.mark.parametrize("name", ["kwargs", "self", "rewards", "texts", "batch", "columns"])
def test_a_column_may_have_any_name_but_an_arguments(name):
    reward = Exact(column=name)
    assert reward(prompts=["p"], completions=["4"], completion_ids=[[1]], **{name: ["4"]}) == [1.0]
    check_reserved({name: ["4"]})


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids"])
def test_a_column_called_like_an_argument_is_refused(name):
    with pytest.raises(ConfigurationError, match="Rename"):
        check_reserved({name: []})


def test_what_a_trainer_adds_to_the_columns_is_left_out():
    reward = Exact()
    extras = {"trainer_state": object(), "log_extra": print, "log_metric": print}
    assert reward(prompts=["p"] * 2, completions=["4", "5"], completion_ids=None, answer=["4", "4"], **extras) == [1, 0]


@pytest.mark.parametrize(
    ("prompts", "columns", "ids", "what"),
    [
        (["p"], {}, None, "prompts of length 1"),
        (["p"] * 2, {"answer": ["4"]}, None, "column 'answer' of length 1"),
        (["p"] * 2, {}, [[1]], "completion_ids of length 1"),
    ],
)
def test_fields_of_another_length_than_the_completions_are_refused(prompts, columns, ids, what):
    with pytest.raises(InputError, match=what):
        Batch(prompts, ["a", "b"], columns, ids)


def test_an_absent_column_is_named():
    with pytest.raises(ConfigurationError, match=r"'answer'.*given columns \['gold'\]"):
        column({"gold": []}, "answer")
    with pytest.raises(ConfigurationError, match="'answer'"):
        Exact()(["p"], ["4"], gold=["4"])


def test_a_row_that_is_not_text_is_named():
    with pytest.raises(DataError, match="int in row 1"):
        check_text_column({"answer": ["4", 5]}, "answer")


@pytest.mark.parametrize("answer", [[0.5, 1.0], [], None, [Verdict.graded(1.0)]], ids=str)
def test_a_grade_that_is_not_a_verdict_for_each_text_is_refused_by_the_name_of_its_reward(answer, monkeypatch):
    monkeypatch.setattr(Exact, "grade", lambda *_: answer)
    with pytest.raises(InputError, match="a list of 2 Verdict from `grade` of reward 'exact'; given ") as caught:
        Exact().verdicts(["?"] * 2, ["4", "5"], {"answer": ["4", "5"]})
    assert repr(answer)[:80] in str(caught.value)


def test_every_reward_satisfies_the_protocol_and_has_a_name_for_trl():
    assert isinstance(Echo(), Reward)
    assert Echo().__name__ == "echo"
    assert Echo(label="other").__name__ == "other"


def test_weights_are_finite_and_gates_have_none():
    assert WeightedReward(Echo(), -2.0).name == "echo"
    for weight in (float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="finite weight"):
            WeightedReward(Echo(), weight)
    with pytest.raises(ConfigurationError, match="gate"):
        WeightedReward(Echo(), 2.0, gate=True)
