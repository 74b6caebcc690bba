"""The 29 training instructions of IFBench (IFTrain, Pyatkin et al. 2025, arXiv:2507.02833) and their repairs."""

import itertools
import re
import string
from collections import Counter

from logitless.rewards.instructions.ifeval import (
    compiled,
    filled_parts,
    keyword_frequency,
    letter_frequency,
    matches,
    number_of_paragraphs,
    occurrences,
    whole_word,
)
from logitless.rewards.instructions.instruction import Count, Positive, Relation, Suite, Text
from logitless.rewards.instructions.text import alphanumeric_words, bare, bare_words, rule_sentences, words

IFTRAIN = Suite()


@IFTRAIN.instruction("copy:repeat_phrase")
def repeats_phrase(text: str, phrase: Text, small_n: Positive, fixed: bool = False) -> bool:
    """n parts of lines start with the phrase's first word and end with its last, with at most one word changed each.

    Quirk: only the last one has to differ (passes)
    Quirk: words are regular expressions (passes)
    Quirk: words before or inside others count (passes)
    Fixed: The phrase occurs n times, each time with exactly one word changed, and not its first or last.
    """
    wanted = phrase.split()
    if fixed:
        wanted, tokens = [bare(word) for word in wanted], [bare(word) for word in text.split()]
        windows = [tokens[start : start + len(wanted)] for start in range(len(tokens) - len(wanted) + 1)]
        found = [window for window in windows if (window[0], window[-1]) == (wanted[0], wanted[-1])]
    else:
        found = [one.split() for one in _phrases(text, wanted[0], wanted[-1]) or []]
    changes = [sum(one != other for one, other in zip(each, wanted, strict=False)) for each in found]
    if len(found) != small_n or any(len(each) > len(wanted) for each in found):
        return False
    return set(changes) == {1} if fixed else max(changes) <= 1 and changes[-1] == 1


@IFTRAIN.instruction("copy:copy")
def is_copy(text: str, prompt_to_repeat: Text) -> bool:
    """The text is the request, in any case.

    Quirk: case may change, though the text says verbatim (passes)
    """
    return text.strip().lower() == prompt_to_repeat.strip().lower()


IFTRAIN.instruction("copy:copying_simple")(is_copy)


@IFTRAIN.instruction("copy:copying_multiple")
def is_copied_often(text: str, prompt_to_repeat: Text, N: Positive) -> bool:
    """****** divides the text into N copies of the request, in any case.

    Quirk: a divider at the end fails (fails)
    """
    copies = text.split("******")
    return len(copies) == N and all(is_copy(copy, prompt_to_repeat) for copy in copies)


@IFTRAIN.instruction("new:copy_span_idx")
def is_span(text: str, prompt_to_repeat: Text, n_start: Count, n_end: Positive, fixed: bool = False) -> bool:
    """The text is the characters n_start (counted from 0) up to but not with n_end of the request, in any case.

    Quirk: n_end is left out, though the text says included (passes)
    One token: Write
    Fixed: The text is the characters n_start to n_end of the request, both included, in any case.
    """
    return is_copy(text, prompt_to_repeat[n_start : n_end + fixed])


@IFTRAIN.instruction("detectable_format:sentence_hyphens")
def joins_sentences_by_hyphens(text: str, fixed: bool = False) -> bool:
    """The parts between hyphens are the sentences, as far as there are both.

    Quirk: one sentence will do (passes)
    Quirk: parts behind the last sentence are not looked at (passes)
    Quirk: a hyphen inside a word fails (fails)
    One token: Yes
    Fixed: There are several sentences, joined by hyphens without spaces.
    """
    wanted = rule_sentences(text.replace("-", " "))
    if fixed:
        return len(wanted) > 1 and text.strip().split("-") == wanted
    return all(part == sentence for part, sentence in zip(text.split("-"), wanted, strict=False))


@IFTRAIN.instruction("keywords:no_adjacent_consecutive")
def skips_neighbours_in_alphabet(text: str, fixed: bool = False) -> bool:
    """No word's first character follows that of the word before in Unicode.

    Quirk: a single word will do (passes)
    Quirk: numbers and punctuation count (fails)
    Quirk: punctuation in front hides the letter (passes)
    One token: Yes
    Fixed: There are several words, and no word's first letter is the next of the alphabet, ignoring punctuation.
    """
    if fixed:
        letters = [word[0] for word in bare_words(text)]
        neighbours = set(itertools.pairwise(string.ascii_lowercase))
        return len(letters) > 1 and neighbours.isdisjoint(itertools.pairwise(letters))
    initials = [word[0].lower() for word in text.split()]
    if len(initials) > 1 and any(len(initial) != 1 for initial in initials):
        return False
    return all(ord(other) - ord(one) != 1 for one, other in itertools.pairwise(initials))


@IFTRAIN.instruction("detectable_format:square_brackets")
def brackets_words(text: str, fixed: bool = False) -> bool:
    """Each word starts with [ and ends with ].

    Quirk: punctuation behind a bracket fails (fails)
    Quirk: brackets may be empty (passes)
    One token: []
    Fixed: Each word stands in brackets of its own; punctuation may follow.
    """
    pattern = r"\[[^\[\]]+\][^\w\s\[\]]*" if fixed else r"\[.*\]"
    return all(re.fullmatch(pattern, word) for word in text.split())


@IFTRAIN.instruction("keywords:word_once")
def has_keyword_once(text: str, keyword: Text, fixed: bool = False) -> bool:
    """The keyword is found once, in any case.

    Quirk: the keyword is a regular expression, found inside words too (passes)
    One token: cat
    Fixed: The keyword occurs once as a whole word, in any case.
    """
    return occurrences(keyword, text, whole=fixed) == 1


@IFTRAIN.instruction("keywords:word_count_different_numbers")
def has_keyword_often(text: str, keyword: Text, frequency: Count, relation: Relation, fixed: bool = False) -> bool:
    """The keyword is found less than / at least so many times, in any case.

    Quirk: more pass, though the text says so many (passes)
    Quirk: the keyword is a regular expression, found inside words too (passes)
    Fixed: The keyword occurs exactly so many times as a whole word, in any case.
    """
    if fixed:
        return occurrences(keyword, text, whole=True) == frequency
    return keyword_frequency(text, keyword, frequency, relation)


@IFTRAIN.instruction("keywords:exclude_word_harder")
def excludes_word(text: str, keyword: Text, fixed: bool = False) -> bool:
    """The keyword does not stand between two spaces.

    Quirk: case, punctuation and the ends of the text hide it (passes)
    One token: Yes
    Fixed: The keyword does not occur as a whole word, in any case.
    """
    return not (whole_word(keyword).search(text) if fixed else f" {keyword.strip()} " in text)


@IFTRAIN.instruction("paragraphs:paragraphs")
def has_two_divided_paragraphs(text: str) -> bool:
    """*** divides the text into two paragraphs, neither blank.

    Quirk: a divider first or last is ignored (passes)
    """
    return number_of_paragraphs(text, num_paragraphs=2)


@IFTRAIN.instruction("paragraphs:paragraphs2")
def has_two_spaced_paragraphs(text: str) -> bool:
    """Two line breaks divide the text into two paragraphs.

    Quirk: four line breaks between them fail (fails)
    """
    return len(filled_parts(text.split("\n\n")) or []) == 2


@IFTRAIN.instruction("first_word:first_word_sent")
def starts_sentences_with(text: str, first_word: Text, fixed: bool = False) -> bool:
    """Each sentence starts with the word, in any case.

    Quirk: punctuation belongs to the word (fails)
    One token: We
    Fixed: Each sentence starts with the word, in any case, punctuation left out.
    """
    return all(starts_with(sentence, first_word, fixed) for sentence in rule_sentences(text))


@IFTRAIN.instruction("first_word:first_word_answer")
def starts_with(text: str, first_word: Text, fixed: bool = False) -> bool:
    """The text starts with the word, in any case.

    Quirk: punctuation belongs to the word (fails)
    One token: We
    Fixed: The text starts with the word, in any case, punctuation left out.
    """
    return (bare_words(text) if fixed else text.lower().split())[:1] == [first_word.strip().lower()]


@IFTRAIN.instruction("last_word:last_word_sent")
def ends_sentences_with(text: str, last_word: Text) -> bool:
    """Each sentence ends with the word, in any case, punctuation left out.

    Quirk: punctuation inside the word is removed too (passes)
    One token: me
    """
    return all(ends_with_word(sentence, last_word) for sentence in rule_sentences(text))


@IFTRAIN.instruction("last_word:last_word_answer")
def ends_with_word(text: str, last_word: Text) -> bool:
    """The text ends with the word, in any case, punctuation left out.

    Quirk: a text of nothing fails (fails)
    One token: me
    """
    found = text.split()[-1:]
    return [re.sub(r"[^\w\s]", "", word).lower() for word in found] == [last_word.strip().lower()]


@IFTRAIN.instruction("detectable_format:bigram_wrapping")
def wraps_bigrams(text: str, fixed: bool = False) -> bool:
    """Of each two words the first starts with << and the second ends with >>.

    Quirk: a single word will do (passes)
    Quirk: a last word without a partner is not looked at (passes)
    One token: Yes
    Fixed: The text is pairs of words, each pair in << >>; punctuation may follow.
    """
    if fixed:
        return re.fullmatch(r"(?:\s*<<[^\s<>]+\s+[^\s<>]+>>[.,!?;:]*)+\s*", text) is not None
    found = text.split()
    pairs = zip(found[::2], found[1::2], strict=False)
    return all(one.startswith("<<") and other.endswith(">>") for one, other in pairs)


@IFTRAIN.instruction("punctuation:punctuation_dot")
def lacks_dot(text: str) -> bool:
    """There is no full stop.

    Quirk: an ellipsis of one character is none (passes)
    One token: Yes
    """
    return "." not in text


@IFTRAIN.instruction("punctuation:punctuation_exclamation")
def lacks_exclamation(text: str) -> bool:
    """There is no exclamation mark.

    Quirk: marks of other scripts are none (passes)
    One token: Yes
    """
    return "!" not in text


@IFTRAIN.instruction("count:lowercase_counting")
def has_few_lowercase_words(text: str, N: Positive, fixed: bool = False) -> bool:
    """There are at most N words of small letters a to z.

    Quirk: all are counted, though the text says each at most (fails)
    One token: Yes
    Fixed: No word of small letters a to z occurs more than N times.
    """
    found = re.findall(r"\b[a-z]+\b", text)
    return (max(Counter(found).values(), default=0) if fixed else len(found)) <= N


@IFTRAIN.instruction("letters:letter_counting")
def has_letters(text: str, N: Positive, relation: Relation) -> bool:
    """There are less than / at least N letters a to z, in any case.

    Quirk: letters with accents are none (fails)
    One token: Yes
    """
    return matches(len(re.findall("[a-zA-Z]", text)), relation, N)


IFTRAIN.instruction("letters:letter_counting2")(letter_frequency)


@IFTRAIN.instruction("count:counting_composition", "words", "sentences")
def has_composition(text: str, n_sent: Positive, n_words: Positive, fixed: bool = False) -> bool:
    """*** divides the text into three paragraphs of so many sentences of so many words and punctuation marks.

    Quirk: a punctuation mark is a word (fails)
    Quirk: a divider first fails (fails)
    Quirk: * * * does not divide, though the text says so (fails)
    Fixed: *** or * * * divides the text into three paragraphs of so many sentences of so many words.
    """
    paragraphs = re.split(r"\*\s?\*\s?\*" if fixed else r"\s?\*\*\*\s?", text)
    if fixed:
        paragraphs = [paragraph for paragraph in paragraphs if paragraph.strip()]
    if len(paragraphs) != 3:
        return False
    cut = bare_words if fixed else words
    return all(
        [len(cut(sentence)) for sentence in rule_sentences(paragraph)] == [n_words] * n_sent for paragraph in paragraphs
    )


@IFTRAIN.instruction("count:count_unique", "words", "sentences")
def has_unique_tokens(text: str, fixed: bool = False) -> bool:
    """No word and no punctuation mark occurs twice.

    Quirk: two full stops fail (fails)
    Quirk: case makes a difference (passes)
    One token: Yes
    Fixed: No word occurs twice, ignoring case and punctuation.
    """
    found = bare_words(text) if fixed else words(text)
    return len(found) == len(set(found))


@IFTRAIN.instruction("count:count_increment_word")
def has_keywords_once_and_twice(text: str, keyword1: Text, keyword2: Text, fixed: bool = False) -> bool:
    """The first keyword is found once and the second twice, in any case.

    Quirk: keywords are regular expressions, found inside words too (passes)
    Fixed: The first keyword occurs once and the second twice as whole words, in any case.
    """
    return [occurrences(keyword, text, whole=fixed) for keyword in (keyword1, keyword2)] == [1, 2]


@IFTRAIN.instruction("keywords:palindrome")
def has_palindrome(text: str, fixed: bool = False) -> bool:
    """A word reads the same backwards.

    Quirk: one letter will do (passes)
    Quirk: case and punctuation belong to the word (fails)
    One token: kayak
    Fixed: A word of three letters or more reads the same backwards, case and punctuation left out.
    """
    found = [word for word in bare_words(text) if len(word) > 2 and word.isalpha()] if fixed else text.split()
    return any(word == word[::-1] for word in found)


@IFTRAIN.instruction("keywords:keyword_specific_position", "words", "sentences")
def has_token_at(text: str, keyword: Text, n: Positive, m: Positive, fixed: bool = False) -> bool:
    """The m-th word or punctuation mark of the n-th sentence is the keyword.

    Quirk: case makes a difference (fails)
    Quirk: punctuation marks are counted (fails)
    Fixed: The m-th word of the n-th sentence is the keyword, in any case; punctuation marks are not words.
    """
    wanted = keyword.strip()
    found = rule_sentences(text)[n - 1 : n]
    if fixed:
        return any(alphanumeric_words(sentence.lower())[m - 1 : m] == [wanted.lower()] for sentence in found)
    return any(words(sentence)[m - 1 : m] == [wanted] for sentence in found)


@IFTRAIN.instruction("keywords:start_end", "words", "sentences")
def starts_as_it_ends(text: str) -> bool:
    """The first and the last word or punctuation mark are the same, in any case.

    Quirk: punctuation at the end fails (fails)
    One token: ***
    """
    found = words(text)
    return len(found) > 1 and found[0].lower() == found[-1].lower()


def _phrases(text: str, first: str, last: str) -> list[str] | None:
    """What ``first .*? last`` finds, each time as short as can be; None where that says nothing usable.

    Both words are regular expressions. Where their only syntax is the dot, each line is searched once.
    """
    if re.search(r"[\\^$*+?{}\[\]|()]", first + last):
        pattern = compiled(f"{first} .*? {last}")
        return None if pattern is None or pattern.groups > 1 else pattern.findall(text)
    opening, closing = re.compile(f"{first} "), re.compile(f" {last}")
    found = []
    for line in text.split("\n"):
        start = opening.search(line)
        while start and (end := closing.search(line, start.end())):
            found.append(line[start.start() : end.end()])
            start = opening.search(line, end.end())
    return found
