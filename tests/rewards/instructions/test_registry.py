"""Every instruction of the registry does what its entry says: cases, quirks, repairs, time, purity."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.generate.rewards import described
from logitless.rewards.instructions import INSTRUCTIONS, Instruction
from tests.rewards.instructions.cases import CASES, Case
from tests.rewards.instructions.official import official_rows

SECONDS_AT_100K = 10.0
"""Time limit of a hostile text: twenty times what it takes on an idle core. A quadratic check would take minutes."""

OFFICIAL = [instruction for instruction in INSTRUCTIONS.values() if not instruction.id.endswith("@fixed")]
FIXED = [instruction for instruction in INSTRUCTIONS.values() if instruction.id.endswith("@fixed")]
COMMON_TOKENS = [*"Yes no a I The 5 14 . ?! - * *** 🙂 日本 [] kayak".split(), '"']  # noqa: SIM905
ONE_TOKEN = {instruction.id: described(instruction)[2] for instruction in OFFICIAL}
# Cut to size by what they are: pieces that checks look for, so that random texts come near a verdict of True.
PIECES = st.sampled_from(
    [
        *"\n|\n\n| |\t|*|**|***|******|* a|- b|.|. |!|?|?!|,|;|:|'|\"|“|”|[|]|(|)|{|<<|>>|<i>|</i>|#|-".split("|"),  # noqa: SIM905
        *"1|2,|14 |3.14|a|I |the |cat |Cat. |We won. |Question 1: |A) x\n|日本|🙂|🇫🇷|é|İ|ß|Σ".split("|"),  # noqa: SIM905
        *"\x00|\x0b|\u2028|\ud800|ID,Country|Dr. |U.S. |P.S. |{}|NaN".split("|"),  # noqa: SIM905
    ]
)
TEXTS = st.one_of(st.lists(PIECES, max_size=12).map("".join), st.text(max_size=30))


def verdict(instruction: Instruction, case: Case) -> bool:
    return instruction.check(case.text, **instruction.read_arguments(case.arguments, row="test"))


def by_id(instructions):
    return pytest.mark.parametrize("instruction", instructions, ids=lambda instruction: instruction.id)


def arguments_of_a_pass(instruction: Instruction) -> dict:
    return instruction.read_arguments(CASES[instruction.id].passes.arguments, row="test")


@by_id(INSTRUCTIONS.values())
def test_a_text_that_follows_the_instruction_passes_and_one_that_does_not_fails(instruction, tagger):
    cases = CASES[instruction.id]
    assert verdict(instruction, cases.passes) is True
    for case in (cases.fails, *cases.fail_too):
        assert verdict(instruction, case) is False, case.text
        assert case.text.strip()


@by_id(OFFICIAL)
def test_the_quirks_of_the_official_check_are_those_of_its_docstring(instruction):
    found = {note: verdict(instruction, case) for note, case in CASES[instruction.id].quirks.items()}
    assert found == described(instruction)[1]


@by_id(FIXED)
def test_a_fixed_check_judges_one_of_the_quirks_differently(instruction):
    official = INSTRUCTIONS[instruction.id.removesuffix("@fixed")]
    cases = CASES[official.id].quirks.values()
    assert any(verdict(instruction, case) is not verdict(official, case) for case in cases)


@by_id([instruction for instruction in OFFICIAL if ONE_TOKEN[instruction.id]])
def test_the_token_that_is_said_to_satisfy_the_instruction_does(instruction, tagger):
    token = ONE_TOKEN[instruction.id]
    assert re.fullmatch(r"[^\W\d_]+|\d+|[^\w\s]+", token)
    assert verdict(instruction, Case(token, CASES[instruction.id].passes.arguments))


@by_id([instruction for instruction in OFFICIAL if not ONE_TOKEN[instruction.id]])
def test_no_common_token_satisfies_an_instruction_said_to_need_more(instruction, tagger):
    for token in COMMON_TOKENS:
        assert not verdict(instruction, Case(token, CASES[instruction.id].passes.arguments)), token


@by_id(INSTRUCTIONS.values())
def test_a_hostile_text_of_100k_characters_is_judged_in_linear_time(instruction, tagger):
    text = (CASES[instruction.id].hostile * 100_000)[:100_000]
    arguments = arguments_of_a_pass(instruction)
    instruction.check(text[:100], **arguments)
    started = time.process_time()
    instruction.check(text, **arguments)
    assert time.process_time() - started < SECONDS_AT_100K


@by_id(INSTRUCTIONS.values())
@settings(max_examples=15, deadline=None, database=None, derandomize=True)
@given(text=TEXTS)
def test_any_text_gets_the_same_verdict_twice_and_raises_nothing(instruction, tagger, text):
    arguments = arguments_of_a_pass(instruction)
    first = instruction.check(text, **arguments)
    assert isinstance(first, bool)
    assert instruction.check(text, **arguments) is first


PATTERNS = st.lists(st.sampled_from([*"()ab+*?{}2,\\|^$. "]), min_size=1, max_size=8).map("".join).filter(str.strip)


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(pattern=PATTERNS, text=st.text("ab2 \n(", max_size=10))
def test_no_argument_that_is_taken_for_a_pattern_makes_a_check_raise(pattern, text):
    often = {"frequency": 1, "relation": "less than"}
    for name, arguments in {
        "keywords:existence": {"keywords": [pattern]},
        "keywords:frequency": {"keyword": pattern, **often},
        "keywords:forbidden_words": {"forbidden_words": [pattern]},
        "detectable_content:postscript": {"postscript_marker": pattern},
        "detectable_format:multiple_sections": {"section_spliter": pattern, "num_sections": 1},
        "keywords:word_once": {"keyword": pattern},
        "keywords:word_count_different_numbers": {"keyword": pattern, **often},
        "count:count_increment_word": {"keyword1": pattern, "keyword2": "a"},
        "copy:repeat_phrase": {"phrase": f"{pattern} b {pattern}", "small_n": 1},
        "format:options": {"options": pattern},
    }.items():
        for instruction in filter(None, (INSTRUCTIONS[name], INSTRUCTIONS.get(f"{name}@fixed"))):
            assert isinstance(verdict(instruction, Case(text, arguments)), bool)


@by_id(INSTRUCTIONS.values())
def test_a_blank_text_follows_nothing(instruction):
    assert not instruction.follows(" \n", arguments_of_a_pass(instruction))


@pytest.mark.parametrize(("name", "rows", "instructions"), [("ifeval", 541, 834), ("ifbench", 300, 344)])
def test_the_official_prompts_have_arguments_of_the_declared_kinds(name, rows, instructions):
    official = official_rows(name)
    read = [
        INSTRUCTIONS[instruction_id].read_arguments(arguments, row=f"row {row}")
        for row, prompt in enumerate(official)
        for instruction_id, arguments in zip(prompt["instruction_id_list"], prompt["kwargs"], strict=True)
    ]
    assert (len(official), len(read)) == (rows, instructions)
