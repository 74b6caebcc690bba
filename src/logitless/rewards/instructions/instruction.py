"""A checkable instruction is a function: its signature says what arguments it takes, its docstring what it checks.

An official id keeps the official verdicts, odd ones included. Where check and text of an instruction disagree, the
function has a parameter ``fixed``, and ``<id>@fixed`` stands beside the id and does what the text says.

The docstring of a check is written for ``docs/rewards.md``: the rule, then ``Quirk:`` (a verdict of the official check
that a reader would not expect), ``Fixed:`` (the rule of the repaired one) and ``One token:`` (an answer of one word,
number or sign that is accepted).
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from logitless.errors import DataError
from logitless.rewards.instructions.word_lists import LANGUAGES

Need: TypeAlias = Literal["sentences", "words", "tagger", "stop words", "emoji", "syllables", "language"]
Check = TypeVar("Check", bound=Callable[..., bool])

RELATIONS = ("less than", "at least")


@dataclass(frozen=True)
class Argument:
    """What an argument of an instruction may be.

    Args:
        kind: ``text`` (not blank), ``texts`` (a list of them, not empty), ``letter`` (one character), ``integer``
            (``5.0`` is one, ``True`` is not) or ``number``.
        minimum: the least integer or number.
        choices: the only texts allowed, where not empty.

    Example:
        >>> Argument("integer", minimum=1).read(5.0)
        5
        >>> Argument("integer", minimum=1).complaint(0)
        'an integer of at least 1'
    """

    kind: Literal["text", "texts", "letter", "integer", "number"]
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


Text: TypeAlias = Annotated[str, Argument("text")]
Texts: TypeAlias = Annotated[Sequence[str], Argument("texts")]
Letter: TypeAlias = Annotated[str, Argument("letter")]
Count: TypeAlias = Annotated[int, Argument("integer")]
Positive: TypeAlias = Annotated[int, Argument("integer", minimum=1)]
Number: TypeAlias = Annotated[float, Argument("number")]
Relation: TypeAlias = Annotated[str, Argument("text", choices=RELATIONS)]
Language: TypeAlias = Annotated[str, Argument("text", choices=LANGUAGES)]


@dataclass(frozen=True)
class Instruction:
    """A checkable instruction.

    Args:
        id: ``family:name``, as in the official files.
        check: ``check(text, **arguments) -> bool``; pure, linear in the text, and never raising because of it.
        arguments: by name; all of them are required.
        needs: what the check reads besides the text.
        consistent: what is wrong with arguments that are right one by one, or None.

    Example:
        >>> from logitless.rewards.instructions import INSTRUCTIONS
        >>> INSTRUCTIONS["punctuation:no_comma"].follows("No comma here.", {})
        True
    """

    id: str
    check: Callable[..., bool]
    arguments: Mapping[str, Argument]
    needs: tuple[Need, ...] = ()
    consistent: Callable[..., str | None] | None = None

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
        for name in present.keys() - self.arguments.keys():
            raise self._wrong(row, f"only the arguments {sorted(self.arguments)}", f"{name!r}")
        for name, argument in self.arguments.items():
            if name not in present:
                raise self._wrong(row, f"the argument {name!r}", "none")
            complaint = argument.complaint(present[name])
            if complaint is not None:
                raise self._wrong(row, f"{name} to be {complaint}", f"{present[name]!r:.80}")
        read = {name: argument.read(present[name]) for name, argument in self.arguments.items()}
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


class Suite(dict[str, Instruction]):
    """Instructions by id, each repaired one behind its official one.

    Example:
        >>> letters = Suite()
        >>> @letters.instruction("letters:no_x")
        ... def lacks_x(text: str, fixed: bool = False) -> bool:
        ...     return "x" not in (text.lower() if fixed else text)
        >>> {name: entry.follows("X", {}) for name, entry in letters.items()}
        {'letters:no_x': True, 'letters:no_x@fixed': False}
    """

    def instruction(
        self, name: str, *needs: Need, consistent: Callable[..., str | None] | None = None
    ) -> Callable[[Check], Check]:
        """Register a check under an official id, and its ``fixed`` form where it has one."""

        def registered(check: Check) -> Check:
            parameters = inspect.signature(check).parameters
            arguments = {
                each.name: argument
                for each in parameters.values()
                for argument in getattr(each.annotation, "__metadata__", ())
                if isinstance(argument, Argument)
            }
            self[name] = Instruction(name, check, arguments, needs, consistent)
            if "fixed" in parameters:
                repaired = functools.wraps(check)(functools.partial(check, fixed=True))
                self[f"{name}@fixed"] = Instruction(f"{name}@fixed", repaired, arguments, needs, consistent)
            return check

        return registered


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
