"""Checks rewritten to run in linear time agree with the plain, quadratic patterns."""

import itertools
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.rewards.instructions import ifbench, ifeval, iftrain

examples = settings(max_examples=100, deadline=None, database=None, derandomize=True)


def texts_of(*pieces: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(pieces), max_size=14).map("".join)


def count(accepts: Callable[[int], bool]) -> int:
    """The largest number that a check for at least, or exactly, so many accepts."""
    return next(number for number in itertools.count() if not accepts(number + 1))


@examples
@given(texts_of("[", "]", "a", "\n", "\r"))
def test_placeholders_are_counted_as_by_the_lazy_pattern(text):
    assert count(lambda bound: ifeval.number_of_placeholders(text, bound)) == len(re.findall(r"\[.*?\]", text))


@examples
@given(texts_of("*", "-", "a", " ", "\n", "\r", "\x0b", "\u2028"))
def test_bullets_are_counted_as_by_the_pattern_that_runs_over_lines(text):
    stars = re.findall(r"^\s*\*[^\*].*$", text, flags=re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", text, flags=re.MULTILINE)
    assert ifeval.number_of_bullets(text, len(stars) + len(dashes))


@examples
@given(texts_of("<<", ">>", "<", ">", "a", " ", "\n"))
def test_titles_are_found_as_by_the_greedy_pattern(text):
    titles = re.findall(r"<<[^\n]+>>", text)
    assert ifeval.has_title(text) == any(title.lstrip("<").rstrip(">").strip() for title in titles)


@pytest.mark.parametrize(
    ("marker", "pattern"),
    [
        ("P.S.", r"\s*p\.\s?s\..*$"),
        ("P.P.S", r"\s*p\.\s?p\.\s?s.*$"),
        ("P.S", r"\s*p.s.*$"),
        ("+s", r"\s*+s.*$"),
        ("p|s", r"\s*p|s.*$"),
        ("p$", r"\s*p$.*$"),
    ],
)
@examples
@given(text=texts_of("p", "s", "P", ".", " ", "\n", "+"))
def test_postscripts_are_found_as_by_the_pattern_that_starts_with_white_space(marker, pattern, text):
    found = re.findall(pattern, text.lower(), flags=re.MULTILINE)
    assert ifeval.has_postscript(text, marker) == bool(found)


@examples
@given(texts_of("\n", " ", "a", "  b", "\t"))
def test_blank_lines_are_removed_as_from_a_list_that_is_walked_through(text):
    lines = text.split("\n")
    for line in lines:
        if not line.strip():
            lines.remove(line)
    indents = [len(line) - len(line.lstrip(" ")) for line in lines]
    assert ifbench.indents_lines(text) == all(one < other for one, other in itertools.pairwise(indents))


@examples
@given(texts_of('"', "a", "1", "&", "\n", " "))
def test_special_characters_are_found_as_by_the_greedy_pattern(field):
    assert ifbench._quotes_a_sign(field) == (re.match(r'".*[^\d\w\s].*"', field) is not None)


@examples
@given(texts_of("Question 1", "Question 2.", "A) a\n", "B. b\n", "\n", "a", " "))
def test_questions_are_divided_as_by_the_pattern_with_line_breaks(text):
    parts = [part.strip() for part in re.split(r"\n*(?:Question \d+[\.|\):;]?\s*)", text) if part.strip()]
    ours = [part.strip() for part in re.split(r"Question \d+[.|):;]?", text) if part.strip()]
    assert ours == parts


@pytest.mark.parametrize(
    ("first", "last"), [("a", "b"), ("a.", "b"), ("a", "a"), (".", "b."), ("(a)", "b"), ("a|b", "a")]
)
@examples
@given(text=texts_of("a", "b", "c", " ", "a b ", "\n"))
def test_phrases_are_found_as_by_the_lazy_pattern(first, last, text):
    assert iftrain._phrases(text, first, last) == re.findall(f"{first} .*? {last}", text)


@examples
@given(texts_of("Emma", "Liam", "-", " ", "s", "_", "Ella"))
def test_names_are_found_at_once_as_one_by_one(text):
    found = [name for name in ifbench.PERSON_NAMES if re.search(rf"\b{name}\b", text)]
    assert ifbench.has_person_names(text, len(found))
    assert not ifbench.has_person_names(text, len(found) + 1)
