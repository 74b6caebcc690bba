"""The 25 instructions of IFEval (Zhou et al. 2023, arXiv:2311.07911) and their repairs."""

import json
import re
from collections.abc import Sequence

from logitless.rewards.instructions.instruction import (
    Count,
    Language,
    Letter,
    Positive,
    Relation,
    Suite,
    Text,
    Texts,
)
from logitless.rewards.instructions.text import language as language_of
from logitless.rewards.instructions.text import sentences, words

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
COMMAS = ",،、，﹐﹑､՝"
"""Commas of all scripts."""

_CLOSED_BY = {'"': '"', "“": "”", "„": "“”", "«": "»"}

IFEVAL = Suite()


def matches(count: int, relation: str, bound: int) -> bool:
    """Whether a count stands in the relation to the bound.

    Example:
        >>> matches(3, "less than", 3), matches(3, "at least", 3)
        (False, True)
    """
    return {"less than": count < bound, "at least": count >= bound}[relation]


def compiled(pattern: str, flags: int = 0) -> re.Pattern[str] | None:
    """The regular expression, or None where it is none.

    Example:
        >>> compiled("(") is None
        True
    """
    try:
        return re.compile(pattern, flags)
    except (re.error, OverflowError, RecursionError):
        return None


def whole_word(word: str) -> re.Pattern[str]:
    """The word itself, with no letter, digit or underscore beside it, in any case.

    Example:
        >>> whole_word("c++").findall("C++, c+++ and abc++")
        ['C++', 'c++']
    """
    word = word.strip()
    before = r"(?<!\w)" if word[:1].isalnum() else ""
    after = r"(?!\w)" if word[-1:].isalnum() else ""
    return re.compile(before + re.escape(word) + after, re.IGNORECASE)


def occurrences(keyword: str, text: str, whole: bool) -> int | None:
    """How often a keyword is found in any case: as a whole word, or as a regular expression; None where it is none.

    Example:
        >>> occurrences("c.t", "Cut a scat", whole=False), occurrences("(", "x", whole=False)
        (2, None)
    """
    pattern = whole_word(keyword) if whole else compiled(keyword.strip(), re.IGNORECASE)
    return None if pattern is None else sum(1 for _ in pattern.finditer(text))


def filled_parts(parts: Sequence[str]) -> list[str] | None:
    """The parts but for a blank first and last one; None where an inner one is blank.

    Example:
        >>> filled_parts(["", "a", "b "]), filled_parts(["a", " ", "b"])
        (['a', 'b '], None)
    """
    return [part for part in parts if part.strip()] if all(part.strip() for part in parts[1:-1]) else None


@IFEVAL.instruction("keywords:existence")
def has_keywords(text: str, keywords: Texts, fixed: bool = False) -> bool:
    """Every keyword is found, in any case.

    Quirk: a keyword inside a word counts (passes)
    Quirk: keywords are regular expressions (passes)
    Quirk: a keyword that is no regular expression is never found (fails)
    One token: cat
    Fixed: Every keyword stands in the text as a whole word, in any case.
    """
    patterns = [whole_word(each) if fixed else compiled(each, re.IGNORECASE) for each in keywords]
    return all(pattern is not None and pattern.search(text) for pattern in patterns)


@IFEVAL.instruction("keywords:frequency")
def keyword_frequency(text: str, keyword: Text, frequency: Count, relation: Relation, fixed: bool = False) -> bool:
    """The keyword is found less than / at least so many times, in any case.

    Quirk: a keyword inside a word counts (passes)
    Quirk: the keyword is a regular expression (passes)
    Quirk: a keyword that is no regular expression is never found, so less than fails too (fails)
    One token: war
    Fixed: The keyword stands less than / at least so many times as a whole word.
    """
    count = occurrences(keyword, text, whole=fixed)
    return count is not None and matches(count, relation, frequency)


@IFEVAL.instruction("keywords:forbidden_words")
def lacks_words(text: str, forbidden_words: Texts, fixed: bool = False) -> bool:
    """None of the words stands in the text as a whole word, in any case.

    Quirk: words are regular expressions (fails)
    Quirk: 'c++' means one or more c, alone (passes)
    Quirk: a word that is no regular expression is never fine (fails)
    One token: yes
    Fixed: None of the words stands in the text by itself, in any case.
    """
    patterns = [whole_word(word) if fixed else compiled(rf"\b{word}\b", re.IGNORECASE) for word in forbidden_words]
    return all(pattern is not None and not pattern.search(text) for pattern in patterns)


@IFEVAL.instruction("keywords:letter_frequency")
def letter_frequency(text: str, letter: Letter, let_frequency: Count, let_relation: Relation) -> bool:
    """The letter, in any case, occurs less than / at least so many times.

    Quirk: a character that is no letter is counted (the official check draws a random letter instead) (passes)
    One token: Tattoo
    """
    return matches(text.lower().count(letter.lower()), let_relation, let_frequency)


@IFEVAL.instruction("language:response_language", "language")
def is_in_language(text: str, language: Language, fixed: bool = False) -> bool:
    """The text is in the language.

    Quirk: a text that shows no language is in every language (passes)
    Quirk: the first 10000 characters decide (passes)
    One token: !!!
    Fixed: The text shows the language.
    """
    found = language_of(text)
    return found == language or (found is None and not fixed)


@IFEVAL.instruction("length_constraints:number_sentences", "sentences")
def number_of_sentences(text: str, num_sentences: Count, relation: Relation) -> bool:
    """There are fewer than / at least so many sentences.

    Quirk: a list without full stops is one sentence (passes)
    One token: yes
    """
    return matches(len(sentences(text)), relation, num_sentences)


@IFEVAL.instruction("length_constraints:number_paragraphs")
def number_of_paragraphs(text: str, num_paragraphs: Count, fixed: bool = False) -> bool:
    """*** divides the text into exactly so many paragraphs; none of them is blank.

    Quirk: ***bold*** divides (passes)
    Quirk: * * * does not divide (fails)
    Quirk: a divider first or last is ignored (passes)
    Fixed: Lines of *** or * * * divide the text into exactly so many paragraphs; none of them is blank.
    """
    divider = r"^[^\S\n]*\*[^\S\n]?\*[^\S\n]?\*[^\S\n]*$" if fixed else r"\s?\*\*\*\s?"
    filled = filled_parts(re.split(divider, text, flags=re.MULTILINE))
    return filled is not None and len(filled) == num_paragraphs


@IFEVAL.instruction("length_constraints:number_words")
def number_of_words(text: str, num_words: Count, relation: Relation, fixed: bool = False) -> bool:
    """There are fewer than / at least so many runs of letters, digits and underscores.

    Quirk: 'it's' is two words (passes)
    One token: yes
    Fixed: There are fewer than / at least so many words between spaces that hold a letter or a digit.
    """
    spaced = [word for word in text.split() if any(map(str.isalnum, word))]
    return matches(len(spaced if fixed else re.findall(r"\w+", text)), relation, num_words)


def _nth_exists(num_paragraphs: int, nth_paragraph: int, **_: str) -> str | None:
    return None if nth_paragraph <= num_paragraphs else "nth_paragraph to be at most num_paragraphs"


@IFEVAL.instruction("length_constraints:nth_paragraph_first_word", consistent=_nth_exists)
def nth_paragraph_first_word(
    text: str, num_paragraphs: Count, nth_paragraph: Positive, first_word: Text, fixed: bool = False
) -> bool:
    """Empty lines divide the text into so many paragraphs, and the n-th starts with the word.

    Quirk: a blank paragraph is not counted and still moves the index (fails)
    Quirk: a word ends at an apostrophe (passes)
    Fixed: There are so many paragraphs that are not blank, and the n-th of them starts with the word.
    """
    paragraphs = text.split("\n\n")
    filled = [paragraph for paragraph in paragraphs if paragraph.strip()]
    if len(filled) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    found = (filled if fixed else paragraphs)[nth_paragraph - 1].split()[:1]
    return [_start_of(word) for word in found] == [first_word.lower()]


@IFEVAL.instruction("detectable_content:number_placeholders")
def number_of_placeholders(text: str, num_placeholders: Count) -> bool:
    """There are at least so many [placeholders], each inside a line.

    Quirk: [] is one (passes)
    Quirk: nested brackets are one (fails)
    """
    return sum(_count_bracketed(line) for line in text.split("\n")) >= num_placeholders


@IFEVAL.instruction("detectable_content:postscript")
def has_postscript(text: str, postscript_marker: Text, fixed: bool = False) -> bool:
    """The postscript marker is found, in any case.

    Quirk: it is found anywhere, inside words too (passes)
    Quirk: another marker than P.S. and P.P.S is a regular expression (passes)
    Quirk: a marker that is no regular expression is never found (fails)
    Fixed: A line of the last paragraph starts with the marker, in any case, ignoring spaces and Markdown markers.
    """
    marker, lower = postscript_marker.strip().lower(), text.lower()
    if fixed:
        lines = lower.rstrip().rsplit("\n\n", 1)[-1].split("\n")
        return any("".join(line.split()).lstrip("*_#").startswith("".join(marker.split())) for line in lines)
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(postscript_marker.strip())
    if known is None and not re.fullmatch(r"[\w .,:;!'\"/-]+", marker):
        known = rf"\s*{marker}.*$"
    pattern = compiled(known or marker, re.MULTILINE)
    return pattern is not None and pattern.search(lower) is not None


@IFEVAL.instruction("detectable_format:number_bullet_lists")
def number_of_bullets(text: str, num_bullets: Count, fixed: bool = False) -> bool:
    """Exactly so many lines start with a dash, or with one asterisk.

    Quirk: a negative number at the start of a line counts (passes)
    Quirk: a rule of dashes counts (fails)
    Quirk: an asterisk at the end of a line takes the next line with it (fails)
    Fixed: Exactly so many lines start with an asterisk or a dash and a space, and say something.
    """
    # [^\S\n]* stands for the official \s*: blank lines before a bullet change no count, and cost no second look.
    patterns = [r"^[^\S\n]*[*-][^\S\n]+\S"] if fixed else [r"^[^\S\n]*\*[^*].*$", r"^[^\S\n]*-.*$"]
    return sum(len(re.findall(pattern, text, flags=re.MULTILINE)) for pattern in patterns) == num_bullets


@IFEVAL.instruction("detectable_format:constrained_response")
def has_option(text: str, fixed: bool = False) -> bool:
    """'My answer is yes.', 'My answer is no.' or 'My answer is maybe.' stands in the text.

    Quirk: several of them may stand there (passes)
    Fixed: Exactly one of the three answers stands in the text.
    """
    found = sum(option in text for option in OPTIONS)
    return found == 1 or (found > 1 and not fixed)


@IFEVAL.instruction("detectable_format:number_highlighted_sections")
def number_of_highlights(text: str, num_highlights: Count, fixed: bool = False) -> bool:
    """There are at least so many *highlights*, each inside a line and not blank.

    Quirk: asterisks with spaces inside count (passes)
    Quirk: ***a highlight*** counts twice (passes)
    Fixed: There are at least so many *highlights* or **highlights** without spaces next to the asterisks.
    """
    if fixed:
        return len(re.findall(r"(?<![*\w])(\*\*?)(?=[^\s*])([^\n*]*)(?<=[^\s*])\1(?![*\w])", text)) >= num_highlights
    found = re.findall(r"\*([^\n*]*)\*", text) + re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(highlight.strip()) for highlight in found) >= num_highlights


@IFEVAL.instruction("detectable_format:multiple_sections")
def number_of_sections(text: str, section_spliter: Text, num_sections: Count, fixed: bool = False) -> bool:
    """The section word with a number behind it occurs at least so many times.

    Quirk: more than the number pass, though the text says exactly (passes)
    Quirk: case matters (fails)
    Quirk: Roman numerals do not count (fails)
    Quirk: the word is a regular expression (passes)
    Quirk: a mention counts (passes)
    Fixed: Exactly so many lines start with the section word and an Arabic or Roman number, in any case.
    """
    word = section_spliter.strip()
    if fixed:
        heading = rf"^[^\w\n]*{re.escape(word)}[^\S\n]*(?:\d+|[ivxlc]+)\b"
        return len(re.findall(heading, text, flags=re.MULTILINE | re.IGNORECASE)) == num_sections
    pattern = compiled(rf"\s?{word}\s?\d+\s?")
    return pattern is not None and len(pattern.split(text)) - 1 >= num_sections


@IFEVAL.instruction("detectable_format:json_format")
def is_json(text: str, fixed: bool = False) -> bool:
    """The whole text is JSON, without a Markdown fence around it.

    Quirk: a number will do (passes)
    Quirk: NaN will do (passes)
    Quirk: text in quotation marks will do (passes)
    Quirk: nesting too deep for the parser fails (fails)
    One token: 5
    Fixed: The whole text is a JSON object or array, without a Markdown fence around it.
    """
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        value = json.loads(text.removesuffix("```").strip(), parse_constant=_refuse if fixed else None)
    except (ValueError, RecursionError):
        return False
    return not fixed or isinstance(value, dict | list)


@IFEVAL.instruction("detectable_format:title")
def has_title(text: str) -> bool:
    """A line holds <<a title>> that is not blank.

    Quirk: one line's first << and last >> count (passes)
    """
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and end >= start + 3 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


@IFEVAL.instruction("combination:two_responses")
def has_two_responses(text: str) -> bool:
    """****** divides the text into exactly two responses, which differ.

    Quirk: a divider first or last is ignored (passes)
    Quirk: seven asterisks leave one to the second response (passes)
    """
    filled = filled_parts(text.split("******")) or []
    return len(filled) == 2 and filled[0].strip() != filled[1].strip()


@IFEVAL.instruction("combination:repeat_prompt")
def repeats_prompt(text: str, prompt_to_repeat: Text) -> bool:
    """The text starts with the request, in any case.

    Quirk: an answer need not follow (passes)
    """
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@IFEVAL.instruction("startend:end_checker")
def ends_with(text: str, end_phrase: Text) -> bool:
    """The text ends with the phrase, in any case, ignoring quotation marks around the text.

    Quirk: it may end in the middle of a word (passes)
    """
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@IFEVAL.instruction("startend:quotation")
def is_quoted(text: str, fixed: bool = False) -> bool:
    """The first and the last character are double quotation marks.

    Quirk: three quotation marks will do (passes)
    Quirk: curly quotation marks fail (fails)
    One token: ""
    Fixed: Double quotation marks, straight or curly, stand around something.
    """
    text = text.strip()
    if not fixed:
        return len(text) > 1 and text[0] == text[-1] == '"'
    closing = _CLOSED_BY.get(text[:1], "")
    return text[-1:] in closing and closing != "" and any(map(str.isalnum, text[1:-1]))


@IFEVAL.instruction("change_case:capital_word_frequency", "words", "sentences")
def capital_word_frequency(text: str, capital_frequency: Count, capital_relation: Relation) -> bool:
    """Less than / at least so many words are in capitals.

    Quirk: I and A count (passes)
    One token: yes
    """
    return matches(sum(map(str.isupper, words(text))), capital_relation, capital_frequency)


@IFEVAL.instruction("change_case:english_capital", "language")
def is_english_in_capitals(text: str, fixed: bool = False) -> bool:
    """The text is English and in capitals.

    Quirk: English in capitals is often taken for German (fails)
    Fixed: The text is in capitals, and English when read in small letters.
    """
    return text.isupper() and is_in_language(text.lower() if fixed else text, "en", fixed)


@IFEVAL.instruction("change_case:english_lowercase", "language")
def is_english_in_lowercase(text: str, fixed: bool = False) -> bool:
    """The text is English and without capitals.

    Quirk: what shows no language is English (passes)
    One token: the
    Fixed: The text is without capitals and shows English.
    """
    return text.islower() and is_in_language(text, "en", fixed)


@IFEVAL.instruction("punctuation:no_comma")
def lacks_comma(text: str, fixed: bool = False) -> bool:
    """There is no comma.

    Quirk: commas of other scripts are none (passes)
    One token: yes
    Fixed: There is no comma of any script.
    """
    return not any(comma in text for comma in (COMMAS if fixed else ","))


def _start_of(word: str) -> str:
    """The word in lower case up to its first punctuation, opening quotation marks left out."""
    start = re.split(r"[.,?!'\"]", word.lstrip("'").lstrip('"'), maxsplit=1)[0]
    return "".join(letter.lower() for letter in start)


def _count_bracketed(line: str) -> int:
    """How often ``[...]`` stands in a line, each closed by the next bracket."""
    count, end = 0, -1
    while (start := line.find("[", end + 1)) >= 0 and (end := line.find("]", start)) >= 0:
        count += 1
    return count


def _refuse(constant: str) -> None:
    raise ValueError(constant)
