"""What an audit says of one place."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A place worth a look, why, and where that is written.

    Args:
        rule: short name of what was looked for, such as ``epochs``.
        place: a recipe's key, or a file and its line.
        said: what stands there.
        reason: what it does to training.
        remedy: what to do, as an imperative sentence.
        source: where the reason can be read.

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


def in_words(findings: Sequence[Finding], looked_for: int) -> str:
    """All findings below each other, and a last line with their number.

    Args:
        findings: in the order in which they are shown.
        looked_for: number of rules.

    Example:
        >>> in_words([], 12)
        'nothing found; 12 rules'
    """
    number = "nothing found" if not findings else f"{len(findings)} found"
    return "\n".join([*map(str, findings), f"{number}; {looked_for} rules"])
