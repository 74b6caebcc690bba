import json

import pytest

from logitless.errors import ConfigurationError, DataError
from logitless.rewards.reasoning_gym import ReasoningGym
from logitless.rewards.workers.pool import Outcome

reasoning_gym = pytest.importorskip("reasoning_gym")


def entries(task, size=4, **options):
    dataset = reasoning_gym.create_dataset(task, size=size, seed=3, **options)
    return dataset, [dataset[index] for index in range(size)]


@pytest.mark.parametrize("task", ["palindrome_generation", "chain_sum", "spell_backward", "sentence_reordering"])
def test_scores_are_those_of_the_tasks_own_verifier(task):
    dataset, rows = entries(task)
    answers = [rows[0]["answer"], "zzz", "", rows[3]["answer"] + "."]
    expected = [dataset.score_answer(answer, row) for answer, row in zip(answers, rows, strict=True)]
    reward = ReasoningGym(task=task)
    reward.check({"entry": rows})
    assert reward(["p"] * 4, answers, entry=rows) == expected
    assert reward(["p"] * 4, answers, entry=[json.dumps(row) for row in rows]) == expected
    assert expected[0] == 1.0


def test_an_answer_at_which_the_verifier_raises_is_wrong():
    dataset, rows = entries("prime_factorization", size=1)
    with pytest.raises(ValueError, match="invalid literal"):
        dataset.score_answer("not a number", rows[0])
    verdicts = ReasoningGym(task="prime_factorization").verdicts(["p"], ["not a number"], {"entry": rows})
    assert (verdicts[0].status, verdicts[0].score) == ("graded", 0.0)


def test_partial_credit_can_be_left_out():
    entry = {"answer": "abba", "metadata": {"letters": ["a", "b", "a", "b"]}}
    given = ["abba", "aa", "ab", ""]  # right, a palindrome of other letters, no palindrome, nothing
    columns = {"entry": [entry] * 4}
    crumbs = ReasoningGym(task="palindrome_generation").verdicts([""] * 4, given, columns)
    all_or_nothing = ReasoningGym(task="palindrome_generation", partial_credit=False).verdicts([""] * 4, given, columns)
    assert [verdict.score for verdict in crumbs] == [1.0, 0.05, 0.02, 0.0]
    assert [verdict.score for verdict in all_or_nothing] == [1.0, 0.0, 0.0, 0.0]


def test_text_that_a_verifier_evaluates_harms_one_item():
    _, rows = entries("string_insertion", size=3)
    answers = [rows[0]["answer"], "__import__('os')._exit(1)", rows[2]["answer"]]
    verdicts = ReasoningGym(task="string_insertion").verdicts(["p"] * 3, answers, {"entry": rows})
    assert [(verdict.status, verdict.score) for verdict in verdicts] == [
        ("graded", 1.0),
        ("graded", 0.0),
        ("graded", 1.0),
    ]


@pytest.mark.parametrize("task", ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"])
def test_tasks_without_a_gold_answer_are_allowed(task):
    _, rows = entries(task, size=2)
    assert rows[0]["answer"] is None
    reward = ReasoningGym(task=task)
    reward.check({"entry": rows})
    assert all(score < 1 for score in reward(["p"] * 2, ["nonsense"] * 2, entry=rows))


def test_a_verifier_that_accepts_garbage_is_refused_with_the_reason():
    dataset, rows = entries("game_of_life_halting", size=8)
    assert max(dataset.score_answer("garbage", row) for row in rows) == 1.0
    with pytest.raises(ConfigurationError, match="gives 1 to any text"):
        ReasoningGym(task="game_of_life_halting")


def test_an_unknown_task_and_rows_of_another_task_are_refused():
    _, rows = entries("chain_sum")
    with pytest.raises(ConfigurationError, match="'chainsum'"):
        ReasoningGym(task="chainsum").check({"entry": rows})
    with pytest.raises(DataError, match="row 0"):
        ReasoningGym(task="palindrome_generation").check({"entry": rows})
    for row in (None, 5, "text", {"answer": "4"}):
        with pytest.raises(DataError, match="in row 1"):
            ReasoningGym(task="chain_sum").check({"entry": [rows[0], row]})


def test_tags_can_hold_the_answer():
    _, rows = entries("chain_sum", size=2)
    texts = [f"so <answer>{rows[0]['answer']}</answer>", rows[1]["answer"]]
    assert ReasoningGym(task="chain_sum", answer_tag="answer")(["p"] * 2, texts, entry=rows) == [1.0, 0.0]


def test_words_and_numbers_share_a_process_and_every_other_text_has_one_of_its_own(monkeypatch):
    ways_of_texts = []

    def run(self, task, items, ways):
        ways_of_texts.extend(ways)
        return [Outcome("done", {"score": 0.0})] * len(items)

    monkeypatch.setattr(ReasoningGym, "run", run)
    _, rows = entries("palindrome_generation", size=1)
    ReasoningGym(task="palindrome_generation")(["p"] * 2, ["abba", "f()"], entry=rows * 2)
    assert ways_of_texts == ["kept", "confined"]
