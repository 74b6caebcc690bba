"""Why each rank ended, in the ranks' common store.

A rank whose collective fails knows that another rank is gone, not which one. So each rank that ends with an error
records it, and a rank that only lost its connection reads what the others recorded. A rank without a record was killed,
or hangs.
"""

import json
import time

from torch._C._distributed_c10d import Store

GRACE_SECONDS = 5.0
"""How long a rank waits for the others' records."""

MOST_CHARACTERS = 1000
"""Of an error's text."""


def in_one_line(error: BaseException) -> str:
    """An error's class and text, as another rank reports it.

    Example:
        >>> in_one_line(OSError(28, "No space left on device")), in_one_line(KeyboardInterrupt())
        ('OSError: [Errno 28] No space left on device', 'KeyboardInterrupt')
    """
    text = " ".join(str(error).split())[:MOST_CHARACTERS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class ExitReasons:
    """The exit reasons of all ranks.

    Args:
        store: common to the ranks.
        rank: this one.
        world: number of ranks.

    Example:
        >>> from torch.distributed import HashStore
        >>> exit_reasons = ExitReasons(HashStore(), 0, 1)
        >>> exit_reasons.record("out of memory", lost=False)
        >>> exit_reasons.of_others()
        []
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._store = store

    def record(self, text: str, *, lost: bool) -> None:
        """Record why this rank ends.

        Args:
            text: the error.
            lost: whether only a connection was lost.
        """
        self._store.set(self._key(self.rank), json.dumps({"text": text, "lost": lost}))

    def of_others(self) -> list[str]:
        """What ended the other ranks: those without a record, and records other than of a lost connection."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        deadline = time.monotonic() + GRACE_SECONDS
        silent = self._without_record(others)
        while silent and time.monotonic() < deadline:
            time.sleep(0.05)
            silent = self._without_record(silent)
        found = [f"rank {rank}, which says nothing: killed, or hung" for rank in silent]
        for rank in others:
            if rank not in silent:
                record = json.loads(self._store.get(self._key(rank)))
                if not record["lost"]:
                    found.append(f"rank {rank}: {record['text']}")
        return found

    def _without_record(self, ranks: list[int]) -> list[int]:
        return [rank for rank in ranks if not self._store.check([self._key(rank)])]

    def _key(self, rank: int) -> str:
        return f"ended/{rank}"
