"""Findings of an audit, and the decorator that makes rules which return them."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import TypeAlias, TypeVar

Places: TypeAlias = Iterator[tuple[str, str]]
"""Pairs of a place (a recipe's key, or a file and its line) and what was found there."""

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Finding:
    """A likely mistake: where it is, why it matters, and what to do.

    Args:
        place: a recipe's key, or a file and its line.
        remedy: what to do, as an imperative sentence.
        source: a paper or page with the reason.

    Example:
        >>> print(Finding("epochs", "train.epochs_per_block", "8", "It drifts.", "Lower it.", "a paper"))
        train.epochs_per_block: 8 [epochs]
            It drifts. Lower it. (a paper)
    """

    rule: str
    place: str
    said: str
    reason: str
    remedy: str
    source: str

    def __str__(self) -> str:
        return f"{self.place}: {self.said} [{self.rule}]\n    {self.reason} {self.remedy} ({self.source})"


def rule(name: str) -> Callable[[Callable[[Subject], Places]], Callable[[Subject], list[Finding]]]:
    """Turn a function that yields places into a rule; reason, remedy and source come from its docstring.

    Example:
        >>> @rule("epochs")
        ... def many(epochs):
        ...     '''More than four.
        ...
        ...     Reason: It drifts.
        ...     Remedy: Lower it.
        ...     Source: a paper
        ...     '''
        ...     if epochs > 4:
        ...         yield "train.epochs_per_block", str(epochs)
        >>> many(8) == [Finding("epochs", "train.epochs_per_block", "8", "It drifts.", "Lower it.", "a paper")]
        True
    """

    def of(find: Callable[[Subject], Places]) -> Callable[[Subject], list[Finding]]:
        parts = re.split(r"^(Reason|Remedy|Source): ", inspect.getdoc(find) or "", flags=re.MULTILINE)
        said = {name.lower(): " ".join(text.split()) for name, text in zip(parts[1::2], parts[2::2], strict=True)}

        @wraps(find)
        def found(subject: Subject) -> list[Finding]:
            return [Finding(name, place, what, **said) for place, what in find(subject)]

        return found

    return of
