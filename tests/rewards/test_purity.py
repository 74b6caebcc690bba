"""No text makes a reward raise, and a text has one verdict: in any order, twice, and from any thread."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from logitless.rewards.code import Code
from logitless.rewards.math import Math
from logitless.rewards.reasoning_gym import ReasoningGym
from logitless.rewards.text.exact import Exact
from logitless.rewards.text.format import Format
from logitless.rewards.text.gate import MinimumLength, Relevance
from logitless.rewards.text.json_schema import JsonSchema
from logitless.rewards.text.length import Length
from logitless.rewards.text.overlong import Overlong
from logitless.rewards.text.regex import Regex
from logitless.rewards.text.repetition import Repetition
from logitless.rewards.user_function import Function

ENTRY = {"question": "?", "answer": "abba", "metadata": {"letters": ["a", "b", "b", "a"]}}
COLUMNS = {"answer": "4", "entry": ENTRY, "tests": [{"output": "4"}]}
IN_PROCESS = [
    Exact(answer_tag="answer"),
    Format(),
    Length(),
    MinimumLength(),
    Relevance(),
    Overlong(max_length=9, buffer=3),
    Repetition(ngram=2),
]
IN_WORKERS = [
    Function(path="tests.rewards.functions:length"),
    JsonSchema(schema={"type": "object"}),
    ReasoningGym(task="palindrome_generation"),
    Regex(pattern=r"(\w+)\s\1"),
]
SLOW = [Code(deadline_seconds=10.0), Math()]
TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(), max_size=40),
        st.text("\ud800\udfff\x00\n\r\u2028 ab<>/`{}[]\\$^", max_size=40),
        st.sampled_from(["", "4", "abba", "```python\nprint(4)\n```", "<answer>4</answer>", "{}", "$\\frac{8}{2}$"]),
    ),
    min_size=1,
    max_size=6,
)


def verdicts(reward, texts):
    columns = {name: [value] * len(texts) for name, value in COLUMNS.items()}
    return reward.verdicts(["Say 4."] * len(texts), texts, columns, [list(range(len(text))) for text in texts])


def check_one_verdict_a_text(reward, texts):
    found = verdicts(reward, texts)
    assert {verdict.status for verdict in found} <= {"graded", "ungradable", "timeout"}
    order = random.Random(0).sample(range(len(texts)), len(texts))
    again = verdicts(reward, [texts[index] for index in order])
    for index, verdict in zip(order, again, strict=True):
        if "timeout" not in (verdict.status, found[index].status):  # the machine did not let it run
            assert verdict == found[index]


@pytest.mark.parametrize("reward", IN_PROCESS + IN_WORKERS, ids=lambda reward: reward.name)
@given(texts=TEXTS)
@settings(max_examples=35, deadline=None)
def test_any_text_has_one_verdict(reward, texts):
    check_one_verdict_a_text(reward, texts)


@pytest.mark.parametrize("reward", SLOW, ids=lambda reward: reward.name)
@given(texts=TEXTS)
@settings(max_examples=5, deadline=None)
@example(["", "4", "print(4)", "\ud800", "\x00", "$\\frac{8}{2}$"])
def test_any_program_or_formula_has_one_verdict(reward, texts):
    check_one_verdict_a_text(reward, texts)


@pytest.mark.parametrize("reward", IN_PROCESS + IN_WORKERS, ids=lambda reward: reward.name)
def test_eight_threads_get_the_verdicts_of_one(reward):
    texts = ["", "4", "abba", "<answer>4</answer>", "so so", "{}", "a b a b"] * 3
    expected = verdicts(reward, texts)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda _: verdicts(reward, texts), range(8))) == [expected] * 8
