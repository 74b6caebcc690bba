"""One checkable instruction as data: the rule, its arguments, the check, and the cases that show what it does.

An official id keeps the official verdicts, odd ones included; the odd ones are listed as quirks, each with a text that
shows it. Where check and text of an instruction disagree, ``<id>@fixed`` stands beside it and does what the text says.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from logitless.errors import DataError

ArgumentKind: TypeAlias = Literal["text", "texts", "letter", "integer", "number"]
Need: TypeAlias = Literal["sentences", "words", "tagger", "stop words", "emoji", "syllables", "language"]
Check: TypeAlias = Callable[..., bool]

RELATIONS = ("less than", "at least")


@dataclass(frozen=True)
class Argument:
    """One argument of an instruction.

    Args:
        name: as in the official files.
        kind: ``text`` (not blank), ``texts`` (a list of them, not empty), ``letter`` (one character), ``integer``
            (``5.0`` is one, ``True`` is not) or ``number``.
        minimum: the least integer or number.
        choices: the only texts allowed, where not empty.

    Example:
        >>> Argument("N", "integer", minimum=1).read(5.0)
        5
        >>> Argument("N", "integer", minimum=1).complaint(0)
        'an integer of at least 1'
    """

    name: str
    kind: ArgumentKind
    minimum: int = 0
    choices: tuple[str, ...] = ()

    def complaint(self, value: Any) -> str | None:
        """What was needed, where the value is not that."""
        if self.choices:
            return None if value in self.choices else "one of " + ", ".join(repr(choice) for choice in self.choices)
        if self.kind == "text":
            return None if _is_text(value) else "a text that is not blank"
        if self.kind == "texts":
            fine = isinstance(value, list | tuple) and len(value) > 0 and all(_is_text(item) for item in value)
            return None if fine else "a list of texts that are not blank"
        if self.kind == "letter":
            return None if isinstance(value, str) and len(value) == 1 else "one character"
        fine = isinstance(value, int | float) and not isinstance(value, bool) and self.minimum <= value < float("inf")
        if self.kind == "integer":
            fine = fine and value == int(value)
        return None if fine else f"{'an integer' if self.kind == 'integer' else 'a number'} of at least {self.minimum}"

    def read(self, value: Any) -> Any:
        """The value as the check takes it."""
        return int(value) if self.kind == "integer" else value


@dataclass(frozen=True)
class Case:
    """A text and the arguments it is checked with."""

    text: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Quirk:
    """A verdict that a reader of the instruction would not expect.

    Args:
        note: what the official check does.
        verdict: what it says of the case.
        case: the text that shows it.
    """

    note: str
    verdict: bool
    case: Case


@dataclass(frozen=True)
class Repair:
    """What ``<id>@fixed`` does instead. Cases and needs that are None are those of the official id."""

    rule: str
    check: Check
    passes: Case | None = None
    fails: Case | None = None
    needs: tuple[Need, ...] | None = None


@dataclass(frozen=True)
class Instruction:
    """A checkable instruction.

    Args:
        id: ``family:name``, as in the official files.
        rule: when a text follows it, in one sentence.
        check: ``check(text, **arguments) -> bool``; pure, linear in the text, and never raising because of it.
        arguments: all of them are required.
        needs: what the check reads besides the text.
        passes: a case with the verdict True.
        fails: a case with the verdict False.
        quirks: what is unexpected in the official check.
        hostile: repeated, it is the input that costs the official check, or this one, most.
        one_token: an answer of one word, number or sign that is accepted with the arguments of ``passes`` or with
            arguments of the official set; None where there is none.
        consistent: what is wrong with arguments that are right one by one, or None.
        fixed: the repaired check, where the official one differs from the instruction's text.

    Example:
        >>> from logitless.rewards.instructions import INSTRUCTIONS
        >>> INSTRUCTIONS["punctuation:no_comma"].follows("No comma here.", {})
        True
    """

    id: str
    rule: str
    check: Check
    arguments: tuple[Argument, ...] = ()
    needs: tuple[Need, ...] = ()
    passes: Case = field(kw_only=True)
    fails: Case = field(kw_only=True)
    quirks: tuple[Quirk, ...] = ()
    hostile: str = "a "
    one_token: str | None = None
    consistent: Callable[..., str | None] | None = None
    fixed: Repair | None = None

    @property
    def family(self) -> str:
        """What stands before the colon."""
        return self.id.partition(":")[0]

    def follows(self, text: str, arguments: Mapping[str, Any]) -> bool:
        """The strict verdict: the text is not blank and the check holds."""
        return bool(text.strip()) and self.check(text, **arguments)

    def read_arguments(self, given: Mapping[str, Any], row: str) -> dict[str, Any]:
        """The arguments of a data row as the check takes them; null means absent, 5.0 is an integer.

        Raises:
            DataError: an argument is absent, unknown or of another type; the message names row and id.

        Example:
            >>> from logitless.rewards.instructions import INSTRUCTIONS
            >>> INSTRUCTIONS["count:numbers"].read_arguments({"N": 5.0, "keyword": None}, row="row 3")
            {'N': 5}
        """
        present = {name: value for name, value in given.items() if value is not None}
        known = {argument.name for argument in self.arguments}
        for name in present.keys() - known:
            raise self._wrong(row, f"only the arguments {sorted(known)}", f"{name!r}")
        for argument in self.arguments:
            if argument.name not in present:
                raise self._wrong(row, f"the argument {argument.name!r}", "none")
            complaint = argument.complaint(present[argument.name])
            if complaint is not None:
                raise self._wrong(row, f"{argument.name} to be {complaint}", f"{present[argument.name]!r:.80}")
        read = {argument.name: argument.read(present[argument.name]) for argument in self.arguments}
        complaint = None if self.consistent is None else self.consistent(**read)
        if complaint is not None:
            raise self._wrong(row, complaint, f"{read!r:.120}")
        return read

    def _wrong(self, row: str, needed: str, given: str) -> DataError:
        return DataError(
            needed=f"{needed} for instruction {self.id!r} in {row}",
            given=given,
            remedy="Repair the row or leave it out.",
        )


def text(name: str, *choices: str) -> Argument:
    """A text argument."""
    return Argument(name, "text", choices=choices)


def integer(name: str, minimum: int = 0) -> Argument:
    """An integer argument."""
    return Argument(name, "integer", minimum=minimum)


def case(text: str, /, **arguments: Any) -> Case:
    """A text with its arguments."""
    return Case(text, arguments)


def quirk(note: str, verdict: bool, text: str, /, **arguments: Any) -> Quirk:
    """An unexpected verdict."""
    return Quirk(note, verdict, Case(text, arguments))


def table(*instructions: Instruction) -> dict[str, Instruction]:
    """The instructions by id, each repaired one behind its official one.

    Example:
        >>> no_x = Instruction("letters:no_x", "No x.", lambda text: "x" not in text, passes=case("y"), fails=case("x"))
        >>> list(table(no_x))
        ['letters:no_x']
    """
    by_id: dict[str, Instruction] = {}
    for official in instructions:
        by_id[official.id] = official
        if official.fixed is not None:
            by_id[f"{official.id}@fixed"] = _repaired(official, official.fixed)
    return by_id


def _repaired(official: Instruction, repair: Repair) -> Instruction:
    return Instruction(
        id=f"{official.id}@fixed",
        rule=repair.rule,
        check=repair.check,
        arguments=official.arguments,
        needs=official.needs if repair.needs is None else repair.needs,
        passes=official.passes if repair.passes is None else repair.passes,
        fails=official.fails if repair.fails is None else repair.fails,
        hostile=official.hostile,
        consistent=official.consistent,
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
