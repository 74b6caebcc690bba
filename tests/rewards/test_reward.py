import time
from dataclasses import dataclass
from typing import Literal

import pytest

from logitless.errors import ConfigurationError, DataError, InputError, TrainingError
from logitless.rewards import reward as reward_module
from logitless.rewards.reward import (
    MAX_CHARACTERS,
    Batch,
    TextReward,
    WeightedReward,
    check_reserved,
    check_text_column,
    column,
    completion_text,
    judge,
    prompt_text,
    total_reward,
    weighted,
)
from logitless.rewards.text.exact import Exact
from logitless.rewards.text.gate import MinimumLength
from logitless.rewards.text.length import Length
from logitless.types import Completion, Episode, Prompt, Verdict
from tests.rewards.scored import scored

TIMEOUT = Verdict(score=None, status="timeout", message="over 2 s")
MISSING = Verdict(score=None, status="missing", message="no data")
ERROR = Verdict(score=None, status="error", message="raised")


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


@pytest.mark.parametrize("kind", ["grade", "episode_verdicts"])
def test_an_exception_of_a_reward_names_it_and_shows_where_it_was_raised(kind, monkeypatch):
    def broken(*_):
        return {}["answer"]

    monkeypatch.setattr(Exact, kind, broken, raising=False)
    episode = Episode(Completion("7", (4,), "4", "stop"), ())
    with pytest.raises(TrainingError) as caught:
        judge([Prompt("7", "?", (4,), {"answer": "4"})], [[episode]], weighted([Exact()]), unscored="drop")
    said = str(caught.value)
    assert f"verdicts from `{kind}` of reward 'exact'; given KeyError: 'answer'. Correct it:" in said
    assert 'return {}["answer"]' in said
    assert __file__ in said


@dataclass(frozen=True, kw_only=True)
class _OfColumns(TextReward):
    """A reward without a `check` of its own."""

    name: str = "of_columns"
    column: str = "answer"
    hint_column: str | None = None
    columns: str = "no column"


@pytest.mark.parametrize(
    ("knobs", "absent"), [({}, "answer"), ({"column": "here", "hint_column": "hint"}, "hint")], ids=str
)
def test_a_reward_without_a_check_is_refused_where_a_column_that_its_fields_name_is_absent(knobs, absent):
    with pytest.raises(ConfigurationError, match=f"a column '{absent}' in the data"):
        _OfColumns(**knobs).check({"here": ["4"]})
    _OfColumns(column="here").check({"here": ["4"]})


def test_weights_are_finite_and_gates_have_none():
    assert WeightedReward(Echo(), -2.0).name == "echo"
    for weight in (float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="finite weight"):
            WeightedReward(Echo(), weight)
    with pytest.raises(ConfigurationError, match="gate"):
        WeightedReward(Echo(), 2.0, gate=True)


# --- what a completion is worth ---------------------------------------------------------------------------------------


def terms(**weights):
    """Rewards by name, with these weights."""
    return [WeightedReward(Echo(), weight, name) for name, weight in weights.items()]


def test_the_sum_takes_every_score_times_its_weight():
    verdicts = {"a": Verdict.graded(0.5), "b": Verdict.graded(-2.0), "unused": Verdict.graded(9.0)}
    assert total_reward(verdicts, terms(a=4.0, b=0.25)) == 4.0 * 0.5 - 0.25 * 2.0


@pytest.mark.parametrize("unscored", [TIMEOUT, MISSING, ERROR])
def test_a_verdict_without_a_score_is_left_out_or_drops_the_completion_but_never_counts_as_zero(unscored):
    verdicts = {"a": Verdict.graded(1.0), "b": unscored}
    assert total_reward(verdicts, terms(a=0.5, b=10.0)) == 0.5
    assert total_reward(verdicts, terms(a=0.5, b=10.0), unscored="drop") is None
    assert total_reward({"b": unscored}, terms(b=1.0)) is None


SHUT, OPEN = Verdict.graded(0.0), Verdict.graded(1.0)


@pytest.mark.parametrize(
    ("verdict", "gates", "worth"),
    [
        (Verdict.graded(-3.0), [OPEN], -3.0),
        (Verdict.graded(-3.0), [SHUT, OPEN], 0.0),  # even where the sum is negative
        (Verdict.graded(1.0), [TIMEOUT], None),
        (TIMEOUT, [SHUT], None),
    ],
)
def test_a_shut_gate_makes_the_reward_zero_unless_a_score_is_not_known(verdict, gates, worth):
    named = {f"gate {number}": gate for number, gate in enumerate(gates)}
    rewards = [*terms(a=1.0), *(WeightedReward(Echo(), name=name, gate=True) for name in named)]
    assert total_reward({"a": verdict, **named}, rewards) == worth


@pytest.mark.parametrize("gate", [False, True])
def test_a_term_or_gate_without_a_verdict_is_refused(gate):
    with pytest.raises(InputError, match="\\['b'\\]"):
        total_reward({"a": MISSING}, [*terms(a=1.0), WeightedReward(Echo(), name="b", gate=gate)])


def test_names_must_differ_and_labels_make_them():
    twice = [Exact(), Exact(column="other")]
    with pytest.raises(ConfigurationError, match="'exact' more than once"):
        weighted(twice)
    assert [entry.name for entry in weighted([Exact(), Exact(label="second")])] == ["exact", "second"]


def test_gates_alone_are_refused():
    with pytest.raises(ConfigurationError, match="1 gates only"):
        weighted([MinimumLength()])


def _episodes(prompts, num_samples=2, **fields) -> list[list[Episode]]:
    """Completions ``<prompt id><number>``."""
    return [
        [Episode(Completion(p.id, (5,) * (i + 1), f"{p.id}{i}", "stop"), (), **fields) for i in range(num_samples)]
        for p in prompts
    ]


def test_each_completion_is_judged_beside_the_columns_of_its_own_prompt():
    prompts = [Prompt("a", "?", (1,), {"answer": "a1"}), Prompt("b", "?", (1,), {"answer": "b0"})]
    rewards = weighted([Exact(weight=2.0), Length(weight=0.5, cap=9)])
    groups = judge(prompts, _episodes(prompts), rewards, unscored="leave_out")
    # exact counts 2, each token a half
    assert [g.rewards for g in groups] == [(0.5, 3.0), (2.5, 1.0)]
    assert groups[1].verdicts[0]["exact"].score == 1.0


class Unable(Length):
    """Scores nothing."""

    def verdicts(self, prompts, completions, columns, completion_ids=None):
        return [TIMEOUT] * len(completions)


@dataclass(frozen=True, kw_only=True)
class Slow(Length):
    """Takes until the log has a line, or 9 s, and then some more."""

    name: Literal["slow"] = "slow"

    def verdicts(self, prompts, completions, columns, completion_ids=None):
        end = time.monotonic() + 9
        while not self.log.records and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(10 * reward_module.SLOW_SECONDS)
        return super().verdicts(prompts, completions, columns, completion_ids)


def test_what_waits_for_a_slow_reward_says_so_once_with_its_name_and_the_seconds(caplog, monkeypatch):
    monkeypatch.setattr(reward_module, "SLOW_SECONDS", 0.02)
    monkeypatch.setattr(Slow, "log", caplog, raising=False)
    prompts = [Prompt("a", "?", (1,))]
    for _ in range(2):
        judge(prompts, _episodes(prompts), weighted([Slow(), Length()]), unscored="leave_out")
    assert caplog.messages == ["waiting for reward 'slow' to score completions: 0.02 s so far, imports included"]


def test_what_an_environment_paid_at_the_turns_is_part_of_the_reward():
    prompts = [Prompt("a", "?", (1,))]
    completion = Completion("a", (5, 6, 7), "c", "stop", trained=(True, False, True), turn=(0, 0, 1))
    episodes = [[Episode(completion, (), (0.25, 0.5)), Episode(completion, ())]]
    (group,) = judge(prompts, episodes, weighted([Length(weight=2.0)]), unscored="leave_out")
    assert group.rewards == (6.75, 6.0)
    assert group.turn_rewards == ((0.25, 0.5), ())
    (unknown,) = judge(prompts, episodes, weighted([Unable()]), unscored="leave_out")
    assert unknown.rewards == (None, None)


class Turns(Length):
    """Counts assistant turns, which are not in the text."""

    def episode_verdicts(self, episodes, columns):
        assert len(columns["answer"]) == len(episodes)
        return [Verdict.graded(float(sum(m["role"] == "assistant" for m in e.messages))) for e in episodes]


def test_a_reward_that_judges_episodes_is_given_them_and_the_others_their_text():
    prompts = [Prompt("a", "?", (1,), {"answer": "a1"})]
    episodes = [[Episode(e.completion, ({"role": "assistant"},) * n) for n, e in enumerate(_episodes(prompts)[0])]]
    rewards = [WeightedReward(Turns(), name="turns"), WeightedReward(Exact())]
    (group,) = judge(prompts, episodes, rewards, unscored="leave_out")
    assert [list(v) for v in group.verdicts] == [["turns", "exact"]] * 2
    assert [v["turns"].score for v in group.verdicts] == [0, 1]
    assert group.rewards == (0.0, 2.0)


@pytest.mark.parametrize(("reward", "method"), [(Length, "verdicts"), (Turns, "episode_verdicts")])
def test_a_reward_that_gives_another_number_of_verdicts_is_refused_by_name(reward, method, monkeypatch):
    monkeypatch.setattr(reward, method, lambda *_: [MISSING])
    with pytest.raises(InputError, match="a verdict for each of 2 completions; given 1 from reward 'named'"):
        scored([WeightedReward(reward(), name="named")], ["a", "b"], {})


def test_without_rewards_what_the_environment_paid_is_the_reward_and_its_failure_is_no_zero():
    completion = Completion("7", (1, 2), "ab", "stop")
    ways = [((0.75,), ""), ((), ""), ((), "ValueError: broken\nTraceback")]
    episodes = [Episode(completion, (), *way) for way in ways]
    [group] = judge([Prompt("7", "p", (1,))], [episodes], (), unscored="leave_out")
    assert group.rewards == (0.75, 0.0, None)
    assert [verdicts["environment"].status for verdicts in group.verdicts] == ["graded", "graded", "error"]
    assert group.verdicts[2]["environment"].traceback == "Traceback"
