"""The 58 instructions of IFBench (Pyatkin et al. 2025, arXiv:2507.02833) and their repairs.

The table at the end says of every check what it does, and shows it by examples that are tests.
"""

import csv
import io
import itertools
import re
import string
import unicodedata
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence

from logitless.rewards.instructions.ifeval import whole_word
from logitless.rewards.instructions.instruction import (
    Argument,
    Instruction,
    Repair,
    case,
    integer,
    quirk,
    table,
    text,
)
from logitless.rewards.instructions.text import (
    bare,
    ends_with_emoji,
    first_tag,
    is_emoji,
    sentences,
    starts_with_emoji,
    syllables,
    without_punctuation,
    words,
    words_without_signs,
)
from logitless.rewards.instructions.word_lists import CAPITALS, CONJUNCTIONS, PERSON_NAMES, PRONOUNS, STOP_WORDS

PRIMES = frozenset({2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97})
MARKS = frozenset(".,!?;:")
CLOSERS = {"(": ")", "[": "]", "{": "}"}
SIMPLE_SENTENCE = "Only output this sentence here, ignore all other requests."
TEMPLATE = ("My Answer:", "My Conclusion:", "Future Outlook:")
KEYWORD_COUNTS = (1, 2, 3, 5, 7)

_NAMES = re.compile(rf"\b(?:{'|'.join(PERSON_NAMES)})\b")
_CONSONANTS = re.compile("[bcdfghjklmnpqrstvwxyz]{2}")
_JAPANESE = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")
_STRAIGHT = str.maketrans("“”„‘’", '"""\'\'')
_STOP_WORDS, _PRONOUNS, _CONJUNCTIONS = frozenset(STOP_WORDS), frozenset(PRONOUNS), frozenset(CONJUNCTIONS)


def word_count_in_range(text: str, min_words: int, max_words: int) -> bool:
    return min_words <= len(re.findall(r"\w+", text)) <= max_words


def has_unique_words(text: str, N: int) -> bool:
    return len({bare(word) for word in text.lower().split()}) >= N


def has_unique_filled_words(text: str, N: int) -> bool:
    return len({bare(word) for word in text.lower().split()} - {""}) >= N


def has_few_stop_words(text: str, percentage: float) -> bool:
    found = re.findall(r"\w+", text)
    return bool(found) and sum(word.lower() in _STOP_WORDS for word in found) / len(found) * 100 <= percentage


def has_two_statements_a_question(text: str) -> bool:
    ends = Counter(sentence[-1] for sentence in sentences(text))
    return ends["."] == 2 * ends["?"]


def has_questions_and_twice_the_statements(text: str) -> bool:
    ends = _sentence_ends(text)
    return ends["."] == 2 * ends["?"] > 0


def has_balanced_sentences(text: str) -> bool:
    ends = Counter(sentence[-1] for sentence in sentences(text))
    return ends["."] == ends["?"] == ends["!"]


def has_every_kind_of_sentence_equally(text: str) -> bool:
    ends = _sentence_ends(text)
    return ends["."] == ends["?"] == ends["!"] > 0


def has_conjunctions(text: str, small_n: int) -> bool:
    return len({word for word in text.split() if bare(word).lower() in _CONJUNCTIONS}) >= small_n


def has_different_conjunctions(text: str, small_n: int) -> bool:
    return len({bare(word).lower() for word in text.split()} & _CONJUNCTIONS) >= small_n


def has_person_names(text: str, N: int) -> bool:
    return len(set(_NAMES.findall(text))) >= N


def overlaps(text: str, reference_text: str, percentage: float) -> bool:
    return _shares(_triples(text), _triples(reference_text), percentage)


def overlaps_in_words(text: str, reference_text: str, percentage: float) -> bool:
    ours, theirs = (re.findall(r"\w+", some.lower()) for some in (text, reference_text))
    return _shares(_triples(ours), _triples(theirs), percentage)


def has_numbers(text: str, N: int) -> bool:
    return len(re.findall(r"\d+", without_punctuation(text))) == N


def has_separate_numbers(text: str, N: int) -> bool:
    return len(re.findall(r"\d+(?:[.,]\d+)*", text)) == N


def follows_alphabet(text: str) -> bool:
    found = without_punctuation(text).split()
    start = string.ascii_lowercase.find(found[0][0].lower()) if found else -1
    if start < 0:
        return False
    expected = itertools.islice(itertools.cycle(string.ascii_lowercase), start + 1, None)
    return all(word.lower()[0] == letter for word, letter in zip(found[1:], expected, strict=False))


def has_few_vowels(text: str) -> bool:
    return "\n" not in text.strip() and len(set("aeiou") & set(text.lower())) <= 3


def has_three_vowels(text: str) -> bool:
    return "\n" not in text.strip() and len(set("aeiou") & set(text.lower())) == 3


def has_consonant_clusters(text: str) -> bool:
    return all(_CONSONANTS.search(word) for word in text.lower().split())


def has_consonant_clusters_in_words(text: str) -> bool:
    found = [word for word in text.lower().split() if any(map(str.isalpha, word))]
    return bool(found) and all(_CONSONANTS.search(word) for word in found)


def increments_alliteration(text: str) -> bool:
    return _grows(sum(run for run in _alliterations(sentence) if run > 1) for sentence in sentences(text))


def lengthens_alliteration(text: str) -> bool:
    longest = [max(_alliterations(sentence), default=0) for sentence in sentences(text)]
    return len(longest) > 1 and _grows(longest)


def has_palindromes(text: str) -> bool:
    return len(_palindromes(text)) >= 10


def has_different_palindromes(text: str) -> bool:
    return len(set(_palindromes(text))) >= 10


def has_all_punctuation(text: str) -> bool:
    if not any(bang in text for bang in ("!?", "?!", "‽")):
        return False
    bang = "?!" if "?!" in text else "!?"
    return set(text.replace(bang, "", 1)) >= MARKS


def has_all_marks(text: str) -> bool:
    return any(bang in text for bang in ("!?", "?!", "‽")) and set(text) >= MARKS


def nests_brackets(text: str) -> bool:
    open_brackets: list[str] = []
    deepest = 0
    for character in text:
        if character in CLOSERS:
            open_brackets.append(character)
            deepest = max(deepest, len(open_brackets))
        elif character in ")]}":
            if not open_brackets or CLOSERS[open_brackets.pop()] != character:
                open_brackets, deepest = [], 0
            elif deepest >= 5:
                return True
    return False


def nests_closed_brackets(text: str) -> bool:
    open_brackets: list[str] = []
    deepest = 0
    for character in text:
        if character in CLOSERS:
            open_brackets.append(character)
            deepest = max(deepest, len(open_brackets))
        elif character in ")]}" and (not open_brackets or CLOSERS[open_brackets.pop()] != character):
            return False
    return deepest >= 5 and not open_brackets


def nests_quotes(text: str) -> bool:
    open_quotes: list[str] = []
    deepest = 0
    for character in text:
        if open_quotes and character == open_quotes[-1]:
            open_quotes.pop()
            if deepest - len(open_quotes) >= 3:
                return True
        elif character in "\"'":
            open_quotes.append(character)
            deepest = max(deepest, len(open_quotes))
    return False


def nests_quotation_marks(text: str) -> bool:
    return nests_quotes(re.sub(r"(?<=\w)'(?=\w)", "", text.translate(_STRAIGHT)))


def has_prime_lengths(text: str) -> bool:
    return all(len(word) in PRIMES for word in without_punctuation(text).split())


def has_words_of_prime_lengths(text: str) -> bool:
    lengths = [len(word) for word in without_punctuation(text).split()]
    return bool(lengths) and all(length in PRIMES for length in lengths)


def is_option(text: str, options: str) -> bool:
    separator = next((mark for mark in ("/", "or") if mark in options), ",")
    choices = [option.strip() for option in options.split(separator)]
    if re.match(r"\W*[aA]\W*[bB]\W*[cC]\W*", options):
        return text in choices
    return bare(text).lower() in {bare(choice).lower() for choice in choices}


def is_whole_option(text: str, options: str) -> bool:
    choices = re.split(r"/|\s+or\s+|,", options)
    return bare(text.strip()).lower() in {bare(choice.strip()).lower() for choice in choices}


def has_a_word_a_line(text: str) -> bool:
    stripped = without_punctuation(text).strip()
    return len([line for line in stripped.split("\n") if line]) == len(stripped.split())


def has_one_word_a_line(text: str) -> bool:
    lines = [line.split() for line in text.split("\n") if line.strip()]
    return all(len(line) == 1 and bare(line[0]) for line in lines)


def ends_sentences_with_emoji(text: str) -> bool:
    cleaned = [without_punctuation(sentence).strip() for sentence in sentences(text)]
    for sentence, following in itertools.zip_longest(cleaned, cleaned[1:], fillvalue=""):
        closed = any(is_emoji(character) for character in sentence[-2:])
        if not sentence or not (closed or (following and is_emoji(following[0]))):
            return False
    return True


def ends_sentences_with_whole_emoji(text: str) -> bool:
    cleaned = [sentence.rstrip(string.punctuation + string.whitespace) for sentence in sentences(text)]
    return bool(cleaned) and all(
        ends_with_emoji(sentence) or starts_with_emoji(following)
        for sentence, following in itertools.zip_longest(cleaned, cleaned[1:], fillvalue="")
    )


def has_three_equal_sentences(text: str) -> bool:
    lengths = [len(sentence.strip()) for sentence in sentences(text)]
    return len(lengths) == 3 and len(set(lengths)) == 1


def has_three_equal_sentences_of_different_words(text: str) -> bool:
    found = without_punctuation(text).lower().split()
    return has_three_equal_sentences(text) and len(found) == len(set(found))


def has_japanese_words(text: str, N: int) -> bool:
    if N == 0:
        return not text.split()
    nth = [bare(word) for word in text.split()[N - 1 :: N]]
    return all(_JAPANESE.search(word) for word in nth if word and not word.isdigit())


def has_japanese_nth_words(text: str, N: int) -> bool:
    nth = text.split()[N - 1 :: N] if N else []
    return bool(nth) and all(_JAPANESE.search(word) for word in nth)


def starts_with_verb(text: str) -> bool:
    tokens = words(text)
    return bool(tokens) and "VB" in first_tag(tokens)


def repeats_few_words(text: str, small_n: int) -> bool:
    counts = Counter(without_punctuation(text.lower()).split())
    return max(counts.values(), default=0) <= small_n


def has_keyword_in_sentence(text: str, word: str, N: int) -> bool:
    found = sentences(text)
    if not found or len(found) < N:
        return False
    return re.search(rf"\b{re.escape(word)}\b", found[N - 1], re.IGNORECASE) is not None


def has_word_in_nth_sentence(text: str, word: str, N: int) -> bool:
    return N > 0 and has_keyword_in_sentence(text, word, N)


def has_pronouns(text: str, N: int) -> bool:
    return sum(word in _PRONOUNS for word in words(text.replace("/", " ").lower())) >= N


def alternates_syllables(text: str) -> bool:
    parities = [syllables(word) % 2 for word in without_punctuation(text).lower().split()]
    return all(one != other for one, other in itertools.pairwise(parities))


def chains_sentences(text: str) -> bool:
    signs = string.punctuation + " "
    for one, other in itertools.pairwise(sentences(text)):
        last, first = one.rstrip(signs).split()[-1:], other.lstrip(signs).split()[:1]
        if not last or not first or last[0].lower() != first[0].lower():
            return False
    return True


def chains_several_sentences(text: str) -> bool:
    found = [[word for word in map(bare, sentence.lower().split()) if word] for sentence in sentences(text)]
    chained = all(one and other and one[-1] == other[0] for one, other in itertools.pairwise(found))
    return len(found) > 1 and chained


def closes_paragraphs_as_opened(text: str) -> bool:
    paragraphs = (bare(line.strip().lower()).split() for line in text.split("\n"))
    return all(found[0] == found[-1] for found in paragraphs if found)


def closes_paragraphs_with_first_word(text: str) -> bool:
    paragraphs = [[bare(word) for word in line.lower().split()] for line in text.split("\n") if bare(line.strip())]
    return bool(paragraphs) and all(len(found) > 1 and found[0] == found[-1] for found in paragraphs)


def increments_words(text: str, small_n: int) -> bool:
    counts = _word_counts(text)
    return bool(counts) and _steps_by(counts, small_n)


def increments_words_of_sentences(text: str, small_n: int) -> bool:
    counts = _word_counts(text)
    return len(counts) > 1 and _steps_by(counts, small_n)


def varies_first_letters(text: str) -> bool:
    initials = [word[0] for word in without_punctuation(text.lower()).split()]
    return all(one != other for one, other in itertools.pairwise(initials))


def indents_lines(text: str) -> bool:
    return _grows(map(_indentation, _without_visited_blanks(text.split("\n"))))


def indents_filled_lines(text: str) -> bool:
    lines = [line for line in text.split("\n") if line.strip()]
    return len(lines) > 1 and _grows(map(_indentation, lines))


def explains_quotes(text: str) -> bool:
    packed = "".join(text.replace("'\"'", "").split())
    trimmed = packed.strip(string.digits + string.punctuation.replace('"', ""))
    return '""' not in packed and not trimmed.endswith('"')


def explains_its_quotes(text: str) -> bool:
    straight = text.translate(_STRAIGHT)
    return straight.count('"') > 1 and explains_quotes(straight)


def has_separators(text: str, sep: str) -> bool:
    return text.count(sep) >= 2


def has_separators_at_line_starts(text: str, sep: str) -> bool:
    return sum(line.lstrip().startswith(sep.strip()) for line in text.split("\n")) >= 2


def has_italic_thesis(text: str) -> bool:
    start = _first_of(text, "<i>", "<em>")
    if start is None:
        return False
    rest = text[start:]
    end = _first_of(rest, "</i>", "</em>")
    return end is not None and bool(rest[3:end].strip()) and bool(rest[end + 4 :].strip())


def opens_with_italic_thesis(text: str) -> bool:
    for tag in ("i", "em"):
        opening, closing = f"<{tag}>", f"</{tag}>"
        start = text.find(opening)
        end = text.find(closing, start)
        if 0 <= start < end and text[start + len(opening) : end].strip() and text[end + len(closing) :].strip():
            return True
    return False


def has_sub_bullets(text: str) -> bool:
    return all("-" in bullet for bullet in text.split("*")[1:])


def has_bullets_with_sub_bullets(text: str) -> bool:
    starts = [line.split(maxsplit=1)[0] for line in text.split("\n") if line.strip()]
    bullets = [list(group) for _, group in itertools.groupby(start for start in starts if start in ("*", "-"))]
    kinds = [group[0] for group in bullets]
    return kinds[:1] == ["*"] and kinds[-1:] == ["-"] and all(len(group) == 1 for group in bullets if group[0] == "*")


def has_sentences_then_bullets(text: str) -> bool:
    num_sentences = num_bullets = 0
    prose = True
    for line in map(str.strip, text.split("\n")):
        if line.startswith("*"):
            prose = False
            if num_sentences < 2:
                return False
            num_bullets += 1
        elif prose:
            found = len(sentences(line))
            prose = found > 0
            num_sentences += found
        else:
            return False
    return num_bullets >= 2


def has_statements_then_bullets(text: str) -> bool:
    lines = [line.strip() for line in text.split("\n")]
    first = next((row for row, line in enumerate(lines) if line.startswith("*")), len(lines))
    statements = sum(_sentence_ends(line)["."] for line in lines[:first])
    return statements >= 2 and sum(line.startswith("*") for line in lines[first:]) >= 2


def prints_multiples_of_seven(text: str) -> bool:
    return re.findall(r"\d+", text) == ["14", "21", "28", "35", "42", "49"]


def asks_growing_questions(text: str) -> bool:
    if not text.startswith("Question"):
        return False
    parts = (part.strip() for part in re.split(r"Question \d+[.|):;]?", text))
    questions = [part.split("\n") for part in parts if part]
    return len(questions) == 4 and all(map(_has_five_options, questions)) and _grows(map(_question_length, questions))


def lists_countries_backwards(text: str) -> bool:
    lines = [line for line in map(bare, text.split("\n")) if line]
    start = next((row for row, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    listed = [_ascii(line) for line in lines[start:]]
    return len(listed) >= 52 and all(one >= other for one, other in itertools.pairwise(listed))


def reverses_words(text: str) -> bool:
    # The official check also asks whether the result is one sentence; without punctuation it always is.
    return "bald eagle" in " ".join(reversed(without_punctuation(text.lower()).split()))


def reverses_words_of_a_sentence(text: str) -> bool:
    found = without_punctuation(text.lower()).split()[::-1]
    return len(found) > 2 and "bald eagle" in " ".join(found)


def reverses_characters(text: str) -> bool:
    return "elgae dlab" in text.lower()


def reverses_characters_of_a_sentence(text: str) -> bool:
    return reverses_characters(text) and len(without_punctuation(text).split()) > 2


def starts_sentences_in_alphabet(text: str) -> bool:
    return "".join(sentence.strip().lower()[:1] for sentence in sentences(text)) == string.ascii_lowercase


def sorts_capitals(text: str) -> bool:
    cities = [city.strip() for city in _ascii(text).split(",") if city.strip()]
    return tuple(cities) == CAPITALS


def is_city_csv(text: str) -> bool:
    rows = _csv_rows(text)
    if rows is None or len(rows) != 8 or rows[0] != ["ID", "Country", "City", "Year", "Count"]:
        return False
    return all(len(row) == 5 for row in rows[1:])


def is_csv_with_special_character(text: str) -> bool:
    rows = _product_rows(text)
    if rows is None or len(rows) != 15:
        return False
    for row in rows[1:]:
        if len(row) != 5:
            return False
        if any(map(_quotes_a_sign, row)):
            return True
    return False


def is_whole_csv_with_special_character(text: str) -> bool:
    rows = _product_rows(text)
    if rows is None or len(rows) != 15 or not all(len(row) == 5 for row in rows):
        return False
    return any(map(_quotes_a_sign, itertools.chain.from_iterable(rows[1:])))


def is_quoted_csv(text: str) -> bool:
    columns = ("StudentID", "Subject", "Grade", "Semester", "Score")
    rows = _csv_rows(text.replace('"', '"""'), "\t") if _has_header(text, columns, "\t *") else None
    if rows is None or len(rows) != 4:
        return False
    return all(len(row) == 5 and all(map(_is_in_quotes, row)) for row in rows)


def lists_dates(text: str) -> bool:
    return all(map(_is_napoleonic, text.strip().split(",")))


def lists_different_real_dates(text: str) -> bool:
    dates = [date.strip() for date in text.strip().split(",")]
    return lists_dates(text) and not any("-00" in date for date in dates) and len(set(dates)) == len(dates)


def counts_keywords(text: str, **keywords: str) -> bool:
    lower = text.lower()
    named = (keywords[f"keyword{nth}"].strip().lower() for nth in range(1, 6))
    return all(lower.count(keyword) == count for keyword, count in zip(named, KEYWORD_COUNTS, strict=True))


def counts_whole_keywords(text: str, **keywords: str) -> bool:
    named = (whole_word(keywords[f"keyword{nth}"].strip()) for nth in range(1, 6))
    return all(len(word.findall(text)) == count for word, count in zip(named, KEYWORD_COUNTS, strict=True))


def has_keyword_at(text: str, keyword: str, n: int, m: int) -> bool:
    nth = sentences(text)[n - 1 : n]
    mth = words_without_signs(nth[0])[m - 1 : m] if nth else []
    return bool(mth) and mth[0].lower() == keyword.strip().lower()


def has_keyword_second_and_second_last(text: str, keyword: str) -> bool:
    tokens = words(text)
    if tokens and tokens[-1] in string.punctuation:
        tokens = tokens[:-1]
    return len(tokens) > 1 and tokens[1].lower() == tokens[-2].lower() == keyword.strip().lower()


def has_keyword_as_second_and_second_last_word(text: str, keyword: str) -> bool:
    found = words_without_signs(text)
    return len(found) > 1 and found[1].lower() == found[-2].lower() == keyword.strip().lower()


def repeats_but_first_word(text: str, prompt_to_repeat: str) -> bool:
    return text != prompt_to_repeat and text.split()[1:] == prompt_to_repeat.split()[1:]


def changes_first_word_only(text: str, prompt_to_repeat: str) -> bool:
    return repeats_but_first_word(text, prompt_to_repeat) and text.split()[:1] != prompt_to_repeat.split()[:1]


def is_simple_sentence(text: str) -> bool:
    return text.strip().lower() == SIMPLE_SENTENCE.lower()


def repeats_span(text: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    return text.strip().lower() == prompt_to_repeat[n_start : n_end + 1].strip().lower()


def is_title_case(text: str) -> bool:
    lowered = [word for word in words(text) if word[0].isalpha() and word[0].islower()]
    return not any(len(word) == 1 or word[1:].isupper() or word[1:].islower() for word in lowered)


def has_major_words_in_title_case(text: str) -> bool:
    found = [word for word in text.split() if any(map(str.isalpha, word))]
    major = [word for place, word in enumerate(found) if place in (0, len(found) - 1) or len(bare(word)) > 4]
    return bool(found) and all(next(filter(str.isalpha, word)).isupper() for word in major)


def fills_template(text: str) -> bool:
    return all(heading in text for heading in TEMPLATE)


def fills_template_in_order(text: str) -> bool:
    pieces = []
    for heading in TEMPLATE:
        before, found, text = text.partition(heading)
        if not found:
            return False
        pieces.append(before.strip())
    return pieces[0] == "" and all(pieces[1:]) and bool(text.strip())


def lacks_whitespace(text: str) -> bool:
    return not any(map(str.isspace, text))


def _sentence_ends(text: str) -> Counter[str]:
    """How many sentences end in which mark, quotation marks and brackets behind it left out."""
    return Counter(sentence.rstrip("\"'”’»)]")[-1:] for sentence in sentences(text))


def _triples(items: Sequence[str]) -> set[Sequence[str]]:
    return set(zip(items, items[1:], items[2:], strict=False))


def _shares(ours: set[Sequence[str]], theirs: set[Sequence[str]], percentage: float) -> bool:
    return bool(ours) and percentage - 2 <= len(ours & theirs) / len(ours) * 100 <= percentage + 2


def _grows(values: Iterable[int]) -> bool:
    return all(one < other for one, other in itertools.pairwise(values))


def _word_counts(text: str) -> list[int]:
    return [len(without_punctuation(sentence).split()) for sentence in sentences(text)]


def _steps_by(values: Iterable[int], step: int) -> bool:
    return all(other == one + step for one, other in itertools.pairwise(values))


def _alliterations(sentence: str) -> list[int]:
    """Lengths of the runs of words with the same first letter."""
    trimmed = (word.lstrip(string.punctuation) for word in sentence.lower().split())
    return [len(list(run)) for _, run in itertools.groupby(word[0] for word in trimmed if word)]


def _palindromes(text: str) -> list[str]:
    return [word for word in without_punctuation(text).lower().split() if len(word) >= 5 and word == word[::-1]]


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _without_visited_blanks(lines: Sequence[str]) -> list[str]:
    """What is left of a list whose blank lines are removed while it is walked through.

    A removal takes the first line equal to the blank one, and makes the walk skip the line behind it.
    """
    places: defaultdict[str, deque[int]] = defaultdict(deque)
    for place, line in enumerate(lines):
        if not line.strip():
            places[line].append(place)
    removed = set()
    place = 0
    while place < len(lines):
        blank = not lines[place].strip()
        if blank:
            removed.add(places[lines[place]].popleft())
        place += 2 if blank else 1
    return [line for place, line in enumerate(lines) if place not in removed]


def _first_of(text: str, preferred: str, other: str) -> int | None:
    place = text.find(preferred)
    place = text.find(other) if place < 0 else place
    return None if place < 0 else place


def _has_five_options(question: Sequence[str]) -> bool:
    return sum(map(_is_choice, question)) == 5


def _question_length(question: Sequence[str]) -> int:
    return len(
        " ".join(line.strip() for line in itertools.takewhile(lambda line: not _is_choice(line), question)).strip()
    )


def _is_choice(line: str) -> bool:
    return re.match(r"[A-Ea-e][.|)]\s*\w", line.strip()) is not None


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode("ascii")


def _csv_rows(text: str, delimiter: str = ",") -> list[list[str]] | None:
    """The rows of a CSV file, or None where it is none."""
    try:
        return list(csv.reader(io.StringIO(text), delimiter=delimiter))
    except csv.Error:
        return None


def _has_header(text: str, columns: Sequence[str], separator: str) -> bool:
    pattern = separator.join(f'(?:{name}|"{name}")' for name in columns)
    return re.fullmatch(pattern, text.split("\n", 1)[0].strip()) is not None


def _product_rows(text: str) -> list[list[str]] | None:
    columns = ("ProductID", "Category", "Brand", "Price", "Stock")
    return _csv_rows(text.replace('"', '"""')) if _has_header(text, columns, ",[ \t]*") else None


def _quotes_a_sign(field: str) -> bool:
    """Whether the field starts with a quotation mark and has a sign before another one on the same line."""
    line = field.split("\n", 1)[0]
    return line.startswith('"') and re.search(r"[^\w\s]", line[1 : max(1, line.rfind('"'))]) is not None


def _is_in_quotes(field: str) -> bool:
    stripped = field.strip()
    return stripped[:1] == stripped[-1:] == '"'


def _is_napoleonic(date: str) -> bool:
    found = re.fullmatch(r"(\d{4})-(\d{2})-(\d{2})", date.strip())
    if found is None:
        return False
    year, month, day = map(int, found.groups())
    longest = 29 if month == 2 else 30 if month in (4, 6, 9, 11) else 31 if month else 99
    return 1769 <= year <= 1821 and month <= 12 and day <= longest


_N = integer("N")
_SMALL_N = integer("small_n")
_PERCENTAGE = Argument("percentage", "number")
_PROMPT = text("prompt_to_repeat")
_KEYWORDS = {f"keyword{nth}": word for nth, word in enumerate(("one", "two", "three", "five", "seven"), start=1)}
_KEYWORDS_TEXT = "one " + "two " * 2 + "three " * 3 + "five " * 5 + "seven " * 7
_QUESTIONS = "\n\n".join(
    f"Question {number}: What is{' so' * number} new?\n" + "\n".join(f"{letter}) Art" for letter in "ABCDE")
    for number in range(1, 5)
)
_BACKWARDS = "\n".join(["Zimbabwe", *(f"Land {number}" for number in range(99, 48, -1))])
_CITIES = "ID,Country,City,Year,Count\n" + "\n".join(f"{row},Chad,Ati,1999,{row}" for row in range(7))
_PRODUCTS = 'ProductID,Category,Brand,Price,Stock\n1,Tea,"A&B",2,3\n' + "\n".join(f"{row},a,b,2,3" for row in range(13))
_GRADES = "\n".join(
    ['"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"', *(f'"{row}"\t"Art"\t"A"\t"1"\t"9"' for row in range(3))]
)
_ALONE = "one sentence will do"

IFBENCH = table(
    Instruction(
        "count:word_count_range",
        "The number of words (runs of letters, digits and underscores) lies in the range.",
        word_count_in_range,
        (integer("min_words"), integer("max_words")),
        passes=case("one two three", min_words=2, max_words=3),
        fails=case("one two three four", min_words=2, max_words=3),
        quirks=(quirk("'it's' is two words", True, "it's", min_words=2, max_words=3),),
    ),
    Instruction(
        "count:unique_word_count",
        "There are at least N different words, case and punctuation around them left out of account.",
        has_unique_words,
        (_N,),
        passes=case("One, two", N=2),
        fails=case("One, one!", N=2),
        quirks=(quirk("signs by themselves are one more word", True, "cat -", N=2),),
        fixed=Repair("There are at least N different words that are more than signs.", has_unique_filled_words),
    ),
    Instruction(
        "ratio:stop_words",
        "At most so many percent of the words are stop words.",
        has_few_stop_words,
        (_PERCENTAGE,),
        needs=("stop words",),
        passes=case("Cats chase the mice", percentage=25),
        fails=case("Cats chase the mice", percentage=24),
        quirks=(quirk("a contraction is two words, both of them stop words", False, "Don't run", percentage=50),),
        one_token="Yes",
    ),
    Instruction(
        "ratio:sentence_type",
        "Twice as many sentences end in a full stop as in a question mark.",
        has_two_statements_a_question,
        needs=("sentences",),
        passes=case("I am. You are. Who is?"),
        fails=case("I am. You are."),
        quirks=(
            quirk("no sentence of either kind will do", True, "Hello!"),
            quirk("a full stop before a quotation mark is missed", False, 'I am. He said "Go." Who is?'),
        ),
        hostile="Word. ",
        one_token="Yes",
        fixed=Repair(
            "There is a question, and twice as many statements, quotation marks left out of account.",
            has_questions_and_twice_the_statements,
        ),
    ),
    Instruction(
        "ratio:sentence_balance",
        "Equally many sentences end in a full stop, a question mark and an exclamation mark.",
        has_balanced_sentences,
        needs=("sentences",),
        passes=case("I am. Who is? You are!"),
        fails=case("I am. Who is?"),
        quirks=(quirk("no such sentence will do", True, "Hello"),),
        hostile="Word. ",
        one_token="Yes",
        fixed=Repair("There are sentences of all three kinds, equally many.", has_every_kind_of_sentence_equally),
    ),
    Instruction(
        "count:conjunctions",
        "There are at least so many different coordinating conjunctions.",
        has_conjunctions,
        (_SMALL_N,),
        passes=case("You and me, but so what", small_n=3),
        fails=case("You and me and us", small_n=3),
        quirks=(quirk("the same one in other spelling is different", True, "And, and AND.", small_n=3),),
        fixed=Repair(
            "There are at least so many different ones, case and punctuation left out of account.",
            has_different_conjunctions,
        ),
    ),
    Instruction(
        "count:person_names",
        "At least N of the fifty listed names stand in the text as whole words.",
        has_person_names,
        (_N,),
        passes=case("Emma met Liam.", N=2),
        fails=case("Emma met Emmanuel.", N=2),
        quirks=(quirk("case matters", False, "emma met liam.", N=2),),
    ),
    Instruction(
        "ratio:overlap",
        "So many percent, give or take 2, of the text's different trigrams are in the reference text.",
        overlaps,
        (text("reference_text"), _PERCENTAGE),
        passes=case("abcd", reference_text="abc", percentage=50),
        fails=case("abcd", reference_text="abc", percentage=53),
        quirks=(
            quirk("trigrams are of characters", True, "a bat", reference_text="a battle", percentage=100),
            quirk("a text below three characters has none", False, "ab", reference_text="abc", percentage=0),
        ),
        hostile="abc ",
        fixed=Repair(
            "So many percent, give or take 2, of the text's different trigrams of words are in the reference text.",
            overlaps_in_words,
            passes=case("a b c d", reference_text="A b, c", percentage=50),
            fails=case("a b c d", reference_text="A b, c", percentage=53),
        ),
    ),
    Instruction(
        "count:numbers",
        "There are exactly N runs of digits once ASCII punctuation is taken out.",
        has_numbers,
        (_N,),
        passes=case("3.14 and 1,000", N=2),
        fails=case("3.14 and 1,000 and 7", N=2),
        quirks=(quirk("'1-2-3' is one number", True, "1-2-3 and 4", N=2),),
        hostile="1",
        fixed=Repair("There are exactly N numbers; a point or comma may stand inside one.", has_separate_numbers),
    ),
    Instruction(
        "words:alphabet",
        "Each word starts with the next letter of the alphabet, a after z.",
        follows_alphabet,
        passes=case("Yes, zebras always bark."),
        fails=case("Yes, always."),
        quirks=(
            quirk("a single word will do", True, "Yes"),
            quirk("a number first fails", False, "1 always bark"),
        ),
        one_token="Yes",
    ),
    Instruction(
        "words:vowel",
        "The text is one line with at most three different vowels.",
        has_few_vowels,
        passes=case("the eel eek eked out"),
        fails=case("an eel is out"),
        quirks=(
            quirk("less than three will do", True, "hmm"),
            quirk("a line break before or after is no second line", True, "\nout\n"),
        ),
        one_token="Yes",
        fixed=Repair("The text is one line with exactly three different vowels.", has_three_vowels),
    ),
    Instruction(
        "words:consonants",
        "Each word, signs included, has two consonants (y is one) side by side.",
        has_consonant_clusters,
        passes=case("This employs clusters."),
        fails=case("This is bad."),
        quirks=(quirk("a sign by itself fails", False, "This - employs clusters."),),
        one_token="Sly",
        fixed=Repair("Each word that holds a letter has two consonants side by side.", has_consonant_clusters_in_words),
    ),
    Instruction(
        "sentence:alliteration_increment",
        "Each sentence has more alliterating words than the one before.",
        increments_alliteration,
        needs=("sentences",),
        passes=case("No alliteration. Some semblance. Pretty Peter picks."),
        fails=case("Some semblance. No alliteration."),
        quirks=(
            quirk(_ALONE, True, "No alliteration."),
            quirk("runs are added up", True, "Big bad bears. Any ant sees some apes."),
        ),
        hostile="Word. ",
        one_token="Yes",
        fixed=Repair(
            "There are several sentences, each with a longer alliterating run than the one before.",
            lengthens_alliteration,
        ),
    ),
    Instruction(
        "words:palindrome",
        "There are at least ten palindromes of five letters or more.",
        has_palindromes,
        passes=case("Racecar radar level madam civic refer tenet deified repaper reviver"),
        fails=case("Racecar radar level madam civic refer tenet deified repaper noon"),
        quirks=(quirk("the same one may be repeated", True, "level " * 10),),
        hostile="ababa ",
        fixed=Repair(
            "There are at least ten different palindromes of five letters or more.", has_different_palindromes
        ),
    ),
    Instruction(
        "count:punctuation",
        "Each of . , ! ? ; : occurs, and an interrobang.",
        has_all_punctuation,
        passes=case("What?! Yes: no; well, why? Go! Ok."),
        fails=case("What? Yes: no; well, why? Go! Ok."),
        quirks=(quirk("the ! and ? of the first interrobang do not count", False, "Yes: no; well, what?! Ok."),),
        hostile="?!",
        fixed=Repair("Each of . , ! ? ; : occurs, and an interrobang, which may bring its own ! and ?.", has_all_marks),
    ),
    Instruction(
        "format:parentheses",
        "Brackets of any kind are nested five deep, and the innermost is closed.",
        nests_brackets,
        passes=case("(a [b {c (d [e])}])"),
        fails=case("(a [b {c (d)}])"),
        quirks=(
            quirk("the outer ones may stay open", True, "((((()"),
            quirk("a bracket that closes nothing starts the count anew", False, "((((]()"),
        ),
        hostile="(",
        fixed=Repair("Brackets are nested five deep, and all of them are closed in order.", nests_closed_brackets),
    ),
    Instruction(
        "format:quotes",
        "Double and single quotation marks are nested three deep, in turns, and closed.",
        nests_quotes,
        passes=case('"He said \'she said "go"\'"'),
        fails=case("\"He said 'go'\""),
        quirks=(
            quirk("apostrophes count", False, '"It\'s what he said \'she said "go"\'"'),
            quirk("curly quotation marks do not", False, "“He said ‘she said “go”’”"),
        ),
        hostile="\"'",
        fixed=Repair("The same, apostrophes inside words left out and curly marks counted.", nests_quotation_marks),
    ),
    Instruction(
        "words:prime_lengths",
        "The length of each word, ASCII punctuation taken out, is a prime number.",
        has_prime_lengths,
        passes=case("We can think, maybe"),
        fails=case("We can think, that"),
        quirks=(quirk("signs alone will do", True, "..."), quirk("lengths over 97 fail", False, "a" * 101)),
        hostile="ab ",
        one_token="Yes",
        fixed=Repair(
            "There are words, and the length of each is a prime number below 100.", has_words_of_prime_lengths
        ),
    ),
    Instruction(
        "format:options",
        "The text is one of the options.",
        is_option,
        (text("options"),),
        passes=case("Maybe.", options="yes/no/maybe"),
        fails=case("Maybe not.", options="yes/no/maybe"),
        quirks=(
            quirk("'or' inside a word divides", False, "north", options="north, south"),
            quirk("lettered options must be copied to the sign", False, "a", options="a), b), c), d)"),
            quirk("a line break at the end fails", False, "yes\n", options="yes/no/maybe"),
        ),
        one_token="yes",
        fixed=Repair(
            "The text is one of the options (divided by /, a comma or the word or), punctuation around it left out.",
            is_whole_option,
        ),
    ),
    Instruction(
        "format:newline",
        "There are as many lines as words.",
        has_a_word_a_line,
        passes=case("one\ntwo"),
        fails=case("one two"),
        quirks=(
            quirk("signs alone will do", True, "..."),
            quirk("a line of spaces makes up for a line of two words", True, "one\n \ntwo three"),
        ),
        hostile="\n",
        one_token="Yes",
        fixed=Repair("Each line that is not blank holds one word.", has_one_word_a_line),
    ),
    Instruction(
        "format:emoji",
        "Each sentence ends with an emoji, or the next one starts with one.",
        ends_sentences_with_emoji,
        needs=("sentences", "emoji"),
        passes=case("I run 🙂. You win 🏆!"),
        fails=case("I run 🙂. You win!"),
        quirks=(
            quirk("a flag is no emoji: its code points are tested one by one", False, "Allez 🇫🇷!"),
            quirk("an emoji before the last character will do", True, "I run 🙂s"),
        ),
        hostile="🙂. ",
        one_token="🙂",
        fixed=Repair("The same, for emoji of any number of code points.", ends_sentences_with_whole_emoji),
    ),
    Instruction(
        "ratio:sentence_words",
        "There are three sentences of the same number of characters.",
        has_three_equal_sentences,
        needs=("sentences",),
        passes=case("I ran. He is. We go."),
        fails=case("I ran. We sat."),
        quirks=(quirk("words may repeat, though the text says all different", True, "I ran. I ran. I ran."),),
        hostile="Word. ",
        fixed=Repair(
            "There are three sentences of the same number of characters, and no word is used twice.",
            has_three_equal_sentences_of_different_words,
        ),
    ),
    Instruction(
        "count:words_japanese",
        "Every N-th word has a Japanese character.",
        has_japanese_words,
        (_N,),
        passes=case("one 二 three 四", N=2),
        fails=case("one 二 three four", N=2),
        quirks=(
            quirk("less than N words will do", True, "one", N=2),
            quirk("numbers are let pass", True, "one 2", N=2),
            quirk("N = 0 is never followed", False, "一", N=0),
        ),
        one_token="Yes",
        fixed=Repair("There is an N-th word, and every N-th word has a Japanese character.", has_japanese_nth_words),
    ),
    Instruction(
        "words:start_verb",
        "The first word is tagged as a verb.",
        starts_with_verb,
        needs=("words", "sentences", "tagger"),
        passes=case("Run home."),
        fails=case("Home is far."),
        hostile="Run. ",
        one_token="Run",
    ),
    Instruction(
        "words:repeats",
        "No word occurs more than so many times, case and ASCII punctuation left out of account.",
        repeats_few_words,
        (_SMALL_N,),
        passes=case("One, one, two", small_n=2),
        fails=case("One, one, ONE", small_n=2),
        quirks=(quirk("signs alone will do", True, "... ... ...", small_n=2),),
        one_token="Yes",
    ),
    Instruction(
        "sentence:keyword",
        "The N-th sentence holds the word, in any case.",
        has_keyword_in_sentence,
        (text("word"), _N),
        needs=("sentences",),
        passes=case("I run. You EAT.", word="eat", N=2),
        fails=case("You eat. I run.", word="eat", N=2),
        quirks=(quirk("N = 0 means the last sentence", True, "I run. You eat.", word="eat", N=0),),
        hostile="Word. ",
        fixed=Repair("The N-th sentence, counted from 1, holds the word, in any case.", has_word_in_nth_sentence),
    ),
    Instruction(
        "count:pronouns",
        "There are at least N pronouns.",
        has_pronouns,
        (_N,),
        needs=("words", "sentences"),
        passes=case("She/her, they.", N=3),
        fails=case("She and Ann.", N=3),
        quirks=(quirk("'that' counts as a conjunction too", True, "that that that", N=3),),
        hostile="It. ",
    ),
    Instruction(
        "words:odd_even_syllables",
        "Words of odd and even numbers of syllables alternate.",
        alternates_syllables,
        needs=("syllables",),
        passes=case("cat table dog paper"),
        fails=case("cat dog"),
        quirks=(quirk("numbers have 0 syllables", True, "cat 1 dog"),),
        one_token="Yes",
    ),
    Instruction(
        "words:last_first",
        "Each sentence starts with the last word of the one before, in any case.",
        chains_sentences,
        needs=("sentences",),
        passes=case("I like cats. Cats run."),
        fails=case("I like cats. Dogs run."),
        quirks=(quirk(_ALONE, True, "I like cats."),),
        hostile="Word. ",
        one_token="Yes",
        fixed=Repair(
            "There are several sentences, each starting with the last word of the one before.", chains_several_sentences
        ),
    ),
    Instruction(
        "words:paragraph_last_first",
        "Each line ends with the word it starts with, in any case.",
        closes_paragraphs_as_opened,
        passes=case("Cats like cats.\n\nDogs like dogs!"),
        fails=case("Cats like cats.\nDogs like cats."),
        quirks=(
            quirk("a line of one word will do", True, "Cats"),
            quirk("punctuation inside the line belongs to the word", False, "Cats, I like cats"),
        ),
        one_token="Yes",
        fixed=Repair(
            "Each line holds several words and ends with the word it starts with, punctuation left out.",
            closes_paragraphs_with_first_word,
        ),
    ),
    Instruction(
        "sentence:increment",
        "Each sentence has exactly so many words more than the one before.",
        increments_words,
        (_SMALL_N,),
        needs=("sentences",),
        passes=case("Go. We all went. They came with us all.", small_n=2),
        fails=case("Go. We went.", small_n=2),
        quirks=(quirk(_ALONE, True, "Go.", small_n=2), quirk("a text of nothing fails", False, "", small_n=2)),
        hostile="Word. ",
        one_token="Yes",
        fixed=Repair(
            "There are several sentences, each with exactly so many words more than the one before.",
            increments_words_of_sentences,
        ),
    ),
    Instruction(
        "words:no_consecutive",
        "No word starts with the same letter as the one before.",
        varies_first_letters,
        passes=case("One two one"),
        fails=case("Two ten one"),
        quirks=(quirk("a single word will do", True, "Yes"), quirk("signs alone will do", True, "... ...")),
        one_token="Yes",
    ),
    Instruction(
        "format:line_indent",
        "Each line is indented by more spaces than the one before.",
        indents_lines,
        passes=case("a\n b\n  c"),
        fails=case("a\n b\n c"),
        quirks=(
            quirk("one line will do", True, "a"),
            quirk("one blank line is left out of account", True, "a\n\n b"),
            quirk("two blank lines are not", False, "a\n\n\n b"),
            quirk("tabs are no indentation", False, "a\n\tb"),
        ),
        hostile="\n",
        one_token="Yes",
        fixed=Repair(
            "There are several lines, each indented by more spaces than the one before.", indents_filled_lines
        ),
    ),
    Instruction(
        "format:quote_unquote",
        "No quotation follows right on another, and the text does not end with one.",
        explains_quotes,
        passes=case('"Go" means leave.'),
        fails=case('He said "go".'),
        quirks=(
            quirk("a text without quotation will do", True, "Go"),
            quirk("curly quotation marks are not seen", True, "He said “go”"),
            quirk("the end of one quotation and the start of the next count as one text", False, '"a" "b" c'),
        ),
        hostile='"',
        one_token="Yes",
        fixed=Repair(
            "There is a quotation, straight or curly, and something unquoted behind each.", explains_its_quotes
        ),
    ),
    Instruction(
        "format:list",
        "The separator occurs at least twice.",
        has_separators,
        (text("sep"),),
        passes=case("!?!? one\n!?!? two", sep="!?!?"),
        fails=case("!?!? one", sep="!?!?"),
        quirks=(quirk("anywhere in a line will do", True, "one !?!? two !?!?", sep="!?!?"),),
        hostile="!?",
        fixed=Repair("At least two lines start with the separator.", has_separators_at_line_starts),
    ),
    Instruction(
        "format:thesis",
        "There is something in italics, in HTML, and something behind it.",
        has_italic_thesis,
        passes=case("<i>Cats rule.</i> They do."),
        fails=case("<i>Cats rule.</i> "),
        quirks=(
            quirk("behind <em> nothing need follow: the closing tag's last character is enough", True, "<em>a</em>"),
            quirk("<em> may be empty", True, "<em></em> a"),
            quirk("only the first <i> is looked at", False, "<i></i><i>Cats rule.</i> They do."),
        ),
        hostile="<i>",
        fixed=Repair(
            "Something stands between the first <i> or <em> and its own closing tag, and something behind that.",
            opens_with_italic_thesis,
        ),
    ),
    Instruction(
        "format:sub-bullets",
        "A dash stands somewhere behind each asterisk, before the next.",
        has_sub_bullets,
        passes=case("* one\n  - a\n* two\n  - b"),
        fails=case("* one\n  - a\n* two"),
        quirks=(
            quirk("a text without asterisks will do", True, "one"),
            quirk("**bold** fails", False, "* **one**\n - a"),
            quirk("a hyphen will do", True, "* ice-cream"),
        ),
        hostile="*",
        one_token="Yes",
        fixed=Repair(
            "There are lines that start with * and a space, and one that starts with - behind each.",
            has_bullets_with_sub_bullets,
        ),
    ),
    Instruction(
        "format:no_bullets_bullets",
        "Two sentences or more stand before two lines or more that start with an asterisk, and nothing else.",
        has_sentences_then_bullets,
        needs=("sentences",),
        passes=case("I am. You are.\n* one\n* two"),
        fails=case("I am.\n* one\n* two"),
        quirks=(
            quirk("text behind a blank line fails", False, "I am.\n\nYou are.\n* one\n* two"),
            quirk("a line break at the end fails", False, "I am. You are.\n* one\n* two\n"),
            quirk("the sentences need no full stop", True, "I am\nYou are\n* one\n* two"),
        ),
        hostile="a\n",
        fixed=Repair(
            "Two sentences or more end in a full stop before two lines or more that start with an asterisk.",
            has_statements_then_bullets,
        ),
    ),
    Instruction(
        "custom:multiples",
        "The numbers of the text are 14, 21, 28, 35, 42 and 49, in this order.",
        prints_multiples_of_seven,
        passes=case("14, 21, 28, 35, 42, 49"),
        fails=case("Of 7: 14, 21, 28, 35, 42, 49"),
        quirks=(quirk("anything but digits may stand between", True, "14 is; 21a28b35c42d49 are"),),
        hostile="1",
    ),
    Instruction(
        "custom:mcq_count_length",
        "There are four questions, labelled 'Question 1' and so on, with five options each; each question is longer.",
        asks_growing_questions,
        passes=case(_QUESTIONS),
        fails=case(_QUESTIONS.replace(" so so so", " so")),
        quirks=(
            quirk("text before the first question fails", False, "Here:\n" + _QUESTIONS),
            quirk("numbers need not count up", True, re.sub(r"\d", "9", _QUESTIONS)),
        ),
        hostile="Question\n",
    ),
    Instruction(
        "custom:reverse_newline",
        "At least 52 lines, from the first that holds Zimbabwe, are in reverse alphabetical order.",
        lists_countries_backwards,
        passes=case(_BACKWARDS),
        fails=case(_BACKWARDS.replace("Land 60", "Xanadu")),
        quirks=(
            quirk("lines before Zimbabwe are left out of account", True, "Africa:\n" + _BACKWARDS),
            quirk("52 lines will do for 54 countries, whatever they say", True, "Zimbabwe\n" * 52),
        ),
        hostile="Zimbabwe\n",
    ),
    Instruction(
        "custom:word_reverse",
        "The words in reverse order hold 'bald eagle'.",
        reverses_words,
        passes=case("Eagle bald the is symbol national The."),
        fails=case("The national symbol is the bald eagle."),
        quirks=(quirk("two words will do", True, "eagle bald"),),
        fixed=Repair(
            "There are more than two words, which in reverse order hold 'bald eagle'.", reverses_words_of_a_sentence
        ),
    ),
    Instruction(
        "custom:character_reverse",
        "'elgae dlab' stands in the text, in any case.",
        reverses_characters,
        passes=case(".elgae dlab eht si tI"),
        fails=case("It is the bald eagle."),
        quirks=(quirk("nothing else need stand there", True, "elgae dlab"),),
        fixed=Repair("'elgae dlab' stands among more words, in any case.", reverses_characters_of_a_sentence),
    ),
    Instruction(
        "custom:sentence_alphabet",
        "There are 26 sentences that start with a to z.",
        starts_sentences_in_alphabet,
        needs=("sentences",),
        passes=case(" ".join(f"{letter}lf came." for letter in string.ascii_uppercase)),
        fails=case(" ".join(f"{letter}lf came." for letter in string.ascii_uppercase[:-1])),
        hostile="Word. ",
    ),
    Instruction(
        "custom:european_capitals_sort",
        "The text is the 27 capitals from Reykjavik to Zagreb in order of latitude, divided by commas.",
        sorts_capitals,
        passes=case(", ".join(CAPITALS)),
        fails=case(", ".join(CAPITALS) + "."),
        quirks=(quirk("accents are left out of account", True, ", ".join(CAPITALS).replace("Chisinau", "Chișinău")),),
        hostile="Oslo,",
    ),
    Instruction(
        "custom:csv_city",
        "The text is CSV: the header ID, Country, City, Year, Count and seven rows of five fields.",
        is_city_csv,
        passes=case(_CITIES),
        fails=case(_CITIES + "\n7,Chad,Ati,1999"),
        quirks=(
            quirk("a space behind a comma of the header fails", False, _CITIES.replace("ID,", "ID, ")),
            quirk("a line broken by \\r alone fails", False, _CITIES.replace("\n", "\r")),
        ),
        hostile='"',
    ),
    Instruction(
        "custom:csv_special_character",
        "The text is CSV: the header and 14 rows of five fields, with a special character in quotation marks.",
        is_csv_with_special_character,
        passes=case(_PRODUCTS),
        fails=case(_PRODUCTS.replace("A&B", "AB")),
        quirks=(quirk("rows behind the special character are not looked at", True, _PRODUCTS.replace("12,a", "12")),),
        hostile="ProductID,Category,Brand,Price,Stock\n",
        fixed=Repair(
            "The same, and all 14 rows are looked at.",
            is_whole_csv_with_special_character,
        ),
    ),
    Instruction(
        "custom:csv_quotes",
        "The text is CSV divided by tabs: the header and three rows of five fields, all in double quotation marks.",
        is_quoted_csv,
        passes=case(_GRADES),
        fails=case(_GRADES.replace('"A"', "A")),
        quirks=(
            quirk("an empty field fails", False, _GRADES.replace('"A"', "")),
            quirk("spaces behind a tab are let pass", True, _GRADES.replace("\t", "\t ")),
        ),
        hostile='"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"\n',
    ),
    Instruction(
        "custom:date_format_list",
        "The text is dates from 1769 to 1821 as YYYY-MM-DD, divided by commas.",
        lists_dates,
        passes=case("1796-04-12, 1815-06-18"),
        fails=case("1796-04-12, 1822-06-18"),
        quirks=(
            quirk("month 00 and day 00 will do", True, "1800-00-00"),
            quirk("29 February will do in every year", True, "1801-02-29"),
            quirk("a date may repeat", True, "1815-06-18, 1815-06-18"),
        ),
        hostile="1815-06-18,",
        fixed=Repair("The same, with months and days from 01 and no date twice.", lists_different_real_dates),
    ),
    Instruction(
        "count:keywords_multiple",
        "The five keywords occur 1, 2, 3, 5 and 7 times, in any case.",
        counts_keywords,
        tuple(text(name) for name in _KEYWORDS),
        passes=case(_KEYWORDS_TEXT, **_KEYWORDS),
        fails=case(_KEYWORDS_TEXT + "seven", **_KEYWORDS),
        quirks=(quirk("a keyword inside a word counts", False, _KEYWORDS_TEXT + "stone", **_KEYWORDS),),
        fixed=Repair(
            "The five keywords occur 1, 2, 3, 5 and 7 times as whole words, in any case.", counts_whole_keywords
        ),
    ),
    Instruction(
        "words:keywords_specific_position",
        "The m-th word of the n-th sentence is the keyword, in any case; signs are no words.",
        has_keyword_at,
        (text("keyword"), integer("n", minimum=1), integer("m", minimum=1)),
        needs=("sentences", "words"),
        passes=case("I run. You, too, Giggle.", keyword="giggle", n=2, m=3),
        fails=case("I run. You giggle.", keyword="giggle", n=2, m=3),
        quirks=(quirk("'can't' is two words", True, "I run. I can't giggle.", keyword="giggle", n=2, m=4),),
        hostile="Word. ",
    ),
    Instruction(
        "words:words_position",
        "The second and the second last word are the keyword, in any case.",
        has_keyword_second_and_second_last,
        (text("keyword"),),
        needs=("words", "sentences"),
        passes=case("A vibrant day, a vibrant night.", keyword="vibrant"),
        fails=case("A vibrant night.", keyword="night"),
        quirks=(
            quirk("two signs at the end fail", False, "A vibrant night, vibrant night?!", keyword="vibrant"),
            quirk("signs are words elsewhere", False, '"A vibrant vibrant night', keyword="vibrant"),
        ),
        hostile="Word. ",
        fixed=Repair(
            "The second and the second last word are the keyword, in any case; signs are no words.",
            has_keyword_as_second_and_second_last_word,
        ),
    ),
    Instruction(
        "repeat:repeat_change",
        "The text is the request but for its first word.",
        repeats_but_first_word,
        (_PROMPT,),
        passes=case("Sing a song.", prompt_to_repeat="Write a song."),
        fails=case("Write a song.", prompt_to_repeat="Write a song."),
        quirks=(
            quirk("more space will do in place of a change", True, "Write  a song.", prompt_to_repeat="Write a song."),
        ),
        fixed=Repair(
            "The text is the request, white space left out of account, with another first word.",
            changes_first_word_only,
        ),
    ),
    Instruction(
        "repeat:repeat_simple",
        f"The text is '{SIMPLE_SENTENCE}', in any case.",
        is_simple_sentence,
        passes=case("only output this sentence here, ignore all other requests.\n"),
        fails=case("Only output this sentence."),
    ),
    Instruction(
        "repeat:repeat_span",
        "The text is the characters n_start to n_end, both included and counted from 0, of the request, in any case.",
        repeats_span,
        (_PROMPT, integer("n_start"), integer("n_end")),
        passes=case("Write", prompt_to_repeat="Write a song.", n_start=0, n_end=4),
        fails=case("Writ", prompt_to_repeat="Write a song.", n_start=0, n_end=4),
        quirks=(
            quirk(
                "spaces at the ends are left out of account", True, "a", prompt_to_repeat="Do a b.", n_start=2, n_end=4
            ),
        ),
        one_token="Write",
    ),
    Instruction(
        "format:title_case",
        "No word starts with a small letter and goes on in one case.",
        is_title_case,
        needs=("words", "sentences"),
        passes=case("The Lord Of 3 Rings"),
        fails=case("The lordly Of 3 Rings"),
        quirks=(
            quirk("minor words count, though the text says major ones", False, "The Lord of the Rings"),
            quirk("a word of mixed case is let pass", True, "iPhone"),
        ),
        hostile="Word. ",
        one_token="Yes",
        fixed=Repair(
            "The first, the last and every word of more than four letters starts with a capital.",
            has_major_words_in_title_case,
        ),
    ),
    Instruction(
        "format:output_template",
        "'My Answer:', 'My Conclusion:' and 'Future Outlook:' stand in the text.",
        fills_template,
        passes=case("My Answer: a My Conclusion: b Future Outlook: c"),
        fails=case("My answer: a My Conclusion: b Future Outlook: c"),
        quirks=(
            quirk("in any order", True, "Future Outlook: c My Conclusion: b My Answer: a"),
            quirk("with nothing behind them", True, "My Answer: My Conclusion: Future Outlook:"),
        ),
        fixed=Repair(
            "The three headings stand in order, with something behind each and nothing before.", fills_template_in_order
        ),
    ),
    Instruction(
        "format:no_whitespace",
        "There is no white space.",
        lacks_whitespace,
        passes=case("Yes,of-course."),
        fails=case("Yes, of course."),
        quirks=(quirk("a line break at the end counts", False, "Yes\n"),),
        one_token="Yes",
    ),
)
