"""The 29 training instructions of IFBench (IFTrain, Pyatkin et al. 2025, arXiv:2507.02833) and their repairs.

The table at the end says of every check what it does, and shows it by examples that are tests.
"""

import itertools
import re
import string
from collections import Counter
from collections.abc import Sequence

from logitless.rewards.instructions.ifeval import (
    compiled,
    letter_frequency,
    matches,
    number_of_paragraphs,
    whole_word,
)
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
from logitless.rewards.instructions.text import bare, rule_sentences, words, words_without_signs

_SPLIT_SIX = "******"


def repeats_phrase(text: str, phrase: str, small_n: int) -> bool:
    reference = phrase.split()
    found = _phrases(text, reference[0], reference[-1])
    if found is None or len(found) != small_n:
        return False
    changes = [_changes(one.split(), reference) for one in found]
    return all(change is not None and change <= 1 for change in changes) and changes[-1] == 1


def repeats_phrase_with_inner_changes(text: str, phrase: str, small_n: int) -> bool:
    reference = phrase.split()
    tokens = [bare(word) for word in text.split()]
    plain = [bare(word) for word in reference]
    size = len(plain)
    windows = (tokens[start : start + size] for start in range(len(tokens) - size + 1))
    found = [window for window in windows if (window[0], window[-1]) == (plain[0], plain[-1])]
    return len(found) == small_n and all(_changes(window, plain) == 1 for window in found)


def is_copy(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower() == prompt_to_repeat.strip().lower()


def is_copied_often(text: str, prompt_to_repeat: str, N: int) -> bool:
    copies = text.split(_SPLIT_SIX)
    return len(copies) == N and all(is_copy(copy, prompt_to_repeat) for copy in copies)


def is_span(text: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    return is_copy(text, prompt_to_repeat[n_start:n_end])


def is_inclusive_span(text: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    return is_copy(text, prompt_to_repeat[n_start : n_end + 1])


def joins_sentences_by_hyphens(text: str) -> bool:
    wanted = rule_sentences(text.replace("-", " "))
    return all(part == sentence for part, sentence in zip(text.split("-"), wanted, strict=False))


def joins_all_sentences_by_hyphens(text: str) -> bool:
    wanted = rule_sentences(text.replace("-", " "))
    return len(wanted) > 1 and text.strip().split("-") == wanted


def skips_neighbours_in_alphabet(text: str) -> bool:
    initials = [word[0].lower() for word in text.split()]
    if len(initials) > 1 and any(len(initial) != 1 for initial in initials):
        return False
    return all(ord(other) - ord(one) != 1 for one, other in itertools.pairwise(initials))


def skips_neighbouring_letters(text: str) -> bool:
    initials = [bare(word).lower()[:1] for word in text.split() if bare(word)]
    neighbours = set(itertools.pairwise(string.ascii_lowercase))
    return len(initials) > 1 and not any(pair in neighbours for pair in itertools.pairwise(initials))


def brackets_words(text: str) -> bool:
    return all(word[0] == "[" and word[-1] == "]" for word in text.split())


def brackets_filled_words(text: str) -> bool:
    return all(re.fullmatch(r"\[[^\[\]]+\][^\w\s\[\]]*", word) for word in text.split())


def has_keyword_once(text: str, keyword: str) -> bool:
    return _count(keyword, text) == 1


def has_whole_keyword_once(text: str, keyword: str) -> bool:
    return len(whole_word(keyword.strip()).findall(text)) == 1


def has_keyword_often(text: str, keyword: str, frequency: int, relation: str) -> bool:
    count = _count(keyword, text)
    return count is not None and matches(count, relation, frequency)


def has_whole_keyword_exactly(text: str, keyword: str, frequency: int, **_: str) -> bool:
    return len(whole_word(keyword.strip()).findall(text)) == frequency


def excludes_spaced_word(text: str, keyword: str) -> bool:
    return f" {keyword.strip()} " not in text


def excludes_word(text: str, keyword: str) -> bool:
    return whole_word(keyword.strip()).search(text) is None


def has_two_divided_paragraphs(text: str) -> bool:
    return number_of_paragraphs(text, num_paragraphs=2)


def has_two_spaced_paragraphs(text: str) -> bool:
    parts = text.split("\n\n")
    inner_filled = all(part.strip() for part in parts[1:-1])
    return inner_filled and sum(bool(part.strip()) for part in parts) == 2


def starts_sentences_with(text: str, first_word: str) -> bool:
    return all(sentence.lower().split()[:1] == [first_word.strip().lower()] for sentence in rule_sentences(text))


def starts_sentences_with_word(text: str, first_word: str) -> bool:
    wanted = first_word.strip().lower()
    return all(_bare_words(sentence)[:1] == [wanted] for sentence in rule_sentences(text))


def starts_with(text: str, first_word: str) -> bool:
    return text.lower().split()[:1] == [first_word.strip().lower()]


def starts_with_word(text: str, first_word: str) -> bool:
    return _bare_words(text)[:1] == [first_word.strip().lower()]


def ends_sentences_with(text: str, last_word: str) -> bool:
    return all(ends_with_word(sentence, last_word) for sentence in rule_sentences(text))


def ends_with_word(text: str, last_word: str) -> bool:
    found = text.split()[-1:]
    return [re.sub(r"[^\w\s]", "", word).lower() for word in found] == [last_word.strip().lower()]


def wraps_bigrams(text: str) -> bool:
    found = text.split()
    pairs = zip(found[::2], found[1::2], strict=False)
    return all(one.startswith("<<") and other.endswith(">>") for one, other in pairs)


def wraps_all_bigrams(text: str) -> bool:
    return re.fullmatch(r"(?:\s*<<[^\s<>]+\s+[^\s<>]+>>[.,!?;:]*)+\s*", text) is not None


def lacks_dot(text: str) -> bool:
    return "." not in text


def lacks_exclamation(text: str) -> bool:
    return "!" not in text


def has_few_lowercase_words(text: str, N: int) -> bool:
    return len(re.findall(r"\b[a-z]+\b", text)) <= N


def repeats_few_lowercase_words(text: str, N: int) -> bool:
    return max(Counter(re.findall(r"\b[a-z]+\b", text)).values(), default=0) <= N


def has_letters(text: str, N: int, relation: str) -> bool:
    return matches(len(re.findall("[a-zA-Z]", text)), relation, N)


def has_composition(text: str, n_sent: int, n_words: int) -> bool:
    paragraphs = re.split(r"\s?\*\*\*\s?", text)
    return len(paragraphs) == 3 and all(_is_composed(paragraph, n_sent, n_words) for paragraph in paragraphs)


def has_composition_of_words(text: str, n_sent: int, n_words: int) -> bool:
    paragraphs = [part for part in re.split(r"\*\s?\*\s?\*", text) if part.strip()]
    if len(paragraphs) != 3:
        return False
    counts = [[len(_bare_words(sentence)) for sentence in rule_sentences(paragraph)] for paragraph in paragraphs]
    return all(count == [n_words] * n_sent for count in counts)


def has_unique_tokens(text: str) -> bool:
    found = words(text)
    return len(found) == len(set(found))


def has_unique_words(text: str) -> bool:
    found = _bare_words(text)
    return len(found) == len(set(found))


def has_keywords_once_and_twice(text: str, keyword1: str, keyword2: str) -> bool:
    return _count(keyword1, text) == 1 and _count(keyword2, text) == 2


def has_whole_keywords_once_and_twice(text: str, keyword1: str, keyword2: str) -> bool:
    counts = [len(whole_word(keyword.strip()).findall(text)) for keyword in (keyword1, keyword2)]
    return counts == [1, 2]


def has_palindrome(text: str) -> bool:
    return any(word == word[::-1] for word in text.split())


def has_long_palindrome(text: str) -> bool:
    return any(len(word) > 2 and word.isalpha() and word == word[::-1] for word in _bare_words(text))


def has_token_at(text: str, keyword: str, n: int, m: int) -> bool:
    found = rule_sentences(text)[n - 1 : n]
    return bool(found) and words(found[0])[m - 1 : m] == [keyword.strip()]


def has_word_at(text: str, keyword: str, n: int, m: int) -> bool:
    found = rule_sentences(text)[n - 1 : n]
    return bool(found) and words_without_signs(found[0].lower())[m - 1 : m] == [keyword.strip().lower()]


def starts_as_it_ends(text: str) -> bool:
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


def _changes(found: Sequence[str], reference: Sequence[str]) -> int | None:
    """How many words differ, place by place; None where there are more of them than in the reference."""
    if len(found) > len(reference):
        return None
    return sum(one != other for one, other in zip(found, reference, strict=False))


def _count(keyword: str, text: str) -> int | None:
    """How often the regular expression is found in any case; None where it is none."""
    pattern = compiled(keyword.strip(), re.IGNORECASE)
    return None if pattern is None else sum(1 for _ in pattern.finditer(text))


def _bare_words(text: str) -> list[str]:
    return [word for word in map(bare, text.lower().split()) if word]


def _is_composed(paragraph: str, n_sent: int, n_words: int) -> bool:
    found = rule_sentences(paragraph)
    return len(found) == n_sent and all(len(words(sentence)) == n_words for sentence in found)


_PROMPT = text("prompt_to_repeat")
_KEYWORD = text("keyword")
_RELATION = Argument("relation", "text", choices=RELATIONS)
_ONE_WORD = "a single word will do"
_PATTERN = "the keyword is a regular expression, found inside words too"

IFTRAIN = table(
    Instruction(
        "copy:repeat_phrase",
        "From the phrase's first to its last word there are n stretches of a line, with at most one word changed each.",
        repeats_phrase,
        (text("phrase"), integer("small_n", minimum=1)),
        passes=case("the big cat and the fat cat", phrase="the red cat", small_n=2),
        fails=case("the big cat and the very fat cat", phrase="the red cat", small_n=2),
        quirks=(
            quirk("only the last one has to differ", True, "the red cat, the fat cat", phrase="the red cat", small_n=2),
            quirk("words are regular expressions", True, "the red cut", phrase="the red c.t", small_n=1),
            quirk(
                "words before or inside others count", True, "bathe a cats, the b cat", phrase="the red cat", small_n=2
            ),
        ),
        hostile="the ",
        fixed=Repair(
            "The phrase occurs n times, each time with exactly one word changed, and not its first or last.",
            repeats_phrase_with_inner_changes,
        ),
    ),
    Instruction(
        "copy:copy",
        "The text is the request, in any case.",
        is_copy,
        (_PROMPT,),
        passes=case("write a poem.\n", prompt_to_repeat="Write a poem."),
        fails=case("Write a poem. Roses are red.", prompt_to_repeat="Write a poem."),
        quirks=(quirk("case may change, though the text says verbatim", True, "WRITE.", prompt_to_repeat="Write."),),
    ),
    Instruction(
        "copy:copying_simple",
        "The text is the request, in any case.",
        is_copy,
        (_PROMPT,),
        passes=case("write a poem.\n", prompt_to_repeat="Write a poem."),
        fails=case("Write a poem. Roses are red.", prompt_to_repeat="Write a poem."),
        quirks=(quirk("case may change, though the text says no change", True, "WRITE.", prompt_to_repeat="Write."),),
    ),
    Instruction(
        "copy:copying_multiple",
        "****** divides the text into N copies of the request, in any case.",
        is_copied_often,
        (_PROMPT, integer("N", minimum=1)),
        passes=case("Write.\n******\nwrite.", prompt_to_repeat="Write.", N=2),
        fails=case("Write.\n******\nWrite!", prompt_to_repeat="Write.", N=2),
        quirks=(
            quirk("a divider at the end fails", False, "Write.******Write.******", prompt_to_repeat="Write.", N=2),
        ),
        hostile="******",
    ),
    Instruction(
        "new:copy_span_idx",
        "The text is the characters n_start (counted from 0) up to but not with n_end of the request, in any case.",
        is_span,
        (_PROMPT, integer("n_start"), integer("n_end", minimum=1)),
        passes=case("Write", prompt_to_repeat="Write a song.", n_start=0, n_end=5),
        fails=case("Writ", prompt_to_repeat="Write a song.", n_start=0, n_end=5),
        quirks=(
            quirk(
                "n_end is left out, though the text says included",
                True,
                "Writ",
                prompt_to_repeat="Write.",
                n_start=0,
                n_end=4,
            ),
        ),
        one_token="Write",
        fixed=Repair(
            "The text is the characters n_start to n_end of the request, both included, in any case.",
            is_inclusive_span,
            passes=case("Write", prompt_to_repeat="Write a song.", n_start=0, n_end=4),
        ),
    ),
    Instruction(
        "detectable_format:sentence_hyphens",
        "The parts between hyphens are the sentences, as far as there are both.",
        joins_sentences_by_hyphens,
        passes=case("I came.-You saw.-We won."),
        fails=case("I came. You saw."),
        quirks=(
            quirk("one sentence will do", True, "I came."),
            quirk("parts behind the last sentence are not looked at", True, "I came.-You saw.-  "),
            quirk("a hyphen inside a word fails", False, "I came.-You re-did it."),
        ),
        hostile="a.-",
        one_token="Yes",
        fixed=Repair("There are several sentences, joined by hyphens without spaces.", joins_all_sentences_by_hyphens),
    ),
    Instruction(
        "keywords:no_adjacent_consecutive",
        "No word's first character follows that of the word before in Unicode.",
        skips_neighbours_in_alphabet,
        passes=case("All cats eat"),
        fails=case("All birds eat"),
        quirks=(
            quirk(_ONE_WORD, True, "Yes"),
            quirk("numbers and signs count", False, "1 2"),
            quirk("a sign in front hides the letter", True, '"all birds'),
        ),
        one_token="Yes",
        fixed=Repair(
            "There are several words, and no word's first letter is the next of the alphabet, signs left out.",
            skips_neighbouring_letters,
        ),
    ),
    Instruction(
        "detectable_format:square_brackets",
        "Each word starts with [ and ends with ].",
        brackets_words,
        passes=case("[Cats] [sleep]"),
        fails=case("[Cats] sleep"),
        quirks=(
            quirk("punctuation behind a bracket fails", False, "[Cats] [sleep]."),
            quirk("brackets may be empty", True, "[]"),
        ),
        hostile="[a] ",
        one_token="[]",
        fixed=Repair("Each word stands in brackets of its own; punctuation may follow.", brackets_filled_words),
    ),
    Instruction(
        "keywords:word_once",
        "The keyword is found once, in any case.",
        has_keyword_once,
        (_KEYWORD,),
        passes=case("A cat.", keyword="cat"),
        fails=case("A cat, a cat.", keyword="cat"),
        quirks=(quirk(_PATTERN, True, "A scatter.", keyword="c.t"),),
        one_token="cat",
        fixed=Repair("The keyword occurs once as a whole word, in any case.", has_whole_keyword_once),
    ),
    Instruction(
        "keywords:word_count_different_numbers",
        "The keyword is found less than / at least so many times, in any case.",
        has_keyword_often,
        (_KEYWORD, integer("frequency"), _RELATION),
        passes=case("A cat, a cat.", keyword="cat", frequency=2, relation="at least"),
        fails=case("A cat.", keyword="cat", frequency=2, relation="at least"),
        quirks=(
            quirk(
                "more will do, though the text says so many",
                True,
                "cat cat",
                keyword="cat",
                frequency=1,
                relation="at least",
            ),
            quirk(_PATTERN, True, "scatter", keyword="c.t", frequency=1, relation="at least"),
        ),
        fixed=Repair(
            "The keyword occurs exactly so many times as a whole word, in any case.", has_whole_keyword_exactly
        ),
    ),
    Instruction(
        "keywords:exclude_word_harder",
        "The keyword does not stand between two spaces.",
        excludes_spaced_word,
        (_KEYWORD,),
        passes=case("No dogs here.", keyword="cat"),
        fails=case("No cat here.", keyword="cat"),
        quirks=(
            quirk("case, punctuation and the ends of the text hide it", True, "cat, Cat. the cat.", keyword="cat"),
        ),
        one_token="Yes",
        fixed=Repair("The keyword does not occur as a whole word, in any case.", excludes_word),
    ),
    Instruction(
        "paragraphs:paragraphs",
        "*** divides the text into two paragraphs, neither blank.",
        has_two_divided_paragraphs,
        passes=case("One\n***\nTwo"),
        fails=case("One\n\nTwo"),
        quirks=(quirk("a divider first or last is left out of account", True, "***\nOne\n***\nTwo\n***"),),
        hostile="***",
    ),
    Instruction(
        "paragraphs:paragraphs2",
        "Two line breaks divide the text into two paragraphs.",
        has_two_spaced_paragraphs,
        passes=case("One\n\nTwo\n\n"),
        fails=case("One\nTwo"),
        quirks=(quirk("four line breaks between them fail", False, "One\n\n\n\nTwo"),),
        hostile="\n",
    ),
    Instruction(
        "first_word:first_word_sent",
        "Each sentence starts with the word, in any case.",
        starts_sentences_with,
        (text("first_word"),),
        passes=case("We came. We won.", first_word="we"),
        fails=case("We came. They won.", first_word="we"),
        quirks=(quirk("punctuation belongs to the word", False, "We, too, came. We won.", first_word="we"),),
        hostile="we. ",
        one_token="We",
        fixed=Repair(
            "Each sentence starts with the word, in any case, punctuation left out.", starts_sentences_with_word
        ),
    ),
    Instruction(
        "first_word:first_word_answer",
        "The text starts with the word, in any case.",
        starts_with,
        (text("first_word"),),
        passes=case("We came.", first_word="we"),
        fails=case("So we came.", first_word="we"),
        quirks=(quirk("punctuation belongs to the word", False, "We, too, came.", first_word="we"),),
        one_token="We",
        fixed=Repair("The text starts with the word, in any case, punctuation left out.", starts_with_word),
    ),
    Instruction(
        "last_word:last_word_sent",
        "Each sentence ends with the word, in any case, punctuation left out.",
        ends_sentences_with,
        (text("last_word"),),
        passes=case("See me. Hear me!", last_word="Me"),
        fails=case("See me. Hear them!", last_word="Me"),
        quirks=(quirk("signs inside the word are taken out too", True, "See m-e.", last_word="me"),),
        hostile="me. ",
        one_token="me",
    ),
    Instruction(
        "last_word:last_word_answer",
        "The text ends with the word, in any case, punctuation left out.",
        ends_with_word,
        (text("last_word"),),
        passes=case("See me!", last_word="Me"),
        fails=case("See me go!", last_word="Me"),
        quirks=(quirk("a text of nothing fails", False, " ", last_word="me"),),
        one_token="me",
    ),
    Instruction(
        "detectable_format:bigram_wrapping",
        "Of each two words the first starts with << and the second ends with >>.",
        wraps_bigrams,
        passes=case("<<I am>> <<at home>>"),
        fails=case("<<I am>> at home"),
        quirks=(
            quirk(_ONE_WORD, True, "Yes"),
            quirk("a last word without a partner is not looked at", True, "<<I am>> home"),
        ),
        one_token="Yes",
        fixed=Repair("The text is pairs of words, each pair in << >>; punctuation may follow.", wraps_all_bigrams),
    ),
    Instruction(
        "punctuation:punctuation_dot",
        "There is no full stop.",
        lacks_dot,
        passes=case("No stop"),
        fails=case("A stop."),
        quirks=(quirk("an ellipsis of one character is none", True, "Well…"),),
        one_token="Yes",
    ),
    Instruction(
        "punctuation:punctuation_exclamation",
        "There is no exclamation mark.",
        lacks_exclamation,
        passes=case("No bang"),
        fails=case("A bang!"),
        quirks=(quirk("marks of other scripts are none", True, "好！"),),
        one_token="Yes",
    ),
    Instruction(
        "count:lowercase_counting",
        "There are at most N words of small letters a to z.",
        has_few_lowercase_words,
        (integer("N", minimum=1),),
        passes=case("One two Three four", N=2),
        fails=case("One two three four", N=2),
        quirks=(quirk("all are counted, though the text says each at most", False, "one two three", N=2),),
        one_token="Yes",
        fixed=Repair(
            "No word of small letters a to z occurs more than N times.",
            repeats_few_lowercase_words,
            fails=case("one one one", N=2),
        ),
    ),
    Instruction(
        "letters:letter_counting",
        "There are less than / at least N letters a to z, in any case.",
        has_letters,
        (integer("N", minimum=1), _RELATION),
        passes=case("Abc 12", N=3, relation="at least"),
        fails=case("Abc 12", N=3, relation="less than"),
        quirks=(quirk("letters with accents are none", False, "éà", N=2, relation="at least"),),
        one_token="Yes",
    ),
    Instruction(
        "letters:letter_counting2",
        "The letter, in any case, occurs less than / at least so many times.",
        letter_frequency,
        (Argument("letter", "letter"), integer("let_frequency"), Argument("let_relation", "text", choices=RELATIONS)),
        passes=case("Tattoo", letter="t", let_frequency=3, let_relation="at least"),
        fails=case("Taboo", letter="t", let_frequency=3, let_relation="at least"),
        quirks=(
            quirk(
                "a sign is counted as it stands", True, "a#b##", letter="#", let_frequency=3, let_relation="at least"
            ),
        ),
        one_token="Tattoo",
    ),
    Instruction(
        "count:counting_composition",
        "*** divides the text into three paragraphs of so many sentences of so many words and signs.",
        has_composition,
        (integer("n_sent", minimum=1), integer("n_words", minimum=1)),
        needs=("words", "sentences"),
        passes=case("Go now.\n***\nRun home.\n***\nSleep well.", n_sent=1, n_words=3),
        fails=case("Go now.\n***\nRun home.", n_sent=1, n_words=3),
        quirks=(
            quirk("a sign is a word", False, "Go now.***Run home.***Sleep well.", n_sent=1, n_words=2),
            quirk("a divider first fails", False, "***Go now.***Run home.***Sleep well.", n_sent=1, n_words=3),
            quirk(
                "* * * does not divide, though the text says so", False, "A b.* * *C d.* * *E f.", n_sent=1, n_words=2
            ),
        ),
        hostile="a***",
        fixed=Repair(
            "*** or * * * divides the text into three paragraphs of so many sentences of so many words.",
            has_composition_of_words,
            passes=case("Go now.\n***\nRun home.\n* * *\nSleep well.", n_sent=1, n_words=2),
        ),
    ),
    Instruction(
        "count:count_unique",
        "No word and no sign occurs twice.",
        has_unique_tokens,
        needs=("words", "sentences"),
        passes=case("One, two."),
        fails=case("one two one"),
        quirks=(
            quirk("two full stops fail", False, "Go now. Run home."),
            quirk("case makes a difference", True, "One one"),
        ),
        hostile="Word. ",
        one_token="Yes",
        fixed=Repair("No word occurs twice, case and punctuation left out of account.", has_unique_words),
    ),
    Instruction(
        "count:count_increment_word",
        "The first keyword is found once and the second twice, in any case.",
        has_keywords_once_and_twice,
        (text("keyword1"), text("keyword2")),
        passes=case("A cat and two dogs: dog one.", keyword1="cat", keyword2="dog"),
        fails=case("A cat and a dog.", keyword1="cat", keyword2="dog"),
        quirks=(
            quirk(
                "keywords are regular expressions, found inside words too",
                True,
                "scat dogdog",
                keyword1="c.t",
                keyword2="dog",
            ),
        ),
        fixed=Repair(
            "The first keyword occurs once and the second twice as whole words, in any case.",
            has_whole_keywords_once_and_twice,
            passes=case("A cat, a dog and a Dog.", keyword1="cat", keyword2="dog"),
        ),
    ),
    Instruction(
        "keywords:palindrome",
        "A word reads the same backwards.",
        has_palindrome,
        passes=case("My kayak"),
        fails=case("My boat"),
        quirks=(
            quirk("one letter will do", True, "I am"),
            quirk("case and punctuation belong to the word", False, "Kayak, my boat"),
        ),
        one_token="kayak",
        fixed=Repair(
            "A word of three letters or more reads the same backwards, case and punctuation left out.",
            has_long_palindrome,
        ),
    ),
    Instruction(
        "keywords:keyword_specific_position",
        "The m-th word or sign of the n-th sentence is the keyword.",
        has_token_at,
        (_KEYWORD, integer("n", minimum=1), integer("m", minimum=1)),
        needs=("words", "sentences"),
        passes=case("I run. You eat.", keyword="eat", n=2, m=2),
        fails=case("I run. You eat.", keyword="eat", n=1, m=2),
        quirks=(
            quirk("case makes a difference", False, "I run. You EAT.", keyword="eat", n=2, m=2),
            quirk("signs are counted", False, "I run. You, eat.", keyword="eat", n=2, m=2),
        ),
        hostile="Word. ",
        fixed=Repair(
            "The m-th word of the n-th sentence is the keyword, in any case; signs are no words.", has_word_at
        ),
    ),
    Instruction(
        "keywords:start_end",
        "The first and the last word or sign are the same, in any case.",
        starts_as_it_ends,
        needs=("words", "sentences"),
        passes=case("Go, let us go"),
        fails=case("Go, let us run"),
        quirks=(quirk("punctuation at the end fails", False, "Go, let us go."),),
        hostile="Word. ",
        one_token="***",
    ),
)
