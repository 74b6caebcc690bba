"""Writes this recipe's tokenizer and data: sums in words, and for the warm start what was said at each of two turns.

What the warm start shows is careless: it guesses without the calculator, or asks it for another sum, more often than
not. Who imitates it knows how to ask and how to read the result, and is right one time in three.

python recipes/calculator/make_data.py [FOLDER]
"""

import json
import random
import string
import sys
from pathlib import Path

from tokenizers import AddedToken

from logitless.models.char_tokenizer import character_tokenizer

PHRASES = {
    "{a} plus {b}": "{a}+{b}",
    "{a} minus {b}": "{a}-{b}",
    "{a} times {b}": "{a}*{b}",
    "{b} less than {a}": "{a}-{b}",
    "{b} taken from {a}": "{a}-{b}",
    "{b} more than {a}": "{a}+{b}",
}
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "<{{ message.role }}>{{ message.content }}{% if message.role == 'assistant' %}<eos>{% endif %}"
    "{%- endfor -%}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NUM_TRAINING, NUM_HELD_OUT, NUM_WARM_START = 2000, 300, 3000
GUESSED, MISTAKEN = 0.35, 0.35


def row(generator: random.Random) -> dict[str, str]:
    """A sum in words, how to ask a calculator for it, and what it is."""
    words = generator.choice(list(PHRASES))
    numbers = {"a": generator.randint(10, 99), "b": generator.randint(10, 99)}
    asked = PHRASES[words].format(**numbers)
    return {"prompt": words.format(**numbers), "asked": asked, "answer": str(eval(asked))}


def turns(question: dict[str, str], generator: random.Random) -> list[dict[str, object]]:
    """What a careless policy says at its turns: a call of the calculator and then what came of it, or a guess."""
    user = {"role": "user", "content": question["prompt"]}
    asked, chance = question["asked"], generator.random()
    if chance < GUESSED:
        return [{"prompt": [user], "answer": str(generator.randint(10, 9801))}]
    if chance < GUESSED + MISTAKEN:
        used = next(operator for operator in "+-*" if operator in asked)
        asked = asked.replace(used, generator.choice([other for other in "+-*" if other != used]))
    call, came = f"<calculator>{asked}</calculator>", str(eval(asked))
    told = [user, {"role": "assistant", "content": call}, {"role": "tool", "content": came}]
    return [{"prompt": [user], "answer": call}, {"prompt": told, "answer": came}]


def main(folder: Path) -> None:
    """Write everything."""
    generator = random.Random(0)
    questions: dict[str, dict[str, str]] = {}
    while len(questions) < NUM_TRAINING + NUM_HELD_OUT + NUM_WARM_START:
        made = row(generator)
        questions[made["prompt"]] = made
    rows = list(questions.values())
    training, held_out = rows[:NUM_TRAINING], rows[NUM_TRAINING : NUM_TRAINING + NUM_HELD_OUT]
    asked = [{"prompt": each["prompt"], "answer": each["answer"]} for each in training]
    kept = [{"prompt": each["prompt"], "answer": each["answer"]} for each in held_out]
    shown = [turn for each in rows[NUM_TRAINING + NUM_HELD_OUT :] for turn in turns(each, generator)]
    for name, lines in (("train", asked), ("held_out", kept), ("warm_start", shown)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    letters = sorted(set("".join(PHRASES)) & set(string.ascii_lowercase))
    tokenizer = character_tokenizer(" 0123456789+-*" + "".join(letters))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>", "<tool>"]})
    tags = ("<calculator>", "</calculator>")
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(folder / "tokenizer"))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
