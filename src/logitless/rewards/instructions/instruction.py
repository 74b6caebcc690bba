"""A checkable instruction is a function: its signature declares the arguments, its docstring the rule.

An official id gives the official verdicts, faulty ones included. If the official check does not do what the text of the
instruction says, the function has a parameter ``fixed``: the id ``<id>@fixed`` is then a check that does.

The docstrings of checks make ``docs/rewards.md``: the rule, then ``Quirk:`` (an unexpected verdict of the official
check), ``Fixed:`` (the rule of the repaired check) and ``One token:`` (an accepted response of a single word, number
or sign).
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
    """The type of an instruction's argument.

    Args:
        kind: ``text`` (not blank), ``texts`` (a list of them, not empty), ``letter`` (one character), ``integer``
            (``5.0`` is one, ``True`` is not) or ``number``.
        minimum: of an integer or number.
        choices: the allowed texts; empty allows all.

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
        """What the value should have been; None if it is valid."""
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
        """The value, converted for the check."""
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
        check: ``check(text, **arguments) -> bool``; pure, linear in the text, raises for no text.
        arguments: by name; all are required.
        needs: packages and data that the check uses.
        consistent: returns what is wrong with a combination of valid arguments, or None.

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
        """The arguments of a data row, checked and converted; null means absent, 5.0 is an integer.

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
    """Instructions by id, each repaired form after its official one.

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
        """Register a check under an official id, and its repaired form if it has a parameter ``fixed``."""

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
