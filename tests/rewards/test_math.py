import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from math_verify import parser

from logitless.errors import ConfigurationError, DataError
from logitless.objective import presets
from logitless.objective.advantage import AdvantageInputs
from logitless.rewards.math import Math
from logitless.rewards.workers import tasks
from logitless.rewards.workers.size import runs_nothing
from logitless.rewards.workers.tasks import grade_math, grade_math_of_numbers
from tests.rewards.takeovers import OF_A_FUNCTION


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


STALLING = {
    "a tower": "$9^{9^{9^{9^9}}}$", "a tower of stars": "9**9**9**9", "a power": "$7^{-99999999}$",
    "parentheses": "$" + "(" * 500 + "3" + ")" * 500 + "$", "braces": "{" * 3000, "digits": "3" * 100_000,
    "a long text": "the answer is 4. " * 20_000,
}  # fmt: skip


@pytest.mark.parametrize("text", STALLING.values(), ids=STALLING)
def test_a_text_that_would_stall_by_its_size_is_wrong_at_once(text):
    reward = Math(deadline_seconds=300.0)
    reward.verdicts(["p"], ["3"], {"answer": ["3"]})
    start = time.monotonic()
    [verdict] = reward.verdicts(["p"], [text], {"answer": ["3"]})
    assert (verdict.status, verdict.score) == ("ungradable", 0.0)
    assert time.monotonic() - start < 30


def test_a_gold_answer_beyond_the_bounds_can_be_met():
    assert Math()(["p"], ["It is " + "3" * 1200], answer=["3" * 1200]) == [1.0]


STALLS_THE_PARSER = "$" + "+".join(f"(x+{number})^{{300}}" for number in range(60)) + "$"


def test_stalling_is_worth_what_a_wrong_answer_is():
    texts = ["3", "4", "5", STALLS_THE_PARSER]
    verdicts = Math(deadline_seconds=1.0).verdicts(["p"] * 4, texts, {"answer": ["3", "3", "3", "$(x+1)^{9000}$"]})
    assert [verdict.status for verdict in verdicts] == ["graded", "graded", "graded", "ungradable"]
    rewards = torch.tensor([float(verdict.score) for verdict in verdicts])
    asked = AdvantageInputs(rewards=rewards, group=torch.zeros(4, dtype=torch.long), sequence=torch.arange(4))
    right, wrong, again, stalled = presets.grpo().advantage(asked).advantage.tolist()
    assert right > 0 > wrong == again == stalled


def test_a_recipe_can_leave_stalled_completions_unscored():
    [verdict] = Math(ungradable_score=None).verdicts(["p"], ["9^{9^{9^9}}"], {"answer": ["3"]})
    assert (verdict.status, verdict.score) == ("timeout", None)


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


def test_completions_that_are_alike_are_graded_once_and_each_gets_the_verdict(monkeypatch):
    graded = []
    run = Math.run_confined

    def noted(reward, task, items, texts, **options):
        graded.extend(items)
        return run(reward, task, items, texts, **options)

    monkeypatch.setattr(Math, "run_confined", noted)
    texts, gold = ["It is 4.", "2 + 2 = 4", "It is 4.", "It is 4."], ["4", "4", "4", "5"]
    assert Math()(["2 + 2?"] * 4, texts, answer=gold) == [1.0, 1.0, 1.0, 0.0]
    assert graded == [("4", "It is 4."), ("4", "2 + 2 = 4"), ("5", "It is 4.")]


PIECES = [
    "8", "-8", "0.5", "1,000", "72%", "7 8", " ", "+", "=", "x", "$", "\\boxed{", "}", "\\frac{1}{2}", "^", "(", ")",
    "\n", "The answer is ", "So ", "final answer is: ", "####", "**", "\\text{ apples}", ".",
]  # fmt: skip


@given(st.sampled_from(["8", "-8", "0.5", "1000", "$\\frac{1}{2}$"]), st.lists(st.sampled_from(PIECES), max_size=8))
def test_numbers_get_their_verdict_without_a_parser_of_more_than_words_and_numbers(gold, pieces):
    text, parsed, named = "".join(pieces), [], ("parse_expr", "latex2sympy")

    def noted(parse):
        return lambda each, *options, **more: (parsed.append(each), parse(each, *options, **more))[1]

    clear_parsed()
    with pytest.MonkeyPatch.context() as patch:
        for name in named:
            patch.setattr(parser, name, noted(getattr(parser, name)))
        quick = grade_math_of_numbers(gold, text)
    assert all(runs_nothing(each.removeprefix("-")) for each in parsed)
    clear_parsed()
    assert quick in (None, grade_math(gold, text))


def clear_parsed():
    """Forget what was parsed for other texts."""
    for cached in (parser.parse_expr_cached, parser.parse_latex_cached, parser.extract_latex, tasks._parsed_gold):
        cached.cache_clear()


@pytest.mark.parametrize("takeover", OF_A_FUNCTION)
@pytest.mark.parametrize("written", ["{}", "${}$", "\\boxed{{{}}}", "The final answer is: {}"])
def test_what_could_take_a_process_over_is_left_to_one_of_its_own_or_is_no_number(takeover, written):
    assert grade_math_of_numbers("3", written.format(takeover)) in (None, {"score": 0.0})
    assert grade_math_of_numbers("3", "3") == {"score": 1.0}


def test_answers_that_are_numbers_share_a_process(monkeypatch):
    ran = []
    run = Math.run

    def noted(reward, task, items, *options, **more):
        ran.extend((task, way) for way in more.get("ways", ["kept"] * len(items)))
        return run(reward, task, items, *options, **more)

    monkeypatch.setattr(Math, "run", noted)
    texts = ["So 2 + 2 = 4. The answer is 4.", "\\boxed{4}", "It costs $4", "$\\frac{8}{2}$"]
    assert Math()(["2 + 2?"] * 4, texts, answer=["4"] * 4) == [1.0] * 4
    assert ran == [("grade_math_of_numbers", "kept")] * 4 + [("grade_math", "confined")]
