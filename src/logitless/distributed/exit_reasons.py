"""Why each rank ended, in the ranks' common store.

A rank whose collective fails knows that another rank is gone, not which one. So each rank that ends with an error
records it, and a rank that only lost its connection reads what the others recorded. A rank without a record was killed,
or hangs. Where all ranks of a node have none, the node is named.
"""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread

from torch._C._distributed_c10d import Store

GRACE_SECONDS = 5.0
"""How long a rank waits for the others' records."""

STORE_SECONDS = 10.0
"""How long it waits for the store besides."""

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


@dataclass(frozen=True)
class Node:
    """A machine of the run.

    Args:
        has_store: whether the address of the ranks' store is one of its own.

    Example:
        >>> str(Node("b", (2, 3), False))
        'node b (ranks 2, 3)'
    """

    host: str
    ranks: tuple[int, ...]
    has_store: bool

    def __str__(self) -> str:
        return f"node {self.host} (rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))})"


class ExitReasons:
    """The exit reasons of all ranks.

    Args:
        nodes: of the run; only several are named. Set once the ranks are connected.

    Example:
        >>> from torch.distributed import HashStore
        >>> exit_reasons = ExitReasons(HashStore(), 0, 1)
        >>> exit_reasons.record("out of memory", lost=False)
        >>> exit_reasons.of_others()
        []
    """

    def __init__(self, store: Store, rank: int, world: int, nodes: Sequence[Node] = ()) -> None:
        self.rank, self.world, self.nodes = rank, world, nodes
        self._store = store

    @property
    def _others(self) -> list[Node]:
        return [node for node in self.nodes if self.rank not in node.ranks]

    def exchanged(self, text: str, *, lost: bool) -> list[str]:
        """Record why this rank ends; where only a connection was lost, what ended the other ranks.

        A store that does not answer ended with its process, or its node is cut off.
        """
        found: list[list[str]] = []

        def exchange() -> None:
            with suppress(RuntimeError):
                self.record(text, lost=lost)
                found.append(self.of_others() if lost else [])

        # A thread, for no timeout bounds what is sent to a machine that is silent.
        thread = Thread(target=exchange, name="exit reasons", daemon=True)
        thread.start()
        thread.join(GRACE_SECONDS + STORE_SECONDS)
        if found:
            return found[0]
        nodes = [f"{node}, which holds the ranks' store" for node in self._others if node.has_store]
        return nodes or ["the rank that started first, and perhaps others"]

    def record(self, text: str, *, lost: bool) -> None:
        """Record why this rank ends."""
        self._store.set(self._key(self.rank), json.dumps({"text": text, "lost": lost}))

    def of_others(self) -> list[str]:
        """What ended the other ranks: those without a record, and records other than of a lost connection."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        deadline = time.monotonic() + GRACE_SECONDS
        silent = self._without_record(others)
        while silent and time.monotonic() < deadline:
            time.sleep(0.05)
            silent = self._without_record(silent)
        lost = [node for node in self._others if {*node.ranks} <= {*silent}]
        found = [f"{node}, which says nothing: lost, or hung" for node in lost]
        alone = [rank for rank in silent if not any(rank in node.ranks for node in lost)]
        found += [f"rank {rank}, which says nothing: killed, or hung" for rank in alone]
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
