"""Splitting texts into sentences and words, and detecting languages and word classes.

All functions are deterministic, need no downloaded data and leave the global state of libraries alone. Optional
packages are imported on first use; ``UnavailableError`` if one, or the tagger's data, is absent.

Sentences come from nltk's Punkt algorithm, untrained, with a list of common abbreviations. It agrees with the trained
English model except for breaks that depend on words of the training data.
"""

import functools
import re
import string
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from logitless.errors import UnavailableError
from logitless.installed import optional
from logitless.rewards.instructions.word_lists import ABBREVIATIONS

PACKAGES = {
    "sentences": "nltk",
    "words": "nltk",
    "tagger": "nltk",
    "language": "langdetect",
    "emoji": "emoji",
    "syllables": "syllapy",
}
"""The package for each need of a check; stop words need none."""

TAGGER = "averaged_perceptron_tagger_eng"

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LANGUAGE_LOCK = threading.Lock()


def without_punctuation(text: str) -> str:
    """The text without ASCII punctuation.

    Example:
        >>> without_punctuation("It's 3.14!")
        'Its 314'
    """
    return text.translate(_NO_PUNCTUATION)


def bare(word: str) -> str:
    """A word without ASCII punctuation and spaces around it.

    Example:
        >>> bare('"don\\'t!"')
        "don't"
    """
    return word.strip(string.punctuation + " ")


def bare_words(text: str) -> list[str]:
    """The words between white space, bare and in lower case; a word of punctuation alone is left out.

    Example:
        >>> bare_words("Well - I *won't*.")
        ['well', 'i', "won't"]
    """
    return [word for word in map(bare, text.lower().split()) if word]


def sentences(text: str) -> list[str]:
    """The sentences, by nltk's Punkt algorithm.

    Example:
        >>> sentences('Dr. Lee said "Go." He went! Why?')
        ['Dr. Lee said "Go."', 'He went!', 'Why?']
    """
    if not any(mark in text for mark in ".?!"):
        whole = text.rstrip()
        return [whole] if whole else []
    splitter = _module("nltk.tokenize.punkt").PunktSentenceTokenizer(_punkt_parameters(), lang_vars=_punkt_language())
    # Without a cache a text that repeats one phrase takes seconds.
    splitter.text_contains_sentbreak = functools.cache(splitter.text_contains_sentbreak)
    return list(splitter.tokenize(text))


def words(text: str) -> list[str]:
    """The words and punctuation marks, as nltk's word_tokenize splits them.

    Example:
        >>> words("I can't. Stop!")
        ['I', 'ca', "n't", '.', 'Stop', '!']
    """
    tokenizer = _word_tokenizer()
    tokens: dict[str, list[str]] = {}
    for sentence in (split := sentences(text)):
        if sentence not in tokens:
            tokens[sentence] = tokenizer.tokenize(sentence)
    return [token for sentence in split for token in tokens[sentence]]


def alphanumeric_words(text: str) -> list[str]:
    """The words that contain a letter or a digit.

    Example:
        >>> alphanumeric_words("Well, 2 cats!")
        ['Well', '2', 'cats']
    """
    return [word for word in words(text) if any(character.isalnum() for character in word)]


_STARTERS = (
    r"(Mr|Mrs|Ms|Dr|Prof|Capt|Cpt|Lt|He\s|She\s|It\s|They\s|Their\s|Our\s|We\s|But\s|However\s|That\s|This\s|Wherever)"
)
_LETTER = "([A-Za-z])"
_KEPT, _BREAK = "<prd>", "<stop>"  # placeholders for a dot inside a sentence, and for the end of a sentence
_DOTS_THAT_END_NOTHING: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(Mr|St|Mrs|Ms|Dr)\.", rf"\1{_KEPT}"),
        (r"\.(com|net|org|io|gov|edu|me)", rf"{_KEPT}\1"),
        (r"([0-9])\.([0-9])", rf"\1{_KEPT}\2"),
    )
)
_ABBREVIATED: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"\s{_LETTER}\. ", rf" \1{_KEPT} "),
        (rf"([A-Z]\.[A-Z]\.(?:[A-Z]\.)?) {_STARTERS}", rf"\1{_BREAK} \2"),
        (rf"{_LETTER}\.{_LETTER}\.{_LETTER}\.", rf"\1{_KEPT}\2{_KEPT}\3{_KEPT}"),
        (rf"{_LETTER}\.{_LETTER}\.", rf"\1{_KEPT}\2{_KEPT}"),
        (rf" (Inc|Ltd|Jr|Sr|Co)\. {_STARTERS}", rf" \1{_BREAK} \2"),
        (r" (Inc|Ltd|Jr|Sr|Co)\.", rf" \1{_KEPT}"),
        (rf" {_LETTER}\.", rf" \1{_KEPT}"),
    )
)


def rule_sentences(text: str) -> list[str]:
    """The sentences by the substitution rules of IFEval's own splitter.

    Dots inside sentences are replaced by a placeholder, quotation marks move in front of the mark that ends their
    sentence, and every ``.``, ``?`` and ``!`` that is left ends a sentence.

    Example:
        >>> rule_sentences('Mr. Lee paid 3.50. "Why?" she said')
        ['Mr. Lee paid 3.50.', '"Why"?', 'she said']
    """
    text = f" {text}  ".replace("\n", " ")
    for pattern, replacement in _DOTS_THAT_END_NOTHING:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\.{2,}", lambda dots: _KEPT * len(dots.group()) + _BREAK, text)
    text = text.replace("Ph.D.", f"Ph{_KEPT}D{_KEPT}")
    for pattern, replacement in _ABBREVIATED:
        text = pattern.sub(replacement, text)
    for quoted, swapped in ((".”", "”."), ('."', '".'), ('!"', '"!'), ('?"', '"?')):
        text = text.replace(quoted, swapped)
    for mark in ".?!":
        text = text.replace(mark, mark + _BREAK)
    parts = [part.strip() for part in text.replace(_KEPT, ".").split(_BREAK)]
    return parts if parts[-1] else parts[:-1]


def language(text: str) -> str | None:
    """The ISO 639-1 code of the most probable language; None if none is detected.

    Seeded on every call, so that the result does not depend on earlier calls or threads.

    Example:
        >>> language("Das ist ein schöner Tag."), language("12345")
        ('de', None)
    """
    langdetect = _module("langdetect")
    with _LANGUAGE_LOCK:
        factory = _language_factory()
    detector = factory.create()
    detector.append(text)
    try:
        return str(detector.detect())
    except langdetect.LangDetectException:
        return None


def syllables(word: str) -> int:
    """The number of syllables by syllapy.

    Example:
        >>> syllables("banana")
        3
    """
    return int(_module("syllapy").count(word))


def is_emoji(character: str) -> bool:
    """Whether a single code point is an emoji.

    Example:
        >>> is_emoji("🙂"), is_emoji("🇫")
        (True, False)
    """
    return bool(_module("emoji").is_emoji(character))


def ends_with_emoji(text: str) -> bool:
    """Whether the text ends with an emoji, of one or several code points.

    Example:
        >>> ends_with_emoji("Allez 🇫🇷"), ends_with_emoji("🇫🇷 Allez")
        (True, False)
    """
    tail = text[-40:]
    found = _module("emoji").emoji_list(tail)
    return bool(found) and found[-1]["match_end"] == len(tail)


def starts_with_emoji(text: str) -> bool:
    """Whether the text starts with an emoji, of one or several code points.

    Example:
        >>> starts_with_emoji("🇫🇷 Allez"), starts_with_emoji("Allez 🇫🇷")
        (True, False)
    """
    found = _module("emoji").emoji_list(text[:40])
    return bool(found) and found[0]["match_start"] == 0


def first_tag(tokens: Sequence[str]) -> str:
    """The Penn Treebank tag of the first token, which depends on the first three.

    Raises:
        UnavailableError: the tagger's data is not installed.
    """
    return str(_tagger().tag(list(tokens[:3]))[0][1])


def require(needs: Iterable[str]) -> None:
    """Raises UnavailableError unless the packages for these needs are installed; the tagger's data is not checked."""
    for need in needs:
        if need in PACKAGES:
            _module(PACKAGES[need])


class _NoCounts(dict[str, int]):
    """The counts of an untrained model: 0 for every word, without storing any."""

    def __missing__(self, word: str) -> int:
        return 0


def _module(name: str) -> Any:
    """A module of an optional package."""
    return optional(name, extra="rewards", needed=f"the package {name.partition('.')[0]!r}")


@functools.cache
def _language_factory() -> Any:
    module = _module("langdetect.detector_factory")
    factory = module.DetectorFactory()
    factory.load_profile(module.PROFILES_DIRECTORY)
    factory.set_seed(0)
    return factory


@functools.cache
def _punkt_parameters() -> Any:
    parameters = _module("nltk.tokenize.punkt").PunktParameters()
    parameters.abbrev_types.update(ABBREVIATIONS)
    parameters.ortho_context = _NoCounts()
    return parameters


@functools.cache
def _punkt_language() -> Any:
    return _module("nltk.tokenize.punkt").PunktLanguageVars()


@functools.cache
def _word_tokenizer() -> Any:
    return _module("nltk.tokenize.destructive").NLTKWordTokenizer()


@functools.cache
def _tagger() -> Any:
    try:
        return _module("nltk.tag.perceptron").PerceptronTagger()
    except LookupError:
        raise UnavailableError(
            needed=f"nltk's tagger data {TAGGER!r}",
            given="none in nltk.data.path",
            remedy=f"Install it once: python -m nltk.downloader {TAGGER}",
        ) from None
