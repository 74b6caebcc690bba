"""Suites of checkable instructions: the constraints of a prompt, and their strict and loose verdicts.

``ifeval`` (25 ids) and ``iftrain`` (29) are for training, ``ifbench`` (58) is held out; ``ifeval_basic`` and
``ifbench_easy`` are subsets, and ``instructions`` is the union. Repaired ids (``<id>@fixed``) belong to the same suite.
Worker processes import this file, so that it must import quickly.
"""

import difflib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from logitless.errors import DataError, UnavailableError
from logitless.rewards.instructions import IFBENCH, IFEVAL, IFTRAIN, INSTRUCTIONS, Instruction

SuiteName: TypeAlias = Literal["ifeval", "iftrain", "ifbench", "ifeval_basic", "ifbench_easy", "instructions"]

_EASY = {
    "count": "word_count_range unique_word_count conjunctions person_names numbers punctuation keywords_multiple",
    "ratio": "overlap",
    "words": "alphabet consonants palindrome",
    "format": "parentheses quotes options list thesis output_template",
    "repeat": "repeat_change repeat_simple repeat_span",
}


def _part(suite: Mapping[str, Instruction], ids: Iterable[str]) -> dict[str, Instruction]:
    chosen = set(ids)
    return {name: instruction for name, instruction in suite.items() if name.removesuffix("@fixed") in chosen}


SUITES: dict[SuiteName, Mapping[str, Instruction]] = {
    "ifeval": IFEVAL,
    "iftrain": IFTRAIN,
    "ifbench": IFBENCH,
    "ifeval_basic": _part(IFEVAL, (name for name, instruction in IFEVAL.items() if not instruction.needs)),
    "ifbench_easy": _part(IFBENCH, (f"{family}:{name}" for family, names in _EASY.items() for name in names.split())),
    "instructions": INSTRUCTIONS,
}


PATTERN_ARGUMENTS = frozenset(
    {"keyword", "keywords", "forbidden_words", "postscript_marker", "section_spliter", "phrase"}
)
"""Arguments that official checks compile as regular expressions, without escaping."""


class OverlapWarning(UserWarning):
    """Instructions are both trained on and evaluated."""


@dataclass(frozen=True)
class Constraint:
    """An instruction with the arguments of one prompt.

    Example:
        >>> constraint = Constraint(IFEVAL["punctuation:no_comma"], {})
        >>> constraint.is_satisfied("Well, no."), constraint.is_satisfied("Well, *no*", loose=True)
        (False, False)
        >>> constraint.is_satisfied("Sure, here it is:\\nNo comma.", loose=True)
        True
    """

    instruction: Instruction
    arguments: Mapping[str, Any]

    @property
    def may_backtrack(self) -> bool:
        """Whether an argument is a pattern with a repetition, whose search may take exponential time.

        Example:
            >>> Constraint(IFEVAL["keywords:existence"], {"keywords": ["a.c", "(a+)+b"]}).may_backtrack
            True
        """
        given = [value for name, value in self.arguments.items() if name in PATTERN_ARGUMENTS]
        patterns = [pattern for value in given for pattern in ([value] if isinstance(value, str) else value)]
        return any(re.search(r"[*+{?]", pattern) for pattern in patterns)

    def is_satisfied(self, text: str, *, loose: bool = False) -> bool:
        """The strict verdict; or the loose one: whether any of ``loose_variants`` passes.

        Raises:
            UnavailableError: a package or data is absent that the check needs.
        """
        variants = loose_variants(text) if loose else [text]
        return any(self.instruction.follows(variant, self.arguments) for variant in variants)


def loose_variants(text: str) -> list[str]:
    """The text, and the text without its first line, its last line, and both; each with and without asterisks.

    Variants without a line are stripped. Equal variants are returned once.

    Example:
        >>> loose_variants("Sure:\\n*Yes*")
        ['Sure:\\n*Yes*', 'Sure:\\nYes', '*Yes*', 'Yes', 'Sure:', '']
    """
    lines = text.split("\n")
    wholes = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys(variant for whole in wholes for variant in (whole, whole.replace("*", ""))))


def read_constraints(ids: Any, arguments: Any, *, suite: SuiteName, row: str) -> tuple[Constraint, ...]:
    """The constraints of one prompt, in order; ids may repeat.

    Args:
        ids: the row's ``instruction_id_list``.
        arguments: the row's ``kwargs``, one mapping an id; null means absent.
        suite: that the ids must belong to.
        row: its name in errors.

    Raises:
        DataError: an unknown id, arguments that are absent, unknown or of another type, or lists of different lengths.

    Example:
        >>> read_constraints(["count:numbers"], [{"N": 2.0}], suite="ifbench", row="row 1")[0].arguments
        {'N': 2}
    """
    if not isinstance(ids, list | tuple) or not isinstance(arguments, list | tuple) or len(ids) != len(arguments):
        raise DataError(
            needed=f"a list of instruction ids and as many arguments in {row}",
            given=f"{ids!r:.80} and {arguments!r:.80}",
            remedy="Give instruction_id_list and kwargs as lists of the same length.",
        )
    if not ids:
        raise DataError(needed=f"an instruction in {row}", given="an empty list", remedy="Leave the row out.")
    return tuple(_read_constraint(*pair, suite, row) for pair in zip(ids, arguments, strict=True))


def score_response(
    suite: SuiteName, ids: Sequence[str], arguments: Sequence[Any], response: str, loosely: bool = True
) -> dict[str, Any]:
    """Strict and, if ``loosely``, loose verdicts of every constraint of a response; ``missing`` if a check cannot run.

    For worker processes: the result is plain data.

    Example:
        >>> score_response("ifeval", ["punctuation:no_comma"], [{}], "Well, yes:\\nYes.")
        {'strict': [False], 'loose': [True]}
    """
    constraints = read_constraints(ids, arguments, suite=suite, row="the row")
    try:
        strict = [constraint.is_satisfied(response) for constraint in constraints]
        if not loosely:
            return {"strict": strict}
        loose = [
            passed or constraint.is_satisfied(response, loose=True)
            for passed, constraint in zip(strict, constraints, strict=True)
        ]
    except UnavailableError as error:
        return {"missing": str(error)}
    return {"strict": strict, "loose": loose}


def overlap(reward_ids: Iterable[str], evaluation_ids: Iterable[str]) -> tuple[str, ...]:
    """The evaluated ids that are also trained on; a repaired id counts as its official one.

    Example:
        >>> overlap(["count:numbers@fixed", "copy:copy"], IFBENCH)
        ('count:numbers',)
    """
    return tuple(sorted(_official(reward_ids) & _official(evaluation_ids)))


def warn_of_overlap(reward_ids: Iterable[str], evaluation_ids: Iterable[str]) -> None:
    """Warn if evaluated ids are also trained on: the evaluation then does not measure generalisation."""
    shared = overlap(reward_ids, evaluation_ids)
    if shared:
        warnings.warn(
            f"{len(shared)} instruction ids are trained on and evaluated: {', '.join(shared)}. "
            "Train on ifeval and iftrain and hold out ifbench to measure generalisation.",
            OverlapWarning,
            stacklevel=2,
        )


def _read_constraint(instruction_id: Any, given: Any, suite: SuiteName, row: str) -> Constraint:
    known = SUITES[suite]
    if not isinstance(instruction_id, str) or instruction_id not in known:
        close = difflib.get_close_matches(str(instruction_id), known, n=1)
        raise DataError(
            needed=f"an instruction id of suite {suite!r} in {row}",
            given=repr(instruction_id),
            remedy=f"Did you mean {close[0]!r}?" if close else "See the table of ids in docs/rewards.md.",
        )
    if not isinstance(given, Mapping):
        raise DataError(
            needed=f"the arguments of {instruction_id!r} in {row} as a mapping",
            given=f"{given!r:.80}",
            remedy="Give {} where there are none.",
        )
    return Constraint(known[instruction_id], known[instruction_id].read_arguments(given, row))


def _official(ids: Iterable[str]) -> set[str]:
    return {name.removesuffix("@fixed") for name in ids}
