import pytest

from logitless.errors import DataError
from logitless.rewards.text.exact import Exact


def score(text, answer, **knobs):
    return Exact(**knobs)(["p"], [text], answer=[answer])[0]


def test_white_space_around_and_case_count_only_where_asked():
    assert score(" Paris\n", "Paris") == 1.0
    assert score(" Paris\n", "Paris", strip=False) == 0.0
    assert score("paris", "Paris") == 0.0
    assert score("STRASSE", "Straße", casefold=True) == 1.0


def test_one_of_several_answers_is_enough():
    assert score("four", ["4", "four"]) == 1.0
    assert score("five", ["4", "four"]) == 0.0


def test_an_empty_completion_equals_an_empty_answer_only():
    assert score("", "") == 1.0
    assert score("", "4") == 0.0


def test_the_last_closed_tags_hold_the_answer():
    assert score("<answer>3</answer> no, <answer> 4 </answer>", "4", answer_tag="answer") == 1.0
    assert score("<answer>4", "4", answer_tag="answer") == 0.0
    assert score("4</answer>", "4", answer_tag="answer") == 0.0


@pytest.mark.parametrize("answer", [4, None, [], [4], {"a": 1}])
def test_a_row_without_a_text_is_named(answer):
    with pytest.raises(DataError, match="in row 1"):
        Exact().check({"answer": ["4", answer]})
