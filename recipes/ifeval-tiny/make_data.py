"""Writes the data and the tokenizer of ``recipes/ifeval-tiny.yaml`` beside this file; the same files every time.

A prompt asks for two or three of six IFEval constraints. No argument of a held-out prompt (number of words, end phrase,
pair of keywords) occurs in training. Training rows also hold an ``answer`` for the warm start, and it is a careless
one: it follows each constraint with probability ``FOLLOWED`` only, so imitating it knows every form and obeys rarely.
"""

import itertools
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
NUM_TRAINING, NUM_HELD_OUT = 3000, 256
FOLLOWED = 0.5
PHRASE_WORDS = (
    ["amber", "brave", "calm", "distant", "early", "gentle", "hidden", "lonely", "narrow", "quiet", "silver", "winter"],
    ["bridge", "candle", "forest", "garden", "harbor", "island", "meadow", "orchard", "river", "tower", "valley"],
)
KEYWORDS = (
    ["badger", "crow", "dolphin", "falcon", "heron", "lizard", "otter", "panther", "rabbit", "salmon", "turtle"],
    ["bread", "cheese", "ginger", "honey", "lemon", "melon", "olive", "pepper", "rice", "sugar", "walnut"],
)
STORY = [
    "we",
    "walked,",
    "along",
    "the",
    "shore",
    "and",
    "talked",
    "until",
    "all",
    "the",
    "light",
    "was",
    "gone,",
    "at",
    "last",
]
SHORT, LONG = 2, len(STORY)
NUM_WORDS = {"at least": range(8, LONG + 1), "less than": range(9, LONG + 1)}
HELD_OUT_NUM_WORDS = {"at least": {10, 13}, "less than": {11, 14}}
HELD_OUT_SHARE = 0.15


def arguments(generator: random.Random) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """For training and held out, the arguments that each id may have."""
    sides: dict[str, dict[str, list[dict[str, Any]]]] = {"training": {}, "held out": {}}
    for name, (first, second) in (("startend:end_checker", PHRASE_WORDS), ("keywords:existence", KEYWORDS)):
        pairs = list(itertools.product(first, second))
        held_out = set(generator.sample(pairs, int(HELD_OUT_SHARE * len(pairs))))
        for pair in pairs:
            given = {"end_phrase": " ".join(pair)} if name == "startend:end_checker" else {"keywords": list(pair)}
            sides["held out" if pair in held_out else "training"].setdefault(name, []).append(given)
    for relation, numbers in NUM_WORDS.items():
        for number in numbers:
            side = sides["held out" if number in HELD_OUT_NUM_WORDS[relation] else "training"]
            given = {"num_words": number, "relation": relation}
            side.setdefault("length_constraints:number_words", []).append(given)
    for side in sides.values():
        for name in ("punctuation:no_comma", "startend:quotation", "detectable_format:title"):
            side[name] = [{}]
    return sides


def request(name: str, given: dict[str, Any]) -> str:
    """A constraint in words."""
    return {
        "punctuation:no_comma": "Use no comma.",
        "startend:quotation": "Wrap it in double quotation marks.",
        "detectable_format:title": "Give it a title in double angular brackets.",
        "startend:end_checker": "End with the phrase {end_phrase}.",
        "keywords:existence": "Include the words {keywords}.",
        "length_constraints:number_words": "Use {relation} {num_words} words.",
    }[name].format(**{**given, "keywords": " ".join(given.get("keywords", ()))})


def careless_answer(constraints: dict[str, dict[str, Any]], generator: random.Random) -> str:
    """The beginning of a story that is always the same, with some of what was asked for."""
    kept = {name: given for name, given in constraints.items() if generator.random() < FOLLOWED}
    relation = kept.get("length_constraints:number_words", {}).get("relation")
    length = {"at least": LONG, "less than": SHORT}.get(relation) or generator.choice((SHORT, LONG))
    words = [*kept.get("keywords:existence", {}).get("keywords", ()), *STORY[:length]]
    words += kept.get("startend:end_checker", {}).get("end_phrase", "").split()
    text = "".join(f" {word}" for word in words)
    if "detectable_format:title" in kept or generator.random() < 0.1:
        text = f"<< a walk>>{text}"
    if "punctuation:no_comma" in kept or generator.random() < 0.1:
        text = text.replace(",", "")
    return f'"{text}"' if "startend:quotation" in kept or generator.random() < 0.1 else text


def rows(side: dict[str, list[dict[str, Any]]], count: int, generator: random.Random, *, answers: bool) -> list[Any]:
    """``count`` rows of different prompts; each has a constraint with an argument."""
    found: dict[str, Any] = {}
    while len(found) < count:
        names = generator.sample(sorted(side), generator.choice((2, 3)))
        chosen = {name: generator.choice(side[name]) for name in names}
        if not any(chosen.values()):
            continue
        prompt = " ".join(["Write a text.", *(request(*constraint) for constraint in chosen.items())]) + "\n"
        row = {"prompt": prompt, "instruction_id_list": names, "kwargs": list(chosen.values())}
        found[prompt] = row | ({"answer": careless_answer(chosen, generator)} if answers else {})
    return list(found.values())


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """One token a word with the space before it, a digit or a sign; of these texts and no others."""
    split = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|[\s\S]"), behavior="isolated")
    words = {part for text in texts for part, _ in split.pre_tokenize_str(text)}
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    """Write everything."""
    generator = random.Random(0)
    sides = arguments(generator)
    training = rows(sides["training"], NUM_TRAINING, generator, answers=True)
    held_out = rows(sides["held out"], NUM_HELD_OUT, generator, answers=False)
    for name, found in (("train", training), ("held_out", held_out)):
        (FOLDER / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found), encoding="utf-8")
    texts = [row[field] for row in (*training, *held_out) for field in ("prompt", "answer") if field in row]
    tokenizer_of(texts).save_pretrained(FOLDER / "tokenizer")


if __name__ == "__main__":
    main()
