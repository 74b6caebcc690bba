"""Sentences, words and languages: as the installed libraries give them, always the same, from any thread."""

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless.errors import UnavailableError
from logitless.rewards.instructions import INSTRUCTIONS, text
from logitless.rewards.instructions.word_lists import ABBREVIATIONS, CAPITALS, PERSON_NAMES, PRONOUNS, STOP_WORDS
from tests.rewards.instructions.cases import CASES

PIECES = "a|A|Dr|e.g|.|. |! |?|\"|'|)|(|\n|  |no|No|1|3.|...|--|,|:|”|can't |cannot |gonna |[x] |$5 ".split("|")  # noqa: SIM905
texts = st.lists(st.sampled_from(PIECES), max_size=16).map("".join)
examples = settings(max_examples=100, deadline=None, database=None, derandomize=True)


@examples
@given(texts)
def test_sentences_and_words_are_those_of_nltk(given_text):
    punkt = importlib.import_module("nltk.tokenize.punkt")
    parameters = punkt.PunktParameters()
    parameters.abbrev_types.update(ABBREVIATIONS)
    sentences = punkt.PunktSentenceTokenizer(parameters).tokenize(given_text)
    tokenizer = importlib.import_module("nltk.tokenize.destructive").NLTKWordTokenizer()
    assert text.sentences(given_text) == sentences
    assert text.words(given_text) == [word for sentence in sentences for word in tokenizer.tokenize(sentence)]


def test_sentences_of_plain_english():
    said = ["Mr. Lee met Dr. Wu at 5 p.m. today.", "They ate."]
    assert text.sentences(" ".join(said)) == said


@pytest.mark.parametrize(
    ("given_text", "expected"),
    [
        ("Mr. A. Lee of Acme Inc. came. He won!", ["Mr. A. Lee of Acme Inc. came.", "He won!"]),
        ("See site.com now... Well?", ["See site.com now...", "Well?"]),
        ("A Ph.D. pays 3.50.", ["A Ph.D. pays 3.50."]),
        ("He works at Acme Inc. He likes it.", ["He works at Acme Inc", "He likes it."]),
        ("The U.S. We know.", ["The U.S.", "We know."]),
        ("", []),
    ],
)
def test_sentences_by_rules(given_text, expected):
    assert text.rule_sentences(given_text) == expected


def test_a_language_is_the_same_for_eight_threads_that_start_together_in_a_fresh_factory():
    text._language_factory.cache_clear()
    given_texts = ["Das ist ein schöner Tag.", "C'est la vie.", "THE QUICK BROWN FOX", "12345"] * 8
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(text.language, given_texts))
    assert found == [text.language(given_text) for given_text in given_texts]
    assert found[:2] == ["de", "fr"]
    assert found[3] is None


def test_a_language_does_not_change_what_another_user_of_langdetect_sees():
    factory = importlib.import_module("langdetect.detector_factory")
    before = factory.DetectorFactory.seed
    text.language("Das ist ein schöner Tag.")
    assert factory.DetectorFactory.seed == before


def test_sentences_leave_nothing_behind():
    text.sentences("Alpha beta. Gamma delta. Epsilon.")
    assert text._punkt_parameters().ortho_context == {}


def test_without_the_tagger_the_data_is_named(monkeypatch):
    monkeypatch.setattr(importlib.import_module("nltk").data, "path", [])
    text._tagger.cache_clear()
    with pytest.raises(UnavailableError, match=text.TAGGER):
        INSTRUCTIONS["words:start_verb"].check("Run home.")


@pytest.mark.parametrize(
    ("package", "instruction_id"),
    [
        ("langdetect", "language:response_language"),
        ("emoji", "format:emoji"),
        ("syllapy", "words:odd_even_syllables"),
        ("nltk", "ratio:sentence_type"),
    ],
)
def test_without_a_package_the_extra_is_named(monkeypatch, package, instruction_id):
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    case = CASES[instruction_id].passes
    with pytest.raises(UnavailableError, match=r"logitless\[rewards\]"):
        INSTRUCTIONS[instruction_id].check(case.text, **case.arguments)


def test_the_word_lists_have_the_published_lengths():
    assert [len(words) for words in (STOP_WORDS, PRONOUNS, PERSON_NAMES, CAPITALS)] == [153, 63, 50, 27]
    assert all(len(set(words)) == len(words) for words in (STOP_WORDS, PRONOUNS, PERSON_NAMES, CAPITALS))
