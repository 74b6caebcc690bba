import threading

import pytest

from logitless.errors import ConfigurationError, DataError
from logitless.rewards.math import Math


@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        ("72", "48 + 24 = 72. The answer is 72.", 1.0),
        ("72", "The answer is $\\boxed{72}$.", 1.0),
        ("72", "The answer is $\\boxed{73}$.", 0.0),
        ("0.5", "$\\frac{1}{2}$", 1.0),
        ("x^2-1", "$(x-1)(x+1)$", 1.0),
        ("$x^2-1$", "$(x-1)(x+2)$", 0.0),
        ("1,000", "It costs 1000.", 1.0),
        ("3", "", 0.0),
        ("3", "no number here", 0.0),
    ],
)
def test_equal_expressions_score_one(gold, text, score):
    assert Math()(["p"], [text], answer=[gold]) == [score]


def test_what_cannot_be_computed_or_parsed_in_time_is_a_timeout_and_the_others_are_graded():
    texts = ["3", "$9^{9^{9^{9^9}}}$", "$" + "(" * 3000 + "3" + ")" * 3000 + "$", "4"]
    verdicts = Math(deadline_seconds=2.0).verdicts(["p"] * 4, texts, {"answer": ["3"] * 4})
    assert [verdict.score for verdict in verdicts] == [1.0, None, None, 0.0]
    assert [verdict.status for verdict in verdicts] == ["graded", "timeout", "timeout", "graded"]


def test_tags_can_hold_the_answer():
    assert Math(answer_tag="answer")(["p"] * 2, ["5 <answer>3</answer> 4", "3"], answer=["3"] * 2) == [1.0, 0.0]


def test_a_gold_answer_without_mathematics_is_named_at_load_and_missing_afterwards():
    reward = Math()
    reward.check({"answer": ["3", "\\frac{1}{2}"]})
    with pytest.raises(DataError, match=r"'The city of Paris\.' in row 1"):
        reward.check({"answer": ["3", "The city of Paris."]})
    assert reward.verdicts(["p"], ["3"], {"answer": ["The city of Paris."]})[0].status == "missing"
    with pytest.raises(ConfigurationError, match="'answer'"):
        reward.check({"gold": ["3"]})


def test_it_grades_off_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend(Math()(["p"], ["$\\frac{2}{4}$"], answer=["0.5"])))
    thread.start()
    thread.join()
    assert found == [1.0]
