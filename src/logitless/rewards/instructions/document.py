"""``docs/rewards.md``, written from the registry: ``python -m logitless.rewards.instructions.document [--check]``."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from logitless import pages
from logitless.rewards.instructions import IFBENCH, IFEVAL, IFTRAIN, Argument, Instruction

PAGE = Path("docs/rewards.md")

INTRODUCTION = """\
# Checkable instructions

This page is written from the registry; change the registry and run
`python -m logitless.rewards.instructions.document`.

A suite judges a text by the instructions of its prompt: `instruction_id_list` names them and `kwargs` holds their
arguments, as in the official files. In a recipe a suite is a reward (`name: ifeval`), the fraction of the prompt's
instructions that the completion follows, or with `reduction: all` 1 where it follows every one. `logitless score`
judges a file of responses:

    logitless score --suite ifbench --prompts prompts.jsonl --responses responses.jsonl --json out.jsonl

| suite | instructions |
|---|---|
| `ifeval` | the 25 of IFEval |
| `iftrain` | the 29 that IFBench's authors train on beside them |
| `ifbench` | the 58 of IFBench, held out from training |
| `ifeval_basic` | the 20 of IFEval that need nothing beyond the standard library |
| `ifbench_easy` | 20 of IFBench |
| `instructions` | all 112 |

**Strict:** the text is not blank and the check holds. **Loose:** the check holds for any of the whole text, the text
without its first line, its last line, or both, each as it is or without asterisks. Both are reported over prompts
(every instruction followed) and over instructions.

**Official and repaired.** An official id gives the official verdict, odd ones included, so that numbers compare; where
the official check raises, its verdict is False. The quirks below say what is odd. Where check and text of an
instruction disagree, `<id>@fixed` does what the text says. IFBench's own checks have changed since its paper; these are
those that go with its published prompts, where `repeat:repeat_span` counts characters.

**Arguments** are all required. An unknown id, an argument that is absent, unknown or of another type, and an unknown
relation are errors when the data is read; a null argument is an absent one, and `5.0` is an integer.

**Needs.** sentences and words: `nltk` (its code, without its data); language: `langdetect`, seeded; emoji: `emoji`;
syllables: `syllapy`; all of them in the extra `logitless[rewards]`. tagger: nltk's `averaged_perceptron_tagger_eng`,
which cannot be shipped; where it is absent the verdict is `missing`, never wrong. Nothing is downloaded.

**Time.** Checks are linear in the text. A keyword that holds regular-expression syntax is matched as one, as the
official checks do. Where it repeats something (`*`, `+`, `{`, `?`), the completion is judged in a worker process within
two seconds, after which it is `spoiled` and follows nothing; `logitless score` judges everything in workers.

**One token** shows an answer of one word, number or sign that follows the instruction. Such instructions reward
saying nothing: put a gate beside them. A shut gate makes the whole reward 0; its own score is logged as
`reward/minimum_length/mean`.

    rewards:
      - {name: ifeval}
      - {name: minimum_length, minimum: 20, unit: words}
      - {name: relevance, share: 0.1}

**Held out.** A recipe whose held-out prompts ask for instructions that its training prompts ask for, too, gives a
warning that lists them: their accuracy shows no generalisation to new instructions. `recipes/ifeval-tiny.yaml` is such
a recipe on purpose; what it holds out is the arguments.
"""

SECTIONS: Mapping[str, Mapping[str, Instruction]] = {"IFEval": IFEVAL, "IFTrain": IFTRAIN, "IFBench": IFBENCH}


def page() -> str:
    """The text of the page."""
    sections = []
    for title, suite in SECTIONS.items():
        rows = [_row(instruction) for instruction in suite.values()]
        head = "| id | rule | arguments | needs | quirks | one token |\n|---|---|---|---|---|---|"
        sections.append("\n".join([f"\n## {title}\n", head, *rows]))
    return INTRODUCTION + "\n".join(sections) + "\n"


def _row(instruction: Instruction) -> str:
    quirks = [f"{_plain(quirk.note)} ({'passes' if quirk.verdict else 'fails'})" for quirk in instruction.quirks]
    cells = (
        f"`{instruction.id}`",
        _plain(instruction.rule),
        "as the official id" if instruction.id.endswith("@fixed") else ", ".join(map(_argument, instruction.arguments)),
        ", ".join(instruction.needs),
        "; ".join(quirks),
        "" if instruction.one_token is None else f"`{instruction.one_token}`",
    )
    return "| " + " | ".join(cell or "–" for cell in cells) + " |"


def _argument(argument: Argument) -> str:
    if argument.choices:
        what = " or ".join(f"“{choice}”" for choice in argument.choices) if len(argument.choices) < 5 else "code"
    elif argument.kind in ("integer", "number"):
        what = f"{argument.kind} ≥ {argument.minimum}"
    else:
        what = argument.kind
    return f"`{argument.name}`: {what}"


def _plain(text: str) -> str:
    """The text with what Markdown would take as markup escaped."""
    return re.sub(r"([\\|*_<>\[\]`])", r"\\\1", text)


def main() -> int:
    """Write the page, or with ``--check`` say whether it is current."""
    return pages.main("logitless.rewards.instructions.document", pages.text_page(PAGE, page))


if __name__ == "__main__":
    sys.exit(main())
