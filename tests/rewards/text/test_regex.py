import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.errors import ConfigurationError, DataError
from logitless.rewards.text.regex import Regex


def test_a_pattern_is_found_anywhere_or_must_match_all():
    texts = ["a12b", "12", "ab"]
    assert Regex(pattern=r"\d+")(["p"] * 3, texts) == [1, 1, 0]
    assert Regex(pattern=r"\d+", whole=True)(["p"] * 3, texts) == [0, 1, 0]


def test_case_and_line_breaks_count_unless_said_otherwise():
    assert Regex(pattern="a.c")(["p"] * 2, ["A.C", "a\nc"]) == [0, 0]
    assert Regex(pattern="a.c", ignore_case=True, dot_all=True)(["p"] * 2, ["A.C", "a\nc"]) == [1, 1]


def test_each_row_may_have_a_pattern_of_its_own():
    assert Regex(column="wanted")(["p"] * 2, ["ab", "ab"], wanted=["b$", "^b"]) == [1, 0]


def test_a_pattern_without_end_makes_its_completion_ungradable_and_the_others_are_graded():
    start = time.monotonic()
    verdicts = Regex(pattern="(a+)+$", deadline_seconds=1.0).verdicts(["p"] * 3, ["aa", "a" * 40 + "b", "b"], {})
    assert [verdict.status for verdict in verdicts] == ["graded", "ungradable", "graded"]
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0, 0.0]
    assert time.monotonic() - start < 60


def test_patterns_that_do_not_compile_are_refused_before_any_text():
    for pattern in ("(", "[", "*a", "(?P<1>a)", "a{4294967296}"):
        with pytest.raises(ConfigurationError, match="regular expression"):
            Regex(pattern=pattern)
    with pytest.raises(ConfigurationError, match="row 1 of column 'wanted'"):
        Regex(column="wanted").check({"wanted": ["a", "("]})
    with pytest.raises(DataError, match="NoneType in row 0"):
        Regex(column="wanted").check({"wanted": [None]})


@given(st.lists(st.text(max_size=20), min_size=1, max_size=8))
@settings(max_examples=25, deadline=None)
def test_any_text_is_graded_as_the_standard_library_does(texts):
    expected = [float(bool(re.search(r"\w\s", text))) for text in texts]
    assert Regex(pattern=r"\w\s")(["p"] * len(texts), texts) == expected
