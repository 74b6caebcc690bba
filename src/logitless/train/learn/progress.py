"""How far training has come, and when it halved its micro-batches because memory was short."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Counters of training.

    Args:
        block: finished blocks.
        epoch: finished epochs of the current block.
        step_in_epoch: finished steps of the current epoch.
        step: optimizer steps done, skipped ones included.
        skipped, skipped_in_a_row: steps that were skipped because a gradient was not finite.
        halvings: the ``step`` at which memory was short and ``tokens_per_micro_batch`` was halved, for each time.
    """

    block: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    halvings: list[int] = field(default_factory=list)


def halvings(before: Iterable[int], records: Iterable[Mapping[str, Any]]) -> list[int]:
    """Steps at which a run halved its micro-batches, for a resumed run to halve them at the same steps.

    Where the count falls, the run was resumed with another micro-batch size, and earlier halvings do not count.

    Args:
        before: those of the checkpoint.
        records: lines of ``metrics.jsonl`` after the checkpoint.

    Example:
        >>> halvings([1], [{"step": 2, "optimizer/halvings": 1}, {"step": 3, "optimizer/halvings": 3}, {"step": 3}])
        [1, 2, 2]
        >>> halvings([1], [{"step": 3, "optimizer/halvings": 0}])
        []
    """
    found = list(before)
    for record in records:
        if "optimizer/halvings" in record:
            count = int(record["optimizer/halvings"])
            found = [] if count < len(found) else found + [record["step"] - 1] * (count - len(found))
    return found
