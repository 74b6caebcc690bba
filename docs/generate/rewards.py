"""The tables of ``docs/rewards.md``, from the registry and the docstrings of the checks."""

import inspect
import re
from collections.abc import Mapping

from logitless.rewards.instructions import IFBENCH, IFEVAL, IFTRAIN, Instruction

SECTIONS: Mapping[str, Mapping[str, Instruction]] = {"IFEval": IFEVAL, "IFTrain": IFTRAIN, "IFBench": IFBENCH}


def page(text: str) -> str:
    """The page with its tables, which end it."""
    sections = []
    for title, suite in SECTIONS.items():
        rows = [_row(instruction, f"{name}@fixed" in suite) for name, instruction in suite.items() if "@" not in name]
        sections.append("\n".join([f"## {title}\n", "| id (arguments) | rule |\n|---|---|", *rows]))
    return text.partition("## IFEval\n")[0] + "\n\n".join(sections) + "\n"


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
