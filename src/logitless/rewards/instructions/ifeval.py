"""The 25 instructions of IFEval (Zhou et al. 2023, arXiv:2311.07911) and their repairs.

The table at the end says of every check what it does, and shows it by examples that are tests.
"""

import json
import re
from collections.abc import Sequence

from logitless.rewards.instructions.instruction import (
    RELATIONS,
    Argument,
    Instruction,
    Repair,
    case,
    integer,
    quirk,
    table,
    text,
)
from logitless.rewards.instructions.text import language as language_of
from logitless.rewards.instructions.text import sentences, words
from logitless.rewards.instructions.word_lists import LANGUAGES

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
COMMAS = ",،、，﹐﹑､՝"
"""Commas of all scripts."""

_CLOSED_BY = {'"': '"', "“": "”", "„": "“”", "«": "»"}


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
    before = r"(?<!\w)" if word[:1].isalnum() else ""
    after = r"(?!\w)" if word[-1:].isalnum() else ""
    return re.compile(before + re.escape(word) + after, re.IGNORECASE)


def has_keywords(text: str, keywords: Sequence[str]) -> bool:
    patterns = [compiled(keyword, re.IGNORECASE) for keyword in sorted(keywords)]
    return all(pattern is not None and pattern.search(text) is not None for pattern in patterns)


def has_whole_keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(whole_word(keyword.strip()).search(text) for keyword in keywords)


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    pattern = compiled(keyword.strip(), re.IGNORECASE)
    return pattern is not None and matches(sum(1 for _ in pattern.finditer(text)), relation, frequency)


def whole_keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return matches(sum(1 for _ in whole_word(keyword.strip()).finditer(text)), relation, frequency)


def lacks_words(text: str, forbidden_words: Sequence[str]) -> bool:
    for word in sorted(set(forbidden_words)):
        pattern = compiled(rf"\b{word}\b", re.IGNORECASE)
        if pattern is None or pattern.search(text):
            return False
    return True


def lacks_whole_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(whole_word(word.strip()).search(text) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return matches(text.lower().count(letter.lower()), let_relation, let_frequency)


def is_in_language(text: str, language: str) -> bool:
    found = language_of(text)
    return found is None or found == language


def shows_language(text: str, language: str) -> bool:
    return language_of(text) == language


def number_of_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return matches(len(sentences(text)), relation, num_sentences)


def number_of_paragraphs(text: str, num_paragraphs: int) -> bool:
    return _filled_parts(re.split(r"\s?\*\*\*\s?", text)) == num_paragraphs


def number_of_divided_paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = re.split(r"^[^\S\n]*\*[^\S\n]?\*[^\S\n]?\*[^\S\n]*$", text, flags=re.MULTILINE)
    return _filled_parts(parts) == num_paragraphs


def number_of_words(text: str, num_words: int, relation: str) -> bool:
    return matches(len(re.findall(r"\w+", text)), relation, num_words)


def number_of_spaced_words(text: str, num_words: int, relation: str) -> bool:
    return matches(sum(any(map(str.isalnum, word)) for word in text.split()), relation, num_words)


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = text.split("\n\n")
    filled = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    nth = paragraphs[nth_paragraph - 1].split() if nth_paragraph <= filled else []
    return bool(nth) and filled == num_paragraphs and _start_of(nth[0]) == first_word.lower()


def nth_filled_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
    if len(paragraphs) != num_paragraphs:
        return False
    return _start_of(paragraphs[nth_paragraph - 1].split()[0]) == first_word.lower()


def number_of_placeholders(text: str, num_placeholders: int) -> bool:
    return sum(_count_bracketed(line) for line in text.split("\n")) >= num_placeholders


def has_postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    lower = text.lower()
    if marker == "P.P.S":
        return re.search(r"p\.\s?p\.\s?s", lower) is not None
    if marker == "P.S.":
        return re.search(r"p\.\s?s\.", lower) is not None
    if re.fullmatch(r"[\w .,:;!'\"/-]+", marker):
        pattern = compiled(marker.lower())
    else:
        pattern = compiled(rf"\s*{marker.lower()}.*$", re.MULTILINE)
    return pattern is not None and pattern.search(lower) is not None


def ends_with_postscript(text: str, postscript_marker: str) -> bool:
    marker = "".join(postscript_marker.lower().split())
    last = text.rstrip().lower().rsplit("\n\n", 1)[-1]
    return any("".join(line.split()).lstrip("*_#").startswith(marker) for line in last.split("\n"))


def number_of_bullets(text: str, num_bullets: int) -> bool:
    # [^\S\n]* stands for the official \s*: blank lines before a bullet change no count, and cost no second look.
    stars = re.findall(r"^[^\S\n]*\*[^*].*$", text, flags=re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-.*$", text, flags=re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


def number_of_listed_bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^[^\S\n]*[*-][^\S\n]+\S", text, flags=re.MULTILINE)) == num_bullets


def has_option(text: str) -> bool:
    return any(option in text for option in OPTIONS)


def has_one_option(text: str) -> bool:
    return sum(option in text for option in OPTIONS) == 1


def number_of_highlights(text: str, num_highlights: int) -> bool:
    single = re.findall(r"\*([^\n*]*)\*", text)
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(highlight.strip()) for highlight in single + double) >= num_highlights


def number_of_marked_highlights(text: str, num_highlights: int) -> bool:
    marked = re.findall(r"(?<![*\w])(\*\*?)(?=[^\s*])([^\n*]*)(?<=[^\s*])\1(?![*\w])", text)
    return len(marked) >= num_highlights


def number_of_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    pattern = compiled(rf"\s?{section_spliter.strip()}\s?\d+\s?")
    return pattern is not None and len(pattern.split(text)) - 1 >= num_sections


def number_of_headed_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    heading = rf"^[^\w\n]*{re.escape(section_spliter.strip())}[^\S\n]*(?:\d+|[ivxlc]+)\b"
    return len(re.findall(heading, text, flags=re.MULTILINE | re.IGNORECASE)) == num_sections


def is_json(text: str) -> bool:
    try:
        json.loads(_unfenced(text))
    except (ValueError, RecursionError):
        return False
    return True


def is_json_document(text: str) -> bool:
    try:
        return isinstance(json.loads(_unfenced(text), parse_constant=_refuse), dict | list)
    except (ValueError, RecursionError):
        return False


def has_title(text: str) -> bool:
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and end >= start + 3 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def has_two_responses(text: str) -> bool:
    parts = text.split("******")
    filled = [part.strip() for part in parts if part.strip()]
    return len(filled) == 2 and filled[0] != filled[1] and all(part.strip() for part in parts[1:-1])


def repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def is_quoted(text: str) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


def is_wrapped_in_quotes(text: str) -> bool:
    stripped = text.strip()
    closing = _CLOSED_BY.get(stripped[:1], "")
    return stripped[-1:] in closing and closing != "" and any(map(str.isalnum, stripped[1:-1]))


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return matches(sum(map(str.isupper, words(text))), capital_relation, capital_frequency)


def is_english_in_capitals(text: str) -> bool:
    return text.isupper() and is_in_language(text, "en")


def is_capital_english(text: str) -> bool:
    return text.isupper() and shows_language(text.lower(), "en")


def is_english_in_lowercase(text: str) -> bool:
    return text.islower() and is_in_language(text, "en")


def is_lowercase_english(text: str) -> bool:
    return text.islower() and shows_language(text, "en")


def lacks_comma(text: str) -> bool:
    return "," not in text


def lacks_any_comma(text: str) -> bool:
    return not any(comma in text for comma in COMMAS)


def _filled_parts(parts: Sequence[str]) -> int | None:
    """How many parts there are but for a blank first and last one; None where an inner one is blank."""
    if not all(part.strip() for part in parts[1:-1]):
        return None
    return len(parts) - sum(not part.strip() for part in (parts[0], parts[-1])[: len(parts)])


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


def _unfenced(text: str) -> str:
    """The text without a Markdown fence around it."""
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    return text.removesuffix("```").strip()


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _nth_exists(num_paragraphs: int, nth_paragraph: int, **_: str) -> str | None:
    return None if nth_paragraph <= num_paragraphs else "nth_paragraph to be at most num_paragraphs"


_RELATION = Argument("relation", "text", choices=RELATIONS)
_NO_PATTERN = "a keyword that is no regular expression is never found"

IFEVAL = table(
    Instruction(
        "keywords:existence",
        "Every keyword is found, in any case.",
        has_keywords,
        (Argument("keywords", "texts"),),
        passes=case("The cat slept.", keywords=["Cat"]),
        fails=case("The cat slept.", keywords=["dog", "cat"]),
        quirks=(
            quirk("a keyword inside a word counts", True, "concatenate", keywords=["cat"]),
            quirk("keywords are regular expressions", True, "abc", keywords=["a.c"]),
            quirk(_NO_PATTERN, False, "(", keywords=["("]),
        ),
        one_token="cat",
        fixed=Repair("Every keyword stands in the text as a whole word, in any case.", has_whole_keywords),
    ),
    Instruction(
        "keywords:frequency",
        "The keyword is found less than / at least so many times, in any case.",
        keyword_frequency,
        (text("keyword"), integer("frequency"), _RELATION),
        passes=case("War and peace.", keyword="war", frequency=2, relation="less than"),
        fails=case("War and war.", keyword="war", frequency=2, relation="less than"),
        quirks=(
            quirk("a keyword inside a word counts", True, "warward", keyword="war", frequency=2, relation="at least"),
            quirk("the keyword is a regular expression", True, "ab ac", keyword="a.", frequency=2, relation="at least"),
            quirk(_NO_PATTERN + ", so less than fails too", False, "x", keyword="(", frequency=1, relation="less than"),
        ),
        one_token="war",
        fixed=Repair("The keyword stands less than / at least so many times as a whole word.", whole_keyword_frequency),
    ),
    Instruction(
        "keywords:forbidden_words",
        "None of the words stands in the text as a whole word, in any case.",
        lacks_words,
        (Argument("forbidden_words", "texts"),),
        passes=case("Rocky roads.", forbidden_words=["rock", "road"]),
        fails=case("A ROCK!", forbidden_words=["rock", "road"]),
        quirks=(
            quirk("words are regular expressions", False, "abc", forbidden_words=["a.c"]),
            quirk("'c++' means one or more c, alone", True, "I like c++11 a lot", forbidden_words=["c++1"]),
            quirk("a word that is no regular expression is never fine", False, "x", forbidden_words=["("]),
        ),
        one_token="yes",
        fixed=Repair("None of the words stands in the text by itself, in any case.", lacks_whole_words),
    ),
    Instruction(
        "keywords:letter_frequency",
        "The letter, in any case, occurs less than / at least so many times.",
        letter_frequency,
        (Argument("letter", "letter"), integer("let_frequency"), Argument("let_relation", "text", choices=RELATIONS)),
        passes=case("Tattoo", letter="t", let_frequency=3, let_relation="at least"),
        fails=case("Taboo", letter="t", let_frequency=3, let_relation="at least"),
        quirks=(
            quirk(
                "a sign is counted as it stands (the official check draws a random letter instead: keys 1122, 1129)",
                True,
                "#a ##",
                letter="#",
                let_frequency=3,
                let_relation="at least",
            ),
        ),
        one_token="Tattoo",
    ),
    Instruction(
        "language:response_language",
        "The text is in the language.",
        is_in_language,
        (Argument("language", "text", choices=LANGUAGES),),
        needs=("language",),
        passes=case("Das ist ein schöner Tag im Frühling.", language="de"),
        fails=case("This is a lovely day in spring.", language="de"),
        quirks=(
            quirk("a text that shows no language is in every language", True, "12345", language="de"),
            quirk("the first 10000 characters decide", True, "Das ist ein Tag. " * 590 + "no " * 99, language="de"),
        ),
        one_token="!!!",
        fixed=Repair("The text shows the language.", shows_language),
    ),
    Instruction(
        "length_constraints:number_sentences",
        "There are less than / at least so many sentences.",
        number_of_sentences,
        (integer("num_sentences"), _RELATION),
        needs=("sentences",),
        passes=case("Dr. Lee ran. He won!", num_sentences=3, relation="less than"),
        fails=case("Dr. Lee ran. He won!", num_sentences=3, relation="at least"),
        quirks=(
            quirk(
                "a list without full stops is one sentence", True, "* a\n* b\n", num_sentences=2, relation="less than"
            ),
        ),
        hostile="Word. ",
        one_token="yes",
    ),
    Instruction(
        "length_constraints:number_paragraphs",
        "*** divides the text into exactly so many paragraphs; none of them is blank.",
        number_of_paragraphs,
        (integer("num_paragraphs"),),
        passes=case("One\n***\nTwo\n***\nThree", num_paragraphs=3),
        fails=case("One\n\nTwo\n\nThree", num_paragraphs=3),
        quirks=(
            quirk("***bold*** divides", True, "a ***b*** c", num_paragraphs=3),
            quirk("* * * does not divide", False, "a\n* * *\nb\n* * *\nc", num_paragraphs=3),
            quirk(
                "a divider first or last is left out of account", True, "***\na\n***\nb\n***\nc\n***", num_paragraphs=3
            ),
        ),
        hostile="***",
        fixed=Repair(
            "Lines of *** or * * * divide the text into exactly so many paragraphs; none of them is blank.",
            number_of_divided_paragraphs,
        ),
    ),
    Instruction(
        "length_constraints:number_words",
        "There are less than / at least so many runs of letters, digits and underscores.",
        number_of_words,
        (integer("num_words"), _RELATION),
        passes=case("one two", num_words=3, relation="less than"),
        fails=case("one two three", num_words=3, relation="less than"),
        quirks=(quirk("'it's' is two words", True, "it's it's", num_words=4, relation="at least"),),
        one_token="yes",
        fixed=Repair(
            "There are less than / at least so many words between spaces that hold a letter or a digit.",
            number_of_spaced_words,
        ),
    ),
    Instruction(
        "length_constraints:nth_paragraph_first_word",
        "Empty lines divide the text into so many paragraphs, and the n-th starts with the word.",
        nth_paragraph_first_word,
        (integer("num_paragraphs"), integer("nth_paragraph", minimum=1), text("first_word")),
        passes=case("One\n\n'Elm, he said", num_paragraphs=2, nth_paragraph=2, first_word="elm"),
        fails=case("Elm\n\nTwo", num_paragraphs=2, nth_paragraph=2, first_word="elm"),
        quirks=(
            quirk(
                "a blank paragraph is not counted and still moves the index",
                False,
                "\n\nOne\n\nElm",
                num_paragraphs=2,
                nth_paragraph=2,
                first_word="elm",
            ),
            quirk(
                "a word ends at an apostrophe",
                True,
                "One\n\nElm's",
                num_paragraphs=2,
                nth_paragraph=2,
                first_word="elm",
            ),
        ),
        hostile="\n\n",
        consistent=_nth_exists,
        fixed=Repair(
            "There are so many paragraphs that are not blank, and the n-th of them starts with the word.",
            nth_filled_paragraph_first_word,
        ),
    ),
    Instruction(
        "detectable_content:number_placeholders",
        "There are at least so many [placeholders], each inside a line.",
        number_of_placeholders,
        (integer("num_placeholders"),),
        passes=case("[name], [address]", num_placeholders=2),
        fails=case("[name], [address\n]", num_placeholders=2),
        quirks=(
            quirk("[] is one", True, "[][]", num_placeholders=2),
            quirk("nested brackets are one", False, "[a [b] c]", num_placeholders=2),
        ),
        hostile="[",
    ),
    Instruction(
        "detectable_content:postscript",
        "The postscript marker is found, in any case.",
        has_postscript,
        (text("postscript_marker"),),
        passes=case("Bye.\nP.S. Write!", postscript_marker="P.S."),
        fails=case("Bye.\nPS: Write!", postscript_marker="P.S."),
        quirks=(
            quirk("it is found anywhere, inside words too", True, "top.s. bottom", postscript_marker="P.S."),
            quirk("another marker than P.S. and P.P.S is a regular expression", True, "note", postscript_marker="N.T"),
            quirk(_NO_PATTERN.replace("keyword", "marker"), False, "(", postscript_marker="("),
        ),
        hostile="\n",
        fixed=Repair(
            "A line of the last paragraph starts with the marker, in any case, spaces and Markdown signs left out.",
            ends_with_postscript,
        ),
    ),
    Instruction(
        "detectable_format:number_bullet_lists",
        "Exactly so many lines start with a dash, or with one asterisk.",
        number_of_bullets,
        (integer("num_bullets"),),
        passes=case("* one\n- two", num_bullets=2),
        fails=case("** one\n+ two", num_bullets=2),
        quirks=(
            quirk("a negative number at the start of a line counts", True, "-5 degrees\n* two", num_bullets=2),
            quirk("a rule of dashes counts", False, "* one\n- two\n---", num_bullets=2),
            quirk("an asterisk at the end of a line takes the next line with it", False, "*\n* two", num_bullets=2),
        ),
        hostile="\n",
        fixed=Repair(
            "Exactly so many lines start with an asterisk or a dash and a space, and say something.",
            number_of_listed_bullets,
        ),
    ),
    Instruction(
        "detectable_format:constrained_response",
        "'My answer is yes.', 'My answer is no.' or 'My answer is maybe.' stands in the text.",
        has_option,
        passes=case("Well. My answer is yes."),
        fails=case("My answer is yes"),
        quirks=(quirk("several of them may stand there", True, "My answer is no. My answer is yes."),),
        fixed=Repair("Exactly one of the three answers stands in the text.", has_one_option),
    ),
    Instruction(
        "detectable_format:number_highlighted_sections",
        "There are at least so many *highlights*, each inside a line and not blank.",
        number_of_highlights,
        (integer("num_highlights"),),
        passes=case("*one* and *two*", num_highlights=2),
        fails=case("*one* and * *", num_highlights=2),
        quirks=(
            quirk("asterisks with spaces inside count", True, "2 * 3 * 4 + 5 * 6 * 7", num_highlights=2),
            quirk("***a highlight*** counts twice", True, "***one***", num_highlights=2),
        ),
        hostile="*",
        fixed=Repair(
            "There are at least so many *highlights* or **highlights** without spaces next to the asterisks.",
            number_of_marked_highlights,
        ),
    ),
    Instruction(
        "detectable_format:multiple_sections",
        "The section word with a number behind it occurs at least so many times.",
        number_of_sections,
        (text("section_spliter"), integer("num_sections")),
        passes=case("SECTION 1\nOne\nSECTION 2\nTwo", section_spliter="SECTION", num_sections=2),
        fails=case("SECTION 1\nOne", section_spliter="SECTION", num_sections=2),
        quirks=(
            quirk(
                "more than the number will do, though the text says exactly",
                True,
                "Part 1\na\nPart 2\nb\nPart 3\nc",
                section_spliter="Part",
                num_sections=2,
            ),
            quirk("case matters", False, "PART 1\na\nPART 2\nb", section_spliter="Part", num_sections=2),
            quirk(
                "Roman numerals do not count", False, "Part I\na\nPart II\nb", section_spliter="Part", num_sections=2
            ),
            quirk(
                "the word is a regular expression", True, "Pert 1\na\nPort 2\nb", section_spliter="P.rt", num_sections=2
            ),
            quirk("a mention counts", True, "Part 2 is like Part 1", section_spliter="Part", num_sections=2),
        ),
        hostile="1",
        fixed=Repair(
            "Exactly so many lines start with the section word and an Arabic or Roman number, in any case.",
            number_of_headed_sections,
        ),
    ),
    Instruction(
        "detectable_format:json_format",
        "The whole text is JSON, a Markdown fence left out of account.",
        is_json,
        passes=case('```json\n{"a": [1]}\n```'),
        fails=case('Here you go: {"a": [1]}'),
        quirks=(
            quirk("a number will do", True, "5"),
            quirk("NaN will do", True, "NaN"),
            quirk("text in quotation marks will do", True, '"x"'),
            quirk("nesting too deep for the parser fails", False, "[" * 100_000 + "]" * 100_000),
        ),
        hostile="[",
        one_token="5",
        fixed=Repair(
            "The whole text is a JSON object or array, a Markdown fence left out of account.", is_json_document
        ),
    ),
    Instruction(
        "detectable_format:title",
        "A line holds <<a title>> that is not blank.",
        has_title,
        passes=case("<<Joy>>\nText"),
        fails=case("<<Joy\n>>"),
        quirks=(quirk("one line's first << and last >> count", True, "a << b <<>> c >> d"),),
        hostile="<<",
    ),
    Instruction(
        "combination:two_responses",
        "****** divides the text into exactly two responses, which differ.",
        has_two_responses,
        passes=case("One.\n******\nTwo."),
        fails=case("One.\n******\nOne."),
        quirks=(
            quirk("a divider first or last is left out of account", True, "******\nOne.\n******\nTwo.\n******"),
            quirk("seven asterisks leave one to the second response", True, "One.\n*******\nOne."),
        ),
        hostile="******",
    ),
    Instruction(
        "combination:repeat_prompt",
        "The text starts with the request, in any case.",
        repeats_prompt,
        (text("prompt_to_repeat"),),
        passes=case("\nWrite a poem. Roses are red.", prompt_to_repeat="Write a poem."),
        fails=case("Sure! Write a poem. Roses are red.", prompt_to_repeat="Write a poem."),
        quirks=(quirk("an answer need not follow", True, "WRITE A POEM.", prompt_to_repeat="Write a poem."),),
    ),
    Instruction(
        "startend:end_checker",
        "The text ends with the phrase, in any case, quotation marks around the text left out of account.",
        ends_with,
        (text("end_phrase"),),
        passes=case('"Bye. Any other questions?"', end_phrase="Any other questions?"),
        fails=case("Any other questions? Bye.", end_phrase="Any other questions?"),
        quirks=(quirk("it may end in the middle of a word", True, "unable", end_phrase="able"),),
    ),
    Instruction(
        "startend:quotation",
        "The first and the last character are double quotation marks.",
        is_quoted,
        passes=case('"All of it."'),
        fails=case('"All" of it.'),
        quirks=(
            quirk("three quotation marks will do", True, '"""'),
            quirk("curly quotation marks fail", False, "“All of it.”"),
        ),
        one_token='""',
        fixed=Repair("Double quotation marks, straight or curly, stand around something.", is_wrapped_in_quotes),
    ),
    Instruction(
        "change_case:capital_word_frequency",
        "Less than / at least so many words are in capitals.",
        capital_word_frequency,
        (integer("capital_frequency"), Argument("capital_relation", "text", choices=RELATIONS)),
        needs=("words", "sentences"),
        passes=case("NO way, he said.", capital_frequency=2, capital_relation="less than"),
        fails=case("NO WAY, he said.", capital_frequency=2, capital_relation="less than"),
        quirks=(quirk("I and A count", True, "A man like I.", capital_frequency=2, capital_relation="at least"),),
        hostile="Word. ",
        one_token="yes",
    ),
    Instruction(
        "change_case:english_capital",
        "The text is English and in capitals.",
        is_english_in_capitals,
        needs=("language",),
        passes=case("THIS IS THE BEST OF ALL THE POSSIBLE WORLDS THAT WE HAVE EVER SEEN AND HEARD OF."),
        fails=case("This is the best of all the possible worlds that we have ever seen and heard of."),
        quirks=(
            quirk("English in capitals is often taken for German", False, "DEAR SIR, PLEASE FIND ATTACHED MY RESUME."),
        ),
        fixed=Repair("The text is in capitals, and English when read in small letters.", is_capital_english),
    ),
    Instruction(
        "change_case:english_lowercase",
        "The text is English and without capitals.",
        is_english_in_lowercase,
        needs=("language",),
        passes=case("this is the best of all the possible worlds that we have ever seen and heard of."),
        fails=case("das ist die beste aller welten, die wir je gesehen haben."),
        quirks=(quirk("what shows no language is English", True, "ª"),),
        one_token="the",
        fixed=Repair("The text is without capitals and shows English.", is_lowercase_english),
    ),
    Instruction(
        "punctuation:no_comma",
        "There is no comma.",
        lacks_comma,
        passes=case("No pause."),
        fails=case("Well, a pause."),
        quirks=(quirk("commas of other scripts are none", True, "一，二"),),
        one_token="yes",
        fixed=Repair("There is no comma of any script.", lacks_any_comma),
    ),
)
