import pytest

from logitless.rewards.text.repetition import Repetition


def test_the_penalty_is_the_share_of_runs_that_were_said_before():
    # "a b a b a": pairs ab ba ab ba, two of four are new; triples aba bab aba, two of three are new.
    assert Repetition(ngram=2)(["p"], ["a b A b a"]) == [-0.5]
    assert Repetition(ngram=3)(["p"], ["a b A b a"]) == [pytest.approx(-1 / 3)]
    assert Repetition(ngram=1)(["p"], ["a b A b a"]) == [pytest.approx(-3 / 5)]


def test_texts_shorter_than_one_run_and_texts_that_repeat_nothing_score_zero():
    assert Repetition(ngram=3)(["p"] * 3, ["", "a a", "one two three four"]) == [0.0, 0.0, 0.0]
