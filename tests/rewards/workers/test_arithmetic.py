"""The calculator computes, exactly if possible; no text makes it do anything else or run for ever."""

import time

import pytest

from logitless.rewards.workers.arithmetic import evaluated


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+2", "4"),
        (" 12 × 3 ÷ 4 ", "9"),
        ("-(3 - 10) // 2", "3"),
        ("7 % 4 + 2**10", "1027"),
        ("2^-1", "0.5"),
        ("0.1 + 0.2", "0.3"),
        ("1/3*3", "1"),  # fractions on the way
        ("10**30", "1" + "0" * 30),
        ("2**0.5", "1.41421356237"),
    ],
)
def test_it_computes(text, value):
    assert evaluated(text) == {"value": value}


@pytest.mark.parametrize(
    "text",
    ["", "x", "2+", "__import__('os')", "(1).real", "[1]", "1 if 1 else 2", "'a'*3", "True", "1j", "(-1)**0.5", "1<2"],
)
def test_what_is_no_arithmetic_is_an_error_that_the_policy_can_read(text):
    assert evaluated(text)["error"] == "numbers and + - * / // % ** alone"


@pytest.mark.parametrize(
    "text",
    ["9**9**9**9", "((9**9)**9)**9**9", "(2**4000)**(2**4000)", "7" * 5000, "(" * 200 + "1" + ")" * 200, "10.0**400"],
)
def test_what_would_take_for_ever_is_too_large_at_once(text):
    began = time.process_time()
    assert evaluated(text) == {"error": "too large"}
    assert time.process_time() - began < 10


def test_a_division_by_zero_says_so():
    assert evaluated("1/0") == evaluated("1%0") == {"error": "division by zero"}
