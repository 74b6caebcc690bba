"""``docs/rewards.md``, written from the registry: ``python -m logitless.rewards.instructions.document [--check]``."""

import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from logitless import pages
from logitless.rewards.instructions import IFBENCH, IFEVAL, IFTRAIN, Instruction

PAGE = Path("docs/rewards.md")

INTRODUCTION = """\
# Checkable instructions

<!-- Made by `python -m logitless.rewards.instructions.document` from the docstrings of the checks. -->

A suite scores a completion by the instructions of its prompt, as IFEval and IFBench do. The columns of the data are those of the
official files: `instruction_id_list` names the instructions, `kwargs` holds their arguments. In a recipe a suite is a
reward, the fraction of the instructions that the completion follows (`reduction: all`: 1 where it follows every one):

    rewards:
      - {name: ifeval}
      - {name: minimum_length, minimum: 20, unit: words}
      - {name: relevance, share: 0.1}

`logitless score` scores a file of responses, strict and loose, over prompts and over instructions:

    logitless score --suite ifbench --prompts prompts.jsonl --responses responses.jsonl --json out.jsonl

| suite | instructions |
|---|---|
| `ifeval` | the 25 of IFEval |
| `iftrain` | 29 that IFBench's authors train on |
| `ifbench` | the 58 of IFBench, held out |
| `ifeval_basic` | 20 of IFEval, standard library only |
| `ifbench_easy` | 20 of IFBench |
| `instructions` | all 112 |

- **Strict:** the check holds. **Loose:** it holds with or without first line, last line and asterisks.
- **Official verdicts.** An id gives the official verdict, odd ones included, so that numbers compare; a check that raises is
  False. IFBench's checks are those of its published prompts. Where check and text of an instruction
  disagree (†), `<id>@fixed` does what the text says. The docstring of each check lists its surprising verdicts and the repair.
- **Case** is ignored where ° says so.
- **One word is enough** (‡): such instructions reward saying nothing. Put a gate beside them, as above; a shut gate makes
  the whole reward 0.
- **Needs.** All arguments. `pip install 'logitless[rewards]'` brings `nltk`, `langdetect`, `emoji` and `syllapy`. `words:start_verb` also needs nltk's
  `averaged_perceptron_tagger_eng`; without it the verdict is `missing`. Nothing is downloaded.
- **Held out.** A recipe that trains on an instruction that it holds out gives a warning.
"""  # noqa: E501

SECTIONS: Mapping[str, Mapping[str, Instruction]] = {"IFEval": IFEVAL, "IFTrain": IFTRAIN, "IFBench": IFBENCH}


def page() -> str:
    """The text of the page."""
    sections = []
    for title, suite in SECTIONS.items():
        rows = [_row(instruction, f"{name}@fixed" in suite) for name, instruction in suite.items() if "@" not in name]
        sections.append("\n".join([f"\n## {title}\n", "| id (arguments) | rule |\n|---|---|", *rows]))
    return INTRODUCTION + "\n".join(sections) + "\n"


def described(instruction: Instruction) -> tuple[str, dict[str, bool], str | None]:
    """The rule, each quirk with its verdict, and the one token of an instruction, as its check's docstring has them.

    Example:
        >>> from logitless.rewards.instructions import INSTRUCTIONS
        >>> described(INSTRUCTIONS["punctuation:no_comma"])
        ('There is no comma.', {'commas of other scripts are none': True}, 'yes')
        >>> described(INSTRUCTIONS["punctuation:no_comma@fixed"])
        ('There is no comma of any script.', {}, None)
    """
    official, _, notes = inspect.cleandoc(instruction.check.__doc__ or "").partition("\n\n")
    said = [line.partition(": ")[::2] for line in notes.split("\n")]
    if instruction.id.endswith("@fixed"):
        return next(rule for name, rule in said if name == "Fixed"), {}, None
    quirks = [note.rpartition(" (")[::2] for name, note in said if name == "Quirk"]
    one_token = next((token for name, token in said if name == "One token"), None)
    return official, {note: verdict == "passes)" for note, verdict in quirks}, one_token


def _row(instruction: Instruction, repaired: bool) -> str:
    rule, _, one_token = described(instruction)
    told = rule.replace(", in any case", "")
    marks = ("†" if repaired else "") + ("" if one_token is None else "‡") + ("" if told == rule else "°")
    arguments = f"({', '.join(instruction.arguments)})" if instruction.arguments else ""
    return f"| `{instruction.id}{arguments}`{marks} | {_plain(told)} |"


def _plain(text: str) -> str:
    """The text with what Markdown would take as markup escaped."""
    return re.sub(r"([\\|*_<>\[\]`])", r"\\\1", text)


def main() -> int:
    """Write the page, or with ``--check`` say whether it is current."""
    return pages.main("logitless.rewards.instructions.document", pages.text_page(PAGE, page))


if __name__ == "__main__":
    sys.exit(main())
