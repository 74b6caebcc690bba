import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.rewards.text.format import Format, tagged


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("<think>a</think><answer>b</answer>", (True, True, True)),
        ("\n<think>\na\n</think>\n\n<answer>b</answer>\n", (True, True, True)),
        ("<think>a</think> so <answer>b</answer>", (True, True, False)),
        ("<think>a</think><answer>b</answer>.", (True, True, False)),
        ("<answer>b</answer><think>a</think>", (True, True, False)),
        ("<think>a<answer>b</answer></think>", (True, True, False)),
        ("<think> </think><answer>b</answer>", (False, True, True)),
        ("<think>a</think><answer></answer>", (True, False, True)),
        ("<think>a</think>b", (True, False, False)),
        ("</think>a<think><answer>b</answer>", (False, True, False)),
        ("<think>a</think><think>a</think><answer>b</answer>", (False, True, False)),
        ("<think>a</think><answer>b</answer></answer>", (True, False, False)),
        ("", (False, False, False)),
    ],
)
def test_tags_once_in_order_around_something_and_nothing_else(text, detail):
    verdict = Format().verdicts(["p"], [text], {})[0]
    assert verdict.detail == tuple(zip(("format:think", "format:answer", "format:layout"), detail, strict=True))
    assert verdict.score == float(all(detail))


def test_a_prompt_that_opened_the_first_tag_is_continued():
    assert Format(think_opened=True)(["p"] * 2, ["a</think><answer>b</answer>", "<answer>b</answer>"]) == [1.0, 0.0]


def test_tags_have_the_names_that_are_asked_for():
    reward = Format(think_tag="reason", answer_tag="result")
    assert reward(["p"], ["<reason>a</reason><result>b</result>"]) == [1.0]


def test_tagged_gives_the_content_of_the_last_closed_pair():
    assert tagged("<a>1</a><a>2</a><a>3", "a") == "2"
    assert tagged("<a>1<a>2</a>", "a") == "2"
    assert tagged("</a>1<a>", "a") is None
    assert tagged("<b>1</b>", "a") is None


@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " "]), max_size=10))
@settings(max_examples=50, deadline=None)
def test_any_soup_of_tags_is_graded(pieces):
    verdict = Format().verdicts(["p"], ["".join(pieces)], {})[0]
    assert verdict.status == "graded"
    marks = [piece for piece in pieces if piece.strip()]
    well_formed = (
        [m for m in marks if m != "a"] == ["<think>", "</think>", "<answer>", "</answer>"]
        and marks[:1] == ["<think>"]
        and marks[-1:] == ["</answer>"]
        and marks[marks.index("</think>") + 1] == "<answer>"
        and marks[1] == "a" == marks[-2]
    )
    assert verdict.score == float(well_formed)
