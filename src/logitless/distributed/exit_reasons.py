"""Exit reasons of ranks, kept in their store, so that a broken connection gets a name.

A rank whose collective fails knows that another is gone, not which. So each rank that ends with an error writes it
down, and one that only lost its connection reads what the others wrote. A rank without a reason was killed, or hangs.
"""

import json
import time

from torch._C._distributed_c10d import Store

GRACE_SECONDS = 5.0
"""How long a rank waits for the others' reasons."""


MOST_CHARACTERS = 1000
"""Of an error's text that another rank repeats."""


def in_one_line(error: BaseException) -> str:
    """An error as another rank repeats it.

    Example:
        >>> in_one_line(OSError(28, "No space left on device")), in_one_line(KeyboardInterrupt())
        ('OSError: [Errno 28] No space left on device', 'KeyboardInterrupt')
    """
    text = " ".join(str(error).split())[:MOST_CHARACTERS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class ExitReasons:
    """The exit reasons of all ranks.

    Args:
        store: that the ranks met in.
        rank: this one.
        world: number of ranks.

    Example:
        >>> from torch.distributed import HashStore
        >>> roll = ExitReasons(HashStore(), 0, 1)
        >>> roll.say("out of memory", lost=False)
        >>> roll.of_others()
        []
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._store = store

    def say(self, text: str, *, lost: bool) -> None:
        """Write down why this rank ends.

        Args:
            text: the error.
            lost: whether it is only a lost connection.
        """
        self._store.set(self._key(self.rank), json.dumps({"text": text, "lost": lost}))

    def of_others(self) -> list[str]:
        """The ranks without a reason, and the reasons other than a lost connection."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        until = time.monotonic() + GRACE_SECONDS
        while (silent := [rank for rank in others if not self._store.check([self._key(rank)])]) and (
            time.monotonic() < until
        ):
            time.sleep(0.05)
        found = [f"rank {rank}, which says nothing: killed, or hung" for rank in silent]
        for rank in others:
            if rank not in silent and not (said := json.loads(self._store.get(self._key(rank))))["lost"]:
                found.append(f"rank {rank}: {said['text']}")
        return found

    def _key(self, rank: int) -> str:
        return f"ended/{rank}"
