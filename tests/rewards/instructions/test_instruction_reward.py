"""The reward of a suite: a fraction of constraints, with every verdict beside it."""

import importlib
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from logitless.errors import ConfigurationError, DataError, UnavailableError
from logitless.rewards.instructions import IFEVAL, instruction_reward, text
from logitless.rewards.instructions.instruction_reward import PATTERN_SECONDS, InstructionReward, scored
from logitless.rewards.instructions.suites import read_constraints
from tests.rewards.instructions.cases import CASES

IDS = ["punctuation:no_comma", "startend:quotation", "length_constraints:number_words"]
ARGUMENTS = [{"relation": None}, {}, {"num_words": 2.0, "relation": "less than"}]
COLUMNS = {"instruction_id_list": [IDS] * 3, "kwargs": [ARGUMENTS] * 3}
TEXTS = ['"yes"', "no", "well, well, well"]


def test_the_score_is_the_fraction_of_constraints_satisfied_or_one_where_all_are():
    verdicts = InstructionReward(name="ifeval_basic").verdicts(["?"] * 3, TEXTS, COLUMNS)
    assert [verdict.score for verdict in verdicts] == [1.0, pytest.approx(2 / 3), 0.0]
    assert verdicts[1].detail == tuple(zip(IDS, (True, False, True), strict=True))
    assert InstructionReward(name="ifeval", reduction="all")(["?"] * 3, TEXTS, **COLUMNS) == [1.0, 0.0, 0.0]


def test_it_is_called_in_the_shape_of_trl_with_a_column_named_kwargs():
    messages = [[{"role": "assistant", "content": said}] for said in TEXTS]
    scores = InstructionReward()(prompts=["?"] * 3, completions=messages, completion_ids=None, **COLUMNS)
    assert scores == [1.0, pytest.approx(2 / 3), 0.0]


def test_a_repeated_id_has_a_verdict_each_time():
    columns = {"instruction_id_list": [["keywords:frequency"] * 2], "kwargs": [[_often("a"), _often("b")]]}
    (verdict,) = InstructionReward().verdicts(["?"], ["a"], columns)
    assert verdict.detail == (("keywords:frequency", True), ("keywords:frequency", False))


def test_without_the_tagger_the_verdict_is_missing_and_not_wrong(monkeypatch):
    monkeypatch.setattr(importlib.import_module("nltk").data, "path", [])
    text._tagger.cache_clear()
    columns = {"instruction_id_list": [["words:vowel", "words:start_verb"]], "kwargs": [[{}, {}]]}
    (verdict,) = InstructionReward(name="ifbench").verdicts(["?"], ["Run"], columns)
    assert (verdict.score, verdict.status) == (None, "missing")
    assert verdict.detail == (("words:vowel", True),)
    assert text.TAGGER in verdict.message


def test_check_names_the_row_that_is_wrong():
    columns = {"instruction_id_list": [IDS, ["count:number"]], "kwargs": [ARGUMENTS, [{}]]}
    with pytest.raises(DataError, match="row 1"):
        InstructionReward(name="ifeval").check(columns)


def test_check_asks_for_the_columns():
    with pytest.raises(ConfigurationError, match="kwargs"):
        InstructionReward().check({"instruction_id_list": [IDS]})


def test_check_asks_for_packages_before_anything_is_scored(monkeypatch):
    monkeypatch.setitem(sys.modules, "langdetect", None)
    columns = {"instruction_id_list": [["change_case:english_capital"]], "kwargs": [[{}]]}
    with pytest.raises(UnavailableError, match="langdetect"):
        InstructionReward().check(columns)


def test_other_columns_may_hold_ids_and_arguments():
    reward = InstructionReward(ids_column="ids", arguments_column="arguments")
    assert reward(["?"] * 3, TEXTS, ids=[IDS] * 3, arguments=[ARGUMENTS] * 3)[0] == 1.0


def test_verdicts_hang_on_neither_order_nor_thread():
    rows = [
        (name, dict(case.arguments), case.text)
        for name in IFEVAL
        for case in (CASES[name].passes, CASES[name].fails, *CASES[name].quirks.values())
        if case.text.strip() and len(case.text) < 1000
    ]
    expected = [_verdict(row) for row in rows]
    order = random.Random(0).sample(range(len(rows)), len(rows))
    with ThreadPoolExecutor(4) as threads:
        shuffled = list(threads.map(_verdict, (rows[place] for place in order)))
    assert shuffled == [expected[place] for place in order]


def _often(keyword):
    return {"keyword": keyword, "frequency": 1, "relation": "at least"}


def _verdict(row):
    instruction_id, arguments, said = row
    columns = {"instruction_id_list": [[instruction_id]], "kwargs": [[arguments]]}
    return InstructionReward(name="instructions").verdicts(["?"], [said], columns)[0]


def test_a_pattern_that_never_ends_is_ungradable_and_costs_its_own_row_only():
    stars, question_marks = "(a+)+$", "a?" * 40 + "a" * 40 + "b"
    columns = {
        "instruction_id_list": [["keywords:existence"]] * 4,
        "kwargs": [[{"keywords": [pattern]}] for pattern in (stars, question_marks, "a", stars)],
    }
    start = time.monotonic()
    verdicts = InstructionReward().verdicts(["?"] * 4, ["a" * 40 + "!", "a" * 60, "a", "aaa"], columns)
    assert time.monotonic() - start < 60 * PATTERN_SECONDS
    assert [verdict.status for verdict in verdicts] == ["ungradable", "ungradable", "graded", "graded"]
    for verdict, passed in zip(verdicts, (False, False, True, True), strict=True):
        assert (verdict.score, verdict.detail) == (float(passed), (("keywords:existence", passed),))


@pytest.mark.parametrize("text", ["a cat; c++ too", "no such thing", "acacac"])
def test_a_bounded_row_is_judged_as_one_in_this_process(text):
    ids = ["keywords:existence", "keywords:forbidden_words", "punctuation:no_comma"]
    arguments = [{"keywords": ["(ac)+"]}, {"forbidden_words": ["c++"]}, {}]
    columns = {"instruction_id_list": [ids], "kwargs": [arguments]}
    constraints = read_constraints(ids, arguments, suite="ifeval", row="the row")
    assert InstructionReward().verdicts(["?"], [text], columns) == [scored(constraints, text)]


def test_plain_arguments_start_no_process(monkeypatch):
    monkeypatch.setattr(instruction_reward, "shared_pool", lambda: pytest.fail("a worker for a plain row"))
    columns = {
        "instruction_id_list": [["keywords:existence", "detectable_content:postscript", "startend:end_checker"]],
        "kwargs": [[{"keywords": ["a.c", "(b)"]}, {"postscript_marker": "P.P.S"}, {"end_phrase": "(a+)+$"}]],
    }
    assert InstructionReward()(["?"], ["abc"], **columns) == [pytest.approx(1 / 3)]
