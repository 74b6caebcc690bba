"""The 58 instructions of IFBench (Pyatkin et al. 2025, arXiv:2507.02833) and their repairs."""

import csv
import io
import itertools
import re
import string
import unicodedata
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence

from logitless.rewards.instructions.ifeval import occurrences
from logitless.rewards.instructions.iftrain import is_span
from logitless.rewards.instructions.instruction import Count, Number, Positive, Suite, Text
from logitless.rewards.instructions.text import (
    alphanumeric_words,
    bare,
    bare_words,
    ends_with_emoji,
    first_tag,
    is_emoji,
    sentences,
    starts_with_emoji,
    syllables,
    without_punctuation,
    words,
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

IFBENCH = Suite()


@IFBENCH.instruction("count:word_count_range")
def word_count_in_range(text: str, min_words: Count, max_words: Count) -> bool:
    """The number of words (runs of letters, digits and underscores) lies in the range.

    Quirk: 'it's' is two words (passes)
    """
    return min_words <= len(re.findall(r"\w+", text)) <= max_words


@IFBENCH.instruction("count:unique_word_count")
def has_unique_words(text: str, N: Count, fixed: bool = False) -> bool:
    """There are at least N different words, ignoring case and punctuation around them.

    Quirk: a word of punctuation alone is one more word (passes)
    Fixed: There are at least N different words that are more than punctuation.
    """
    return len(set(bare_words(text) if fixed else map(bare, text.lower().split()))) >= N


@IFBENCH.instruction("ratio:stop_words", "stop words")
def has_few_stop_words(text: str, percentage: Number) -> bool:
    """At most so many percent of the words are stop words.

    Quirk: a contraction is two words, both of them stop words (fails)
    One token: Yes
    """
    found = re.findall(r"\w+", text)
    return bool(found) and sum(word.lower() in _STOP_WORDS for word in found) / len(found) * 100 <= percentage


@IFBENCH.instruction("ratio:sentence_type", "sentences")
def has_two_statements_a_question(text: str, fixed: bool = False) -> bool:
    """Twice as many sentences end in a full stop as in a question mark.

    Quirk: no sentence of either kind will do (passes)
    Quirk: a full stop before a quotation mark is missed (fails)
    One token: Yes
    Fixed: There is a question, and twice as many statements, ignoring quotation marks.
    """
    ends = _sentence_ends(text, fixed)
    return ends["."] == 2 * ends["?"] and (ends["?"] > 0 or not fixed)


@IFBENCH.instruction("ratio:sentence_balance", "sentences")
def has_balanced_sentences(text: str, fixed: bool = False) -> bool:
    """Equally many sentences end in a full stop, a question mark and an exclamation mark.

    Quirk: no such sentence will do (passes)
    One token: Yes
    Fixed: There are sentences of all three kinds, equally many.
    """
    ends = _sentence_ends(text, fixed)
    return ends["."] == ends["?"] == ends["!"] and (ends["!"] > 0 or not fixed)


@IFBENCH.instruction("count:conjunctions")
def has_conjunctions(text: str, small_n: Count, fixed: bool = False) -> bool:
    """There are at least so many different coordinating conjunctions.

    Quirk: the same one in other spelling is different (passes)
    Fixed: There are at least so many different ones, ignoring case and punctuation.
    """
    found = {word: bare(word).lower() for word in text.split() if bare(word).lower() in _CONJUNCTIONS}
    return len(set(found.values()) if fixed else found) >= small_n


@IFBENCH.instruction("count:person_names")
def has_person_names(text: str, N: Count) -> bool:
    """At least N of the fifty listed names stand in the text as whole words.

    Quirk: case matters (fails)
    """
    return len(set(_NAMES.findall(text))) >= N


@IFBENCH.instruction("ratio:overlap")
def overlaps(text: str, reference_text: Text, percentage: Number, fixed: bool = False) -> bool:
    """So many percent, give or take 2, of the text's different trigrams are in the reference text.

    Quirk: trigrams are of characters (passes)
    Quirk: a text below three characters has none (fails)
    Fixed: So many percent, give or take 2, of the text's different trigrams of words are in the reference text.
    """
    ours, theirs = (_triples(re.findall(r"\w+", some.lower()) if fixed else some) for some in (text, reference_text))
    return bool(ours) and percentage - 2 <= len(ours & theirs) / len(ours) * 100 <= percentage + 2


@IFBENCH.instruction("count:numbers")
def has_numbers(text: str, N: Count, fixed: bool = False) -> bool:
    """There are exactly N runs of digits once ASCII punctuation is removed.

    Quirk: '1-2-3' is one number (passes)
    Fixed: There are exactly N numbers; a point or comma may stand inside one.
    """
    found = re.findall(r"\d+(?:[.,]\d+)*", text) if fixed else re.findall(r"\d+", without_punctuation(text))
    return len(found) == N


@IFBENCH.instruction("words:alphabet")
def follows_alphabet(text: str) -> bool:
    """Each word starts with the next letter of the alphabet, a after z.

    Quirk: a single word will do (passes)
    Quirk: a number first fails (fails)
    One token: Yes
    """
    found = without_punctuation(text).split()
    start = string.ascii_lowercase.find(found[0][0].lower()) if found else -1
    if start < 0:
        return False
    expected = itertools.islice(itertools.cycle(string.ascii_lowercase), start + 1, None)
    return all(word.lower()[0] == letter for word, letter in zip(found[1:], expected, strict=False))


@IFBENCH.instruction("words:vowel")
def has_few_vowels(text: str, fixed: bool = False) -> bool:
    """The text is one line with at most three different vowels.

    Quirk: less than three will do (passes)
    Quirk: a line break before or after is no second line (passes)
    One token: Yes
    Fixed: The text is one line with exactly three different vowels.
    """
    vowels = len(set("aeiou") & set(text.lower()))
    return "\n" not in text.strip() and (vowels == 3 or (vowels < 3 and not fixed))


@IFBENCH.instruction("words:consonants")
def has_consonant_clusters(text: str, fixed: bool = False) -> bool:
    """Each word, of punctuation too, has two consonants (y is one) side by side.

    Quirk: a punctuation mark by itself fails (fails)
    One token: Sly
    Fixed: Each word that holds a letter has two consonants side by side.
    """
    found = [word for word in text.lower().split() if not fixed or any(map(str.isalpha, word))]
    return (bool(found) or not fixed) and all(map(_CONSONANTS.search, found))


@IFBENCH.instruction("sentence:alliteration_increment", "sentences")
def increments_alliteration(text: str, fixed: bool = False) -> bool:
    """Each sentence has more alliterating words than the one before.

    Quirk: one sentence will do (passes)
    Quirk: runs are added up (passes)
    One token: Yes
    Fixed: There are several sentences, each with a longer alliterating run than the one before.
    """
    runs = [_alliterations(sentence) for sentence in sentences(text)]
    if fixed:
        return len(runs) > 1 and _grows(max(found, default=0) for found in runs)
    return _grows(sum(run for run in found if run > 1) for found in runs)


@IFBENCH.instruction("words:palindrome")
def has_palindromes(text: str, fixed: bool = False) -> bool:
    """There are at least ten palindromes of five letters or more.

    Quirk: the same one may be repeated (passes)
    Fixed: There are at least ten different palindromes of five letters or more.
    """
    found = [word for word in without_punctuation(text).lower().split() if len(word) >= 5 and word == word[::-1]]
    return len(set(found) if fixed else found) >= 10


@IFBENCH.instruction("count:punctuation")
def has_all_punctuation(text: str, fixed: bool = False) -> bool:
    """Each of . , ! ? ; : occurs, and an interrobang.

    Quirk: the ! and ? of the first interrobang do not count (fails)
    Fixed: Each of . , ! ? ; : occurs, and an interrobang, which may bring its own ! and ?.
    """
    if not any(bang in text for bang in ("!?", "?!", "‽")):
        return False
    first = "?!" if "?!" in text else "!?"
    return set(text if fixed else text.replace(first, "", 1)) >= MARKS


@IFBENCH.instruction("format:parentheses")
def nests_brackets(text: str, fixed: bool = False) -> bool:
    """Brackets of any kind are nested five deep, and the innermost is closed.

    Quirk: the outer ones may stay open (passes)
    Quirk: a bracket that closes nothing starts the count anew (fails)
    Fixed: Brackets are nested five deep, and all of them are closed in order.
    """
    open_brackets: list[str] = []
    deepest = 0
    for character in text:
        if character in CLOSERS:
            open_brackets.append(character)
            deepest = max(deepest, len(open_brackets))
        elif character in ")]}":
            closed = bool(open_brackets) and CLOSERS[open_brackets.pop()] == character
            if closed and deepest >= 5 and not fixed:
                return True
            if not closed and fixed:
                return False
            if not closed:
                open_brackets, deepest = [], 0
    return fixed and deepest >= 5 and not open_brackets


@IFBENCH.instruction("format:quotes")
def nests_quotes(text: str, fixed: bool = False) -> bool:
    """Double and single quotation marks are nested three deep, in turns, and closed.

    Quirk: apostrophes count (fails)
    Quirk: curly quotation marks do not (fails)
    Fixed: The same, apostrophes inside words left out and curly marks counted.
    """
    if fixed:
        text = re.sub(r"(?<=\w)'(?=\w)", "", text.translate(_STRAIGHT))
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


@IFBENCH.instruction("words:prime_lengths")
def has_prime_lengths(text: str, fixed: bool = False) -> bool:
    """The length of each word, without ASCII punctuation, is a prime number.

    Quirk: punctuation alone passes (passes)
    Quirk: lengths over 97 fail (fails)
    One token: Yes
    Fixed: There are words, and the length of each is a prime number below 100.
    """
    lengths = [len(word) for word in without_punctuation(text).split()]
    return (bool(lengths) or not fixed) and PRIMES.issuperset(lengths)


@IFBENCH.instruction("format:options")
def is_option(text: str, options: Text, fixed: bool = False) -> bool:
    """The text is one of the options.

    Quirk: 'or' inside a word divides (fails)
    Quirk: lettered options must be copied exactly (fails)
    Quirk: a line break at the end fails (fails)
    One token: yes
    Fixed: The text is one of the options (divided by /, a comma or the word or), ignoring punctuation around it.
    """
    if fixed:
        text, choices = text.strip(), re.split(r"/|\s+or\s+|,", options)
    else:
        choices = options.split(next((mark for mark in ("/", "or") if mark in options), ","))
    choices = [choice.strip() for choice in choices]
    if not fixed and re.match(r"\W*[aA]\W*[bB]\W*[cC]\W*", options):
        return text in choices
    return bare(text).lower() in {bare(choice).lower() for choice in choices}


@IFBENCH.instruction("format:newline")
def has_a_word_a_line(text: str, fixed: bool = False) -> bool:
    """There are as many lines as words.

    Quirk: punctuation alone passes (passes)
    Quirk: a line of spaces makes up for a line of two words (passes)
    One token: Yes
    Fixed: Each line that is not blank holds one word.
    """
    if fixed:
        lines = [line.split() for line in text.split("\n") if line.strip()]
        return all(len(line) == 1 and bare(line[0]) for line in lines)
    stripped = without_punctuation(text).strip()
    return len([line for line in stripped.split("\n") if line]) == len(stripped.split())


@IFBENCH.instruction("format:emoji", "sentences", "emoji")
def ends_sentences_with_emoji(text: str, fixed: bool = False) -> bool:
    """Each sentence ends with an emoji, or the next one starts with one.

    Quirk: a flag is no emoji: its code points are tested one by one (fails)
    Quirk: an emoji before the last character will do (passes)
    One token: 🙂
    Fixed: The same, for emoji of any number of code points.
    """
    found = sentences(text)
    if fixed:
        cleaned = [sentence.rstrip(string.punctuation + string.whitespace) for sentence in found]
        return bool(cleaned) and all(
            ends_with_emoji(sentence) or starts_with_emoji(following)
            for sentence, following in itertools.zip_longest(cleaned, cleaned[1:], fillvalue="")
        )
    cleaned = [without_punctuation(sentence).strip() for sentence in found]
    return all(
        sentence and any(map(is_emoji, sentence[-2:] + following[:1]))
        for sentence, following in itertools.zip_longest(cleaned, cleaned[1:], fillvalue="")
    )


@IFBENCH.instruction("ratio:sentence_words", "sentences")
def has_three_equal_sentences(text: str, fixed: bool = False) -> bool:
    """There are three sentences of the same number of characters.

    Quirk: words may repeat, though the text says all different (passes)
    Fixed: There are three sentences of the same number of characters, and no word is used twice.
    """
    lengths = [len(sentence.strip()) for sentence in sentences(text)]
    found = without_punctuation(text).lower().split() if fixed else []
    return len(lengths) == 3 and len(set(lengths)) == 1 and len(found) == len(set(found))


@IFBENCH.instruction("count:words_japanese")
def has_japanese_words(text: str, N: Count, fixed: bool = False) -> bool:
    """Every N-th word has a Japanese character.

    Quirk: less than N words will do (passes)
    Quirk: numbers are accepted (passes)
    Quirk: N = 0 is never followed (fails)
    One token: Yes
    Fixed: There is an N-th word, and every N-th word has a Japanese character.
    """
    if N == 0:
        return not fixed and not text.split()
    nth = text.split()[N - 1 :: N]
    if fixed:
        return bool(nth) and all(map(_JAPANESE.search, nth))
    return all(_JAPANESE.search(word) for word in map(bare, nth) if word and not word.isdigit())


@IFBENCH.instruction("words:start_verb", "words", "sentences", "tagger")
def starts_with_verb(text: str) -> bool:
    """The first word is tagged as a verb.

    One token: Run
    """
    tokens = words(text)
    return bool(tokens) and "VB" in first_tag(tokens)


@IFBENCH.instruction("words:repeats")
def repeats_few_words(text: str, small_n: Count) -> bool:
    """No word occurs more than so many times, ignoring case and ASCII punctuation.

    Quirk: punctuation alone passes (passes)
    One token: Yes
    """
    counts = Counter(without_punctuation(text.lower()).split())
    return max(counts.values(), default=0) <= small_n


@IFBENCH.instruction("sentence:keyword", "sentences")
def has_keyword_in_sentence(text: str, word: Text, N: Count, fixed: bool = False) -> bool:
    """The N-th sentence holds the word, in any case.

    Quirk: N = 0 means the last sentence (passes)
    Fixed: The N-th sentence, counted from 1, holds the word, in any case.
    """
    found = sentences(text)
    if not found or len(found) < N or (fixed and N == 0):
        return False
    return re.search(rf"\b{re.escape(word)}\b", found[N - 1], re.IGNORECASE) is not None


@IFBENCH.instruction("count:pronouns", "words", "sentences")
def has_pronouns(text: str, N: Count) -> bool:
    """There are at least N pronouns.

    Quirk: 'that' counts as a conjunction too (passes)
    """
    return sum(word in _PRONOUNS for word in words(text.replace("/", " ").lower())) >= N


@IFBENCH.instruction("words:odd_even_syllables", "syllables")
def alternates_syllables(text: str) -> bool:
    """Words of odd and even numbers of syllables alternate.

    Quirk: numbers have 0 syllables (passes)
    One token: Yes
    """
    return _neighbours_differ([syllables(word) % 2 for word in without_punctuation(text).lower().split()])


@IFBENCH.instruction("words:last_first", "sentences")
def chains_sentences(text: str, fixed: bool = False) -> bool:
    """Each sentence starts with the last word of the one before, in any case.

    Quirk: one sentence will do (passes)
    One token: Yes
    Fixed: There are several sentences, each starting with the last word of the one before.
    """
    found = sentences(text)
    if fixed:
        ends = [(words[:1], words[-1:]) for words in map(bare_words, found)]
    else:
        signs = string.punctuation + " "
        lower = [sentence.lower() for sentence in found]
        ends = [(each.lstrip(signs).split()[:1], each.rstrip(signs).split()[-1:]) for each in lower]
    chained = all(last and last == first for (_, last), (first, _) in itertools.pairwise(ends))
    return chained and (len(found) > 1 or not fixed)


@IFBENCH.instruction("words:paragraph_last_first")
def closes_paragraphs_as_opened(text: str, fixed: bool = False) -> bool:
    """Each line ends with the word it starts with, in any case.

    Quirk: a line of one word will do (passes)
    Quirk: punctuation inside the line belongs to the word (fails)
    One token: Yes
    Fixed: Each line holds several words and ends with the word it starts with, punctuation left out.
    """
    if fixed:
        lines = [[bare(word) for word in line.lower().split()] for line in text.split("\n") if bare(line.strip())]
        return bool(lines) and all(len(found) > 1 and found[0] == found[-1] for found in lines)
    paragraphs = (bare(line.strip().lower()).split() for line in text.split("\n"))
    return all(found[0] == found[-1] for found in paragraphs if found)


@IFBENCH.instruction("sentence:increment", "sentences")
def increments_words(text: str, small_n: Count, fixed: bool = False) -> bool:
    """Each sentence has exactly so many words more than the one before.

    Quirk: one sentence will do (passes)
    Quirk: a text of nothing fails (fails)
    One token: Yes
    Fixed: There are several sentences, each with exactly so many words more than the one before.
    """
    counts = [len(without_punctuation(sentence).split()) for sentence in sentences(text)]
    return len(counts) > fixed and all(other == one + small_n for one, other in itertools.pairwise(counts))


@IFBENCH.instruction("words:no_consecutive")
def varies_first_letters(text: str) -> bool:
    """No word starts with the same letter as the one before.

    Quirk: a single word will do (passes)
    Quirk: punctuation alone passes (passes)
    One token: Yes
    """
    return _neighbours_differ([word[0] for word in without_punctuation(text.lower()).split()])


@IFBENCH.instruction("format:line_indent")
def indents_lines(text: str, fixed: bool = False) -> bool:
    """Each line is indented by more spaces than the one before.

    Quirk: one line will do (passes)
    Quirk: one blank line is ignored (passes)
    Quirk: two blank lines are not (fails)
    Quirk: tabs are no indentation (fails)
    One token: Yes
    Fixed: There are several lines, each indented by more spaces than the one before.
    """
    lines = text.split("\n")
    lines = [line for line in lines if line.strip()] if fixed else _without_visited_blanks(lines)
    return (len(lines) > 1 or not fixed) and _grows(len(line) - len(line.lstrip(" ")) for line in lines)


@IFBENCH.instruction("format:quote_unquote")
def explains_quotes(text: str, fixed: bool = False) -> bool:
    """No quotation follows right on another, and the text does not end with one.

    Quirk: a text without quotation will do (passes)
    Quirk: curly quotation marks are not seen (passes)
    Quirk: the end of one quotation and the start of the next count as one text (fails)
    One token: Yes
    Fixed: There is a quotation, straight or curly, and something unquoted behind each.
    """
    if fixed:
        text = text.translate(_STRAIGHT)
    packed = "".join(text.replace("'\"'", "").split())
    trimmed = packed.strip(string.digits + string.punctuation.replace('"', ""))
    return '""' not in packed and not trimmed.endswith('"') and (text.count('"') > 1 or not fixed)


@IFBENCH.instruction("format:list")
def has_separators(text: str, sep: Text, fixed: bool = False) -> bool:
    """The separator occurs at least twice.

    Quirk: anywhere in a line will do (passes)
    Fixed: At least two lines start with the separator.
    """
    lines = text.split("\n")
    return (sum(line.lstrip().startswith(sep.strip()) for line in lines) if fixed else text.count(sep)) >= 2


@IFBENCH.instruction("format:thesis")
def has_italic_thesis(text: str, fixed: bool = False) -> bool:
    """There is something in italics, in HTML, and something behind it.

    Quirk: behind <em> nothing need follow: the closing tag's last character is enough (passes)
    Quirk: <em> may be empty (passes)
    Quirk: only the first <i> is looked at (fails)
    Fixed: Something stands between the first <i> or <em> and its own closing tag, and something behind that.
    """
    if fixed:
        return any(_has_thesis(text, f"<{tag}>", f"</{tag}>") for tag in ("i", "em"))
    start = _first_of(text, "<i>", "<em>")
    rest = text[max(start, 0) :]
    end = _first_of(rest, "</i>", "</em>")
    return start >= 0 <= end and bool(rest[3:end].strip()) and bool(rest[end + 4 :].strip())


@IFBENCH.instruction("format:sub-bullets")
def has_sub_bullets(text: str, fixed: bool = False) -> bool:
    """A dash stands somewhere behind each asterisk, before the next.

    Quirk: a text without asterisks will do (passes)
    Quirk: **bold** fails (fails)
    Quirk: a hyphen will do (passes)
    One token: Yes
    Fixed: There are lines that start with * and a space, and one that starts with - behind each.
    """
    if not fixed:
        return all("-" in bullet for bullet in text.split("*")[1:])
    starts = "".join(line.split(maxsplit=1)[0] + "\n" for line in text.split("\n") if line.strip())
    bullets = "".join(start for start in starts.split("\n") if start in ("*", "-"))
    return re.fullmatch(r"(?:\*-+)+", bullets) is not None


@IFBENCH.instruction("format:no_bullets_bullets", "sentences")
def has_sentences_then_bullets(text: str, fixed: bool = False) -> bool:
    """Two sentences or more stand before two lines or more that start with an asterisk, and nothing else.

    Quirk: text behind a blank line fails (fails)
    Quirk: a line break at the end fails (fails)
    Quirk: the sentences need no full stop (passes)
    Fixed: Two sentences or more end in a full stop before two lines or more that start with an asterisk.
    """
    lines = [line.strip() for line in text.split("\n")]
    first = next((row for row, line in enumerate(lines) if line.startswith("*")), len(lines))
    if fixed:
        num_sentences = sum(_sentence_ends(line, fixed)["."] for line in lines[:first])
    else:
        found = [len(sentences(line)) for line in lines[:first]]
        num_sentences = sum(found)
        if 0 in found[:-1] or (found and first == len(lines) and found[-1] == 0):
            return False
    num_bullets = sum(line.startswith("*") for line in lines[first:])
    return num_sentences >= 2 and num_bullets >= 2 and (fixed or num_bullets == len(lines) - first)


@IFBENCH.instruction("custom:multiples")
def prints_multiples_of_seven(text: str) -> bool:
    """The numbers of the text are 14, 21, 28, 35, 42 and 49, in this order.

    Quirk: anything but digits may stand between (passes)
    """
    return re.findall(r"\d+", text) == ["14", "21", "28", "35", "42", "49"]


@IFBENCH.instruction("custom:mcq_count_length")
def asks_growing_questions(text: str) -> bool:
    """There are four questions, labelled 'Question 1' and so on, with five options each; each question is longer.

    Quirk: text before the first question fails (fails)
    Quirk: numbers need not count up (passes)
    """
    if not text.startswith("Question"):
        return False
    parts = (part.strip() for part in re.split(r"Question \d+[.|):;]?", text))
    questions = [part.split("\n") for part in parts if part]
    return len(questions) == 4 and all(map(_has_five_options, questions)) and _grows(map(_question_length, questions))


@IFBENCH.instruction("custom:reverse_newline")
def lists_countries_backwards(text: str) -> bool:
    """At least 52 lines, from the first that holds Zimbabwe, are in reverse alphabetical order.

    Quirk: lines before Zimbabwe are ignored (passes)
    Quirk: 52 lines will do for 54 countries, whatever they say (passes)
    """
    lines = [line for line in map(bare, text.split("\n")) if line]
    listed = [_ascii(line) for line in itertools.dropwhile(lambda line: "Zimbabwe" not in line, lines)]
    return len(listed) >= 52 and all(one >= other for one, other in itertools.pairwise(listed))


@IFBENCH.instruction("custom:word_reverse")
def reverses_words(text: str, fixed: bool = False) -> bool:
    """The words in reverse order hold 'bald eagle'.

    Quirk: two words will do (passes)
    Fixed: There are more than two words, which in reverse order hold 'bald eagle'.
    """
    # The official check also asks whether the result is one sentence; without punctuation it always is.
    found = without_punctuation(text.lower()).split()[::-1]
    return "bald eagle" in " ".join(found) and (len(found) > 2 or not fixed)


@IFBENCH.instruction("custom:character_reverse")
def reverses_characters(text: str, fixed: bool = False) -> bool:
    """'elgae dlab' stands in the text, in any case.

    Quirk: nothing else need stand there (passes)
    Fixed: 'elgae dlab' stands among more words, in any case.
    """
    return "elgae dlab" in text.lower() and (not fixed or len(without_punctuation(text).split()) > 2)


@IFBENCH.instruction("custom:sentence_alphabet", "sentences")
def starts_sentences_in_alphabet(text: str) -> bool:
    """There are 26 sentences that start with a to z."""
    return "".join(sentence.strip().lower()[:1] for sentence in sentences(text)) == string.ascii_lowercase


@IFBENCH.instruction("custom:european_capitals_sort")
def sorts_capitals(text: str) -> bool:
    """The text is the 27 capitals from Reykjavik to Zagreb in order of latitude, divided by commas.

    Quirk: accents are ignored (passes)
    """
    return tuple(city.strip() for city in _ascii(text).split(",") if city.strip()) == CAPITALS


@IFBENCH.instruction("custom:csv_city")
def is_city_csv(text: str) -> bool:
    r"""The text is CSV: the header ID, Country, City, Year, Count and seven rows of five fields.

    Quirk: a space behind a comma of the header fails (fails)
    Quirk: a line broken by \r alone fails (fails)
    """
    rows = _csv_rows(text)
    return len(rows) == 8 and rows[0] == ["ID", "Country", "City", "Year", "Count"] and _has_fives(rows)


@IFBENCH.instruction("custom:csv_special_character")
def is_csv_with_special_character(text: str, fixed: bool = False) -> bool:
    """The text is CSV: the header and 14 rows of five fields, with a special character in quotation marks.

    Quirk: rows behind the special character are not looked at (passes)
    Fixed: The same, and all 14 rows are looked at.
    """
    columns = ("ProductID", "Category", "Brand", "Price", "Stock")
    rows = _csv_rows(text.replace('"', '"""')) if _has_header(text, columns, ",[ \t]*") else []
    special = next((place for place, row in enumerate(rows) if place and any(map(_quotes_a_sign, row))), None)
    if len(rows) != 15 or special is None:
        return False
    return _has_fives(rows if fixed else rows[1 : special + 1])


@IFBENCH.instruction("custom:csv_quotes")
def is_quoted_csv(text: str) -> bool:
    """The text is CSV divided by tabs: the header and three rows of five fields, all in double quotation marks.

    Quirk: an empty field fails (fails)
    Quirk: spaces behind a tab are accepted (passes)
    """
    columns = ("StudentID", "Subject", "Grade", "Semester", "Score")
    rows = _csv_rows(text.replace('"', '"""'), "\t") if _has_header(text, columns, "\t *") else []
    fields = [field.strip() for row in rows for field in row]
    return len(rows) == 4 and _has_fives(rows) and all(field[:1] == field[-1:] == '"' for field in fields)


@IFBENCH.instruction("custom:date_format_list")
def lists_dates(text: str, fixed: bool = False) -> bool:
    """The text is dates from 1769 to 1821 as YYYY-MM-DD, divided by commas.

    Quirk: month 00 and day 00 will do (passes)
    Quirk: 29 February will do in every year (passes)
    Quirk: a date may repeat (passes)
    Fixed: The same, with months and days from 01 and no date twice.
    """
    dates = [date.strip() for date in text.strip().split(",")]
    sound = not fixed or (len(set(dates)) == len(dates) and not any("-00" in date for date in dates))
    return sound and all(map(_is_napoleonic, dates))


@IFBENCH.instruction("count:keywords_multiple")
def counts_keywords(
    text: str,
    keyword1: Text,
    keyword2: Text,
    keyword3: Text,
    keyword4: Text,
    keyword5: Text,
    fixed: bool = False,
) -> bool:
    """The five keywords occur 1, 2, 3, 5 and 7 times, in any case.

    Quirk: a keyword inside a word counts (fails)
    Fixed: The five keywords occur 1, 2, 3, 5 and 7 times as whole words, in any case.
    """
    keywords = (keyword1, keyword2, keyword3, keyword4, keyword5)
    if fixed:
        counts = tuple(occurrences(keyword, text, whole=True) for keyword in keywords)
    else:
        counts = tuple(text.lower().count(keyword.strip().lower()) for keyword in keywords)
    return counts == KEYWORD_COUNTS


@IFBENCH.instruction("words:keywords_specific_position", "sentences", "words")
def has_keyword_at(text: str, keyword: Text, n: Positive, m: Positive) -> bool:
    """The m-th word of the n-th sentence is the keyword, in any case; punctuation marks are not words.

    Quirk: 'can't' is two words (passes)
    """
    mth = [word for sentence in sentences(text)[n - 1 : n] for word in alphanumeric_words(sentence)[m - 1 : m]]
    return [word.lower() for word in mth] == [keyword.strip().lower()]


@IFBENCH.instruction("words:words_position", "words", "sentences")
def has_keyword_second_and_second_last(text: str, keyword: Text, fixed: bool = False) -> bool:
    """The second and the second last word are the keyword, in any case.

    Quirk: two punctuation marks at the end fail (fails)
    Quirk: punctuation marks are words elsewhere (fails)
    Fixed: The second and the second last word are the keyword, in any case; punctuation marks are not words.
    """
    tokens = alphanumeric_words(text) if fixed else words(text)
    if tokens and tokens[-1] in string.punctuation:
        tokens = tokens[:-1]
    return len(tokens) > 1 and tokens[1].lower() == tokens[-2].lower() == keyword.strip().lower()


@IFBENCH.instruction("repeat:repeat_change")
def repeats_but_first_word(text: str, prompt_to_repeat: Text, fixed: bool = False) -> bool:
    """The text is the request but for its first word.

    Quirk: a change of white space is enough (passes)
    Fixed: The text is the request, ignoring white space, with another first word.
    """
    ours, theirs = text.split(), prompt_to_repeat.split()
    changed = ours[:1] != theirs[:1] if fixed else text != prompt_to_repeat
    return changed and ours[1:] == theirs[1:]


@IFBENCH.instruction("repeat:repeat_simple")
def is_simple_sentence(text: str) -> bool:
    """The text is 'Only output this sentence here, ignore all other requests.', in any case."""
    return text.strip().lower() == SIMPLE_SENTENCE.lower()


@IFBENCH.instruction("repeat:repeat_span")
def repeats_span(text: str, prompt_to_repeat: Text, n_start: Count, n_end: Count) -> bool:
    """The text is the characters n_start to n_end, both included and counted from 0, of the request, in any case.

    Quirk: spaces at the ends are ignored (passes)
    One token: Write
    """
    return is_span(text, prompt_to_repeat, n_start, n_end, fixed=True)


@IFBENCH.instruction("format:title_case", "words", "sentences")
def is_title_case(text: str, fixed: bool = False) -> bool:
    """No word starts with a small letter and goes on in one case.

    Quirk: minor words count, though the text says major ones (fails)
    Quirk: a word of mixed case is accepted (passes)
    One token: Yes
    Fixed: The first, the last and every word of more than four letters starts with a capital.
    """
    if fixed:
        found = [word for word in text.split() if any(map(str.isalpha, word))]
        major = [word for place, word in enumerate(found) if place in (0, len(found) - 1) or len(bare(word)) > 4]
        return bool(found) and all(next(filter(str.isalpha, word)).isupper() for word in major)
    lowered = [word for word in words(text) if word[0].isalpha() and word[0].islower()]
    return not any(len(word) == 1 or word[1:].isupper() or word[1:].islower() for word in lowered)


@IFBENCH.instruction("format:output_template")
def fills_template(text: str, fixed: bool = False) -> bool:
    """'My Answer:', 'My Conclusion:' and 'Future Outlook:' stand in the text.

    Quirk: in any order (passes)
    Quirk: with nothing behind them (passes)
    Fixed: The three headings stand in order, with something behind each and nothing before.
    """
    if not fixed:
        return all(heading in text for heading in TEMPLATE)
    pieces = []
    for heading in TEMPLATE:
        before, found, text = text.partition(heading)
        if not found:
            return False
        pieces.append(before.strip())
    return pieces[0] == "" and all(pieces[1:]) and bool(text.strip())


@IFBENCH.instruction("format:no_whitespace")
def lacks_whitespace(text: str) -> bool:
    r"""There is no white space.

    Quirk: a line break at the end counts (fails)
    One token: Yes
    """
    return not any(map(str.isspace, text))


def _sentence_ends(text: str, fixed: bool) -> Counter[str]:
    """How many sentences end in which mark; where fixed, quotation marks and brackets behind it are left out."""
    behind = "\"'”’»)]" if fixed else ""
    return Counter(sentence.rstrip(behind)[-1:] if fixed else sentence[-1] for sentence in sentences(text))


def _triples(items: Sequence[str]) -> set[tuple[str, ...]]:
    return set(zip(items, items[1:], items[2:], strict=False))


def _grows(values: Iterable[int]) -> bool:
    return all(one < other for one, other in itertools.pairwise(values))


def _neighbours_differ(values: Iterable[object]) -> bool:
    return all(one != other for one, other in itertools.pairwise(values))


def _alliterations(sentence: str) -> list[int]:
    """Lengths of the runs of words with the same first letter."""
    trimmed = (word.lstrip(string.punctuation) for word in sentence.lower().split())
    return [len(list(run)) for _, run in itertools.groupby(word[0] for word in trimmed if word)]


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


def _first_of(text: str, preferred: str, other: str) -> int:
    """Where the preferred one stands first, or else the other; -1 where neither does."""
    place = text.find(preferred)
    return text.find(other) if place < 0 else place


def _has_thesis(text: str, opening: str, closing: str) -> bool:
    start = text.find(opening)
    end = text.find(closing, start)
    return 0 <= start < end and bool(text[start + len(opening) : end].strip() and text[end + len(closing) :].strip())


def _has_five_options(question: Sequence[str]) -> bool:
    return sum(map(_is_choice, question)) == 5


def _question_length(question: Sequence[str]) -> int:
    asked = itertools.takewhile(lambda line: not _is_choice(line), question)
    return len(" ".join(line.strip() for line in asked).strip())


def _is_choice(line: str) -> bool:
    return re.match(r"[A-Ea-e][.|)]\s*\w", line.strip()) is not None


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode("ascii")


def _csv_rows(text: str, delimiter: str = ",") -> list[list[str]]:
    """The rows of a CSV file; none where it is none."""
    try:
        return list(csv.reader(io.StringIO(text), delimiter=delimiter))
    except csv.Error:
        return []


def _has_fives(rows: Iterable[Sequence[str]]) -> bool:
    return all(len(row) == 5 for row in rows)


def _has_header(text: str, columns: Sequence[str], separator: str) -> bool:
    pattern = separator.join(f'(?:{name}|"{name}")' for name in columns)
    return re.fullmatch(pattern, text.split("\n", 1)[0].strip()) is not None


def _quotes_a_sign(field: str) -> bool:
    """Whether the field starts with a quotation mark and has a sign before another one on the same line."""
    line = field.split("\n", 1)[0]
    return line.startswith('"') and re.search(r"[^\w\s]", line[1 : max(1, line.rfind('"'))]) is not None


def _is_napoleonic(date: str) -> bool:
    found = re.fullmatch(r"(\d{4})-(\d{2})-(\d{2})", date)
    if found is None:
        return False
    year, month, day = map(int, found.groups())
    longest = 29 if month == 2 else 30 if month in (4, 6, 9, 11) else 31 if month else 99
    return 1769 <= year <= 1821 and month <= 12 and day <= longest
