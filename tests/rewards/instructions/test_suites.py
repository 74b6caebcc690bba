"""Suites hold the ids they are named for; strict and loose verdicts are the official ones."""

import subprocess
import sys
from pathlib import Path

import pytest

from logitless.errors import DataError
from logitless.rewards.instructions import IFBENCH, IFEVAL, IFTRAIN, INSTRUCTIONS
from logitless.rewards.instructions.suites import (
    SUITES,
    Constraint,
    OverlapWarning,
    loose_variants,
    overlap,
    read_constraints,
    warn_of_overlap,
)


@pytest.mark.parametrize(
    ("suite", "count"),
    [
        ("ifeval", 25),
        ("iftrain", 29),
        ("ifbench", 58),
        ("ifeval_basic", 20),
        ("ifbench_easy", 20),
        ("instructions", 112),
    ],
)
def test_a_suite_has_its_official_ids_and_their_repairs(suite, count):
    official = [name for name in SUITES[suite] if "@" not in name]
    assert len(official) == count
    assert {f"{name}@fixed" for name in official} & set(INSTRUCTIONS) == set(SUITES[suite]) - set(official)


def test_the_basic_suite_runs_on_the_standard_library_alone():
    script = """
import sys
from logitless.rewards.instructions.suites import SUITES, Constraint
from tests.rewards.instructions.cases import CASES
for instruction in SUITES["ifeval_basic"].values():
    case = CASES[instruction.id].passes
    assert Constraint(instruction, case.arguments).is_satisfied(case.text), instruction.id
heavy = {"nltk", "langdetect", "emoji", "syllapy", "regex", "torch", "transformers", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3], check=True, timeout=600)


def test_loose_variants_drop_first_line_last_line_and_both_with_and_without_asterisks():
    assert loose_variants(" Sure: \n *a*\n b\n") == [
        " Sure: \n *a*\n b\n",
        " Sure: \n a\n b\n",
        "*a*\n b",
        "a\n b",
        "Sure: \n *a*\n b",
        "Sure: \n a\n b",
    ]


def test_the_whole_is_not_stripped_and_the_others_are():
    constraint = Constraint(INSTRUCTIONS["format:no_whitespace"], {})
    assert not constraint.is_satisfied("Yes\n")
    assert constraint.is_satisfied("Yes\n", loose=True)
    assert not constraint.is_satisfied(" Yes", loose=True)


def test_each_constraint_may_be_satisfied_by_another_variant():
    constraints = read_constraints(
        ["startend:quotation", "combination:two_responses"], [{}, {}], suite="ifeval", row="row 1"
    )
    text = 'Sure:\n"One.\n******\nTwo."'
    assert [constraint.is_satisfied(text) for constraint in constraints] == [False, True]
    assert [constraint.is_satisfied(text, loose=True) for constraint in constraints] == [True, True]


def test_a_blank_variant_satisfies_nothing():
    assert not Constraint(INSTRUCTIONS["punctuation:no_comma"], {}).is_satisfied("*,*", loose=True)


@pytest.mark.parametrize(
    ("ids", "arguments", "complaint"),
    [
        (["punctuation:no_coma"], [{}], "Did you mean 'punctuation:no_comma'?"),
        (["count:numbers"], [{"N": 1}], "suite 'ifeval'"),
        (["no such thing"], [{}], "docs/rewards.md"),
        ([3], [{}], "an instruction id"),
        (["punctuation:no_comma"], [], "as many arguments"),
        ("punctuation:no_comma", {}, "a list of instruction ids"),
        (None, None, "a list of instruction ids"),
        ([], [], "an instruction in row 9"),
        (["punctuation:no_comma"], [None], "as a mapping"),
        (["length_constraints:number_words"], [{"num_words": 3, "relation": "about"}], "'less than', 'at least'"),
    ],
)
def test_rows_that_cannot_be_graded_are_refused_with_the_row(ids, arguments, complaint):
    with pytest.raises(DataError) as error:
        read_constraints(ids, arguments, suite="ifeval", row="row 9")
    assert complaint in str(error.value)
    assert "row 9" in str(error.value)


def test_ids_may_repeat_in_the_order_of_the_prompt():
    ids = ["keywords:word_once", "copy:copy", "keywords:word_once"]
    arguments = [{"keyword": "a"}, {"prompt_to_repeat": "b"}, {"keyword": "c"}]
    constraints = read_constraints(ids, arguments, suite="iftrain", row="row 1")
    assert [constraint.instruction.id for constraint in constraints] == ids
    assert [constraint.arguments for constraint in constraints] == arguments


def test_the_published_split_of_training_and_evaluation_has_no_overlap(recwarn):
    assert overlap([*IFEVAL, *IFTRAIN], IFBENCH) == ()
    warn_of_overlap([*IFEVAL, *IFTRAIN], IFBENCH)
    assert not recwarn.list


def test_training_on_what_is_evaluated_warns_with_the_list():
    with pytest.warns(OverlapWarning, match=r"2 instruction ids .*count:numbers, words:vowel"):
        warn_of_overlap(["words:vowel@fixed", "count:numbers", "copy:copy"], IFBENCH)
