import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitless.rewards.workers.size import MAX_CHARACTERS, MAX_DEPTH, MAX_DIGITS, depth, runs_nothing, too_large

ORDINARY = [
    "48 + 24 = 72. The answer is 72!",
    "$\\frac{\\sqrt{3}}{2^{10}}$ and $x^{2}y^{3}$, so \\boxed{(1, 2]}",
    "2^{2^{3}} = 256, $(2^{10})^{10}$, 0^5, 1^{999999}, 10^{-3}",
    "def f(x): return [[x, {'a': (1, 2)}]]",
    "1,000,000 and " + "7" * MAX_DIGITS,
    "(" * MAX_DEPTH + ")" * MAX_DEPTH,
]
HOSTILE = [
    "9^{9^{9^9}}",
    "9**9**9",
    "10^{5000}",
    "10^{-99999}",
    "{9^{9^{9^9}}}^1",
    "(9^{999})^{999}",
    "7" * (MAX_DIGITS + 1),
]


@pytest.mark.parametrize("text", ORDINARY)
def test_what_people_write_is_read(text):
    assert too_large(text) is None


@pytest.mark.parametrize("text", [*HOSTILE, "(" * (MAX_DEPTH + 1), "{[(" * 40, "a" * (MAX_CHARACTERS + 1)])
def test_what_would_stall_a_parser_is_not(text):
    assert too_large(text)


@pytest.mark.parametrize("unit", ["(", "^9", "9^", "9 ", "9**(", "1", "9^9 ", "^{", "}^", ".1", "1."])
def test_the_look_takes_linear_time(unit):
    def seconds(length):
        text = (unit * length)[:length]
        best = 1e9
        for _ in range(3):
            start = time.process_time()
            too_large(text), runs_nothing(text)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(64_000) < 4 * 8 * (seconds(8_000) + 0.002)


@pytest.mark.parametrize("text", ["abba", "so it is 3.5", "1, 2, 3", "no way.", ""])
def test_words_and_numbers_run_nothing(text):
    assert runs_nothing(text)


@pytest.mark.parametrize(
    "text", ["f()", "a.b", "x[0]", "__name__", "a=b", "'a'", "a:b", "`a`", "@a", "a;b", "ａ", "a\\b", "a!"]
)
def test_what_could_call_assign_or_reach_is_given_a_process_of_its_own(text):
    assert not runs_nothing(text)


@given(st.text("()[]{} a", max_size=50))
def test_the_depth_is_that_of_a_plain_count(text):
    now, deepest = 0, 0
    for character in text:
        now = max(0, now + (character in "([{") - (character in ")]}"))
        deepest = max(deepest, now)
    assert depth(text) == deepest
