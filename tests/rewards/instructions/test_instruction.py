"""Arguments are read as declared, and everything else is refused with the row and the id."""

import pytest

from logitless.errors import DataError
from logitless.rewards.instructions import INSTRUCTIONS
from logitless.rewards.instructions.instruction import Count, Suite

NUMBERS = INSTRUCTIONS["count:numbers"]


def test_null_is_absent_and_a_whole_float_is_an_integer():
    read = NUMBERS.read_arguments({"N": 5.0, "keyword": None, "letter": None}, row="row 1")
    assert read == {"N": 5}
    assert isinstance(read["N"], int)


def test_zero_is_a_value():
    arguments = {"prompt_to_repeat": "Write.", "n_start": 0, "n_end": 2}
    assert INSTRUCTIONS["repeat:repeat_span"].read_arguments(arguments, row="row 1")["n_start"] == 0


@pytest.mark.parametrize(
    ("instruction_id", "arguments", "complaint"),
    [
        ("count:numbers", {}, "the argument 'N'"),
        *(("count:numbers", {"N": n}, "N to be an integer of at least 0") for n in (5.5, True, "5", -1)),
        *(("count:numbers", {"N": n}, "N to be an integer") for n in (float("nan"), float("inf"))),
        ("count:numbers", {"N": 1, "n": 2}, "only the arguments ['N']"),
        ("ratio:stop_words", {"percentage": "5"}, "percentage to be a number"),
        ("words:keywords_specific_position", {"keyword": "a", "n": 0, "m": 1}, "n to be an integer of at least 1"),
        *(("keywords:existence", {"keywords": k}, "keywords to be a list of texts") for k in ([], "cat", ["cat", 3])),
        ("keywords:letter_frequency", {"letter": "ab"}, "one character"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "exactly"}, "one of 'less than', 'at least'"),
        ("language:response_language", {"language": "tlh"}, "one of 'en'"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"},
            "nth_paragraph to be at most num_paragraphs",
        ),
        ("ratio:overlap", {"percentage": 5, "reference_text": None}, "the argument 'reference_text'"),
        ("startend:end_checker", {"end_phrase": " "}, "a text that is not blank"),
    ],
)
def test_arguments_that_are_not_as_declared_are_refused_with_row_and_id(instruction_id, arguments, complaint):
    with pytest.raises(DataError) as error:
        INSTRUCTIONS[instruction_id].read_arguments(arguments, row="row 7")
    assert complaint in str(error.value)
    assert "row 7" in str(error.value)
    assert instruction_id in str(error.value)


def test_a_fixed_form_takes_over_arguments_and_needs_of_the_official_one():
    suite = Suite()

    @suite.instruction("a:b", "words")
    def has_xs(text: str, N: Count, fixed: bool = False) -> bool:
        return text.count("x") == N or (not fixed and text.count("x") > N)

    official, fixed = suite["a:b"], suite["a:b@fixed"]
    for each in (fixed, official):
        assert (each.arguments, each.needs) == ({"N": NUMBERS.arguments["N"]}, ("words",))
    assert [each.follows("xx", {"N": 1}) for each in (official, fixed)] == [True, False]
